"""Every fault of the table, in every mode: nothing hangs, nothing is silently wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.netns import Host
from fault_harness import newest_is_right, some_hosts, verdict
from fault_table import MODES, TRIALS, References, run_named

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host] | None]:
    with some_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def references(hosts: list[Host] | None, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(MODES, hosts, tmp_path_factory.mktemp("references"))


NAMED = "|".join(
    [
        r"rank \d: [\w ]+ failed: .*(from|to) rank \d",
        r"failed on rank \d",
        r"rank \d is [\w ]+ where rank \d is [\w ]+;",
        r"rank \d: waiting for DDP's hook failed",  # Gloo does not say for whom
    ]
)
"""The operation that waits, and the peer."""


@pytest.mark.parametrize("name", TRIALS)
def test_a_fault_neither_hangs_nor_changes_numbers(
    name: str, hosts: list[Host] | None, references: References, tmp_path: Path
) -> None:
    trial = TRIALS[name]
    reference = references[trial.reference]
    for mode, jobs in run_named(name, trial.modes, hosts, tmp_path).items():
        for outcome in jobs:
            right = reference[mode][0]
            said = [(rank.code, f"{rank.seconds:.1f} s", rank.error) for rank in outcome.ranks]
            assert trial.allows(verdict(outcome, right), mode), (mode, said)
            if trial.fault.phase != "construct":
                assert newest_is_right(outcome, right) is not None, mode
            for rank in outcome.ranks:
                # Where DDP's own collective waits, the error is torch's, which names nothing.
                named = rank.is_ours or (mode == "module" and rank.is_torchs)
                assert not named or re.search(NAMED, str(rank.error)), (mode, said)
