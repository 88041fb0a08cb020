"""Writes docs/faults.md: every fault of the table in every mode, and in DDP.

    python tests/faults/write_table.py [PART OF A NAME ...]

Needs Linux and root: some faults need hosts. With names, only these rows are written again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / each) for each in (".", "src", "tests/support", "examples")]

import torch  # noqa: E402
from fault_harness import Outcome, some_hosts, verdict  # noqa: E402
from fault_job import TIMEOUT  # noqa: E402
from fault_table import MODES, TRIALS, References, run_named  # noqa: E402

HEADER = f"""# Faults

Each row is a fault in a job of two ranks, or of three where it says so, each on a separate host
(network namespaces, Gloo, torch {torch.__version__.partition("+")[0]}). The same trials are tests,
in `tests/faults/`. `python tests/faults/write_table.py` wrote this page. The timeout of the process
group was {TIMEOUT:g} s.

- **equal**: the job ended, and every loss and parameter equals that of a run without the fault.
- **skips the batch**: equal to a run without this batch. The loop calls `opt.recover()` when it
  catches the error; with DDP, `zero_grad()`.
- **raises at once**: every remaining rank raised within {TIMEOUT / 2:g} s.
- **raises after the timeout**: the same, {TIMEOUT:g} s later. Until then, a
  rank that is stopped or cut off looks like a slow one.
- **wrong numbers**: a step used other values than in the run without the fault.
- **°**: a remaining rank waited in a collective of DDP. Its error is torch's, which names neither
  the operation nor the rank.
- An empty cell: there is no such trial. DDP's job saves nothing. `recover()` needs `module=`. With
  `register` and the hooks, backward takes the step, so there is no closure and no step to skip.

With this library, no process outlived the timeout by 5 s, no number was wrong, and the newest
checkpoint loaded, in every trial. Where an operation of this library waits, in any mode, the error
of each remaining rank names this operation and the peer that it waits for. At three ranks this
peer may be one that has raised because of the failed rank. The interleaved hook names DDP's hook,
and no peer: torch does not say for which rank the hook waits. The message of a timeout says what to
look for.

A rank that ends with an error closes its connections before Python shuts down. Processes that it
forked, such as workers of a loader, do not keep them open. Seconds until the other ranks raise (2
and 3 ranks, plain processes on one busy machine):

| rank 1 | if it left them open | as it closes them |
|---|---|---|
| raises in the loader, forward or backward, `module=` | 0.4 to 1.1 | 0.00 to 0.08 |
| the same, `register` | 0.8 to 2.1 | 0.01 to 0.33, once 1.8 |
| is killed and has loader workers, `module=` | 5.1, as with DDP | 0.02 |
| raises in `step()`, which tells all ranks | 0.0 | 0.0 to 0.2 |
| raises in a closure, `module=` | 0.4 to 1.1 | the same |
| raises anywhere, drop-in | 1.4 to 2.7 | the same |

With the drop-in, the other ranks wait in DDP's all-reduce. With DDP alone, on a less busy machine,
this took 0.6 to 1.1 s.

**Calls that only one rank makes, with `module=`.** A rank sends a note with each round of
reductions, and tells with each step whether it succeeded. Two notes that meet are compared, and a
difference raises on every rank at once:

| one rank | it waits for | the others wait for | every rank |
|---|---|---|---|
| has other options, or loads | | | raises at once |
| catches an error of its closure | | | raises at once |
| clears gradients between two backward passes | | | raises at once |
| calls `recover()` | | | raises at once; all call `recover()` |
| steps once more after `zero_grad()` | | | raises at once, one step late |
| leaves a backward pass out | | | goes on: its gradients are zero |
| runs forward once more, without buffers | | | goes on |
| runs forward once more, with buffers | buffers | gradients | raises after the timeout |
| runs backward once more | gradients | its step | raises after the timeout |
| leaves a step out | gradients | its step | raises after the timeout |
| steps once more, without `zero_grad()` | a step | gradients | raises after the timeout |
| clips, unscales or asks for a norm | the norm | its step | raises after the timeout |
| leaves the loop a batch early | | gradients | raises after the timeout |

A step after `zero_grad()` makes a round without gradients, which meets the next round of the other
ranks. So one step is taken with gradients of zero from this rank: load the last checkpoint. If the
other ranks call something else next, as they save in the trial below, all wait until the timeout.

Where one rank waits for gradients and another for a step, both have sent a message, but with
different tags. The messages could meet if they shared tags, a connection and a length. That would
not help a model whose gradients take more than four messages: its backward pass waits for the first
of these before it sends its note. It would take one more note, at the start of each round.

The trials ran over Gloo. Over NCCL, waiting for the other ranks' notes would stall the accelerator,
so a step that raises on one rank is noticed later. What happens depends on that rank
(`tests/nccl/test_nccl.py` has tests of all but the watchdog; no run with
`recoverable=True` is recorded):

- The rank catches the error and continues. Its next note counts one more `step()` that raised.
  On an accelerator, notes are compared one step late: the first step after the failed one is taken,
  and the second raises `OutOfStepError` on every rank, before it updates anything. Parameters stay
  equal on all ranks meanwhile. Load the last checkpoint.
- With `module=` and `recoverable=True` the host waits for the notes. Then the first step after the
  failed one raises, and a batch that failed in the loader, forward or backward is skipped as above.
- The error ends the process. The others wait in their next collective. `torchrun` ends them as soon
  as one process has failed; elsewhere NCCL's watchdog does, after the timeout of the process group.
  Its message names NCCL's operation, not ours; the cause is in the output of the failed rank.

| fault | DDP | {" | ".join(f"`{mode}`" for mode in MODES)} |
|---|---|{"---|" * len(MODES)}
"""


def cell(outcome: Outcome, reference: Outcome) -> str:
    """Return what became of the job, with a mark if torch raised an error."""
    torchs = outcome.mode != "ddp" and any(rank.is_torchs for rank in outcome.others)
    return verdict(outcome, reference) + " °" * torchs


def main() -> None:
    modes = ("ddp", *MODES)
    with some_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        references = References(modes, hosts, Path(folder) / "references")
        page = ROOT / "docs" / "faults.md"
        old = page.read_text().splitlines() if sys.argv[1:] else []
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
    page.write_text(HEADER + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
