"""Every fault of the table, in every mode: nothing hangs, nothing is silently wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.netns import Host
from fault_harness import Outcome, newest_is_right, run_trial, some_hosts, verdict
from fault_table import MODES, REFERENCES, TRIALS, run_named

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host] | None]:
    with some_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def references(
    hosts: list[Host] | None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, list[Outcome]]]:
    return {
        name: run_trial(MODES, fault, hosts, tmp_path_factory.mktemp("reference"), patience=60)
        for name, fault in REFERENCES.items()
    }


NAMED = r"rank \d+: \w+.* failed|on rank \d"


@pytest.mark.parametrize("name", TRIALS)
def test_a_fault_neither_hangs_nor_changes_numbers(
    name: str, hosts: list[Host] | None, references: object, tmp_path: Path
) -> None:
    trial = TRIALS[name]
    assert isinstance(references, dict)
    reference = references[trial.reference]
    for mode, jobs in run_named(name, trial.modes, hosts, tmp_path).items():
        for outcome in jobs:
            right = reference[mode][0]
            said = [(rank.code, f"{rank.seconds:.1f} s", rank.error) for rank in outcome.ranks]
            assert verdict(outcome, right) in trial.allowed, (mode, said)
            if trial.fault.phase != "construct":
                assert newest_is_right(outcome, right) is not None, mode
            for rank in outcome.ranks if mode == "module" else ():
                # In the other modes the error may come from DDP, which names nothing.
                ours = rank.error and "injected" not in rank.error
                assert not ours or re.search(NAMED, str(rank.error)), said
