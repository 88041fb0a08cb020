"""Writes the table of docs/faults.md: every fault in every mode, and in DDP.

    python tests/faults/write_table.py [PART OF A NAME ...]

Needs Linux and root: some faults need hosts. With names, only these rows are written again. The
text before the table stays, but for the version of torch.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / each) for each in (".", "src", "tests/support", "examples")]

import torch  # noqa: E402
from fault_harness import Outcome, some_hosts, verdict  # noqa: E402
from fault_job import TIMEOUT  # noqa: E402
from fault_table import MODES, TRIALS, References, run_named  # noqa: E402

HEADING = f"| fault | DDP | {' | '.join(f'`{mode}`' for mode in MODES)} |\n"
"""The line above the rows. What stands before it on the page stays."""


def cell(outcome: Outcome, reference: Outcome) -> str:
    """Return what became of the job, with a mark if torch raised an error."""
    torchs = outcome.mode != "ddp" and any(rank.is_torchs for rank in outcome.others)
    return verdict(outcome, reference) + "\u00a0°" * torchs


def main() -> None:
    modes = ("ddp", *MODES)
    with some_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        references = References(modes, hosts, Path(folder) / "references")
        page = ROOT / "docs" / "faults.md"
        before, _, table = page.read_text().partition(HEADING)
        line, *old = table.splitlines()
        rows = []
        for number, (name, trial) in enumerate(TRIALS.items()):
            if sys.argv[1:] and not any(part in name for part in sys.argv[1:]):
                rows += [line for line in old if line.startswith(f"| {name} |")]
                continue
            ran = [mode for mode in modes if mode in ("ddp", *trial.modes)]
            if trial.small_disk or trial.fault.phase == "save" or len(trial.jobs) > 1:
                ran.remove("ddp")  # its job saves nothing
            outcomes = run_named(name, ran, hosts, Path(folder) / str(number))
            right = references[trial.reference]
            cells = [
                cell(outcomes[mode][0], right[mode][0]) if mode in ran else "" for mode in modes
            ]
            rows.append(f"| {name} | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    version = torch.__version__.partition("+")[0]
    before = re.sub(r"torch [\d.]+\d", f"torch {version}", before, count=1)
    assert f"was {TIMEOUT:g} s." in before, "the page names another timeout"
    page.write_text(before + HEADING + "\n".join([line, *rows]) + "\n")


if __name__ == "__main__":
    main()
