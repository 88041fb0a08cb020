"""The MPS daemon of a pytest process, against a script with the daemon's name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import on_nccl
import pytest
import torch.distributed as dist
from ranks import RankFailure, run_ranks
from shared_gpu import CONTROL, Service

DAEMON = """#!/bin/bash
if [ "$1" = -d ]; then
    {before}
    mkfifo "$CUDA_MPS_PIPE_DIRECTORY/control"
    (read < "$CUDA_MPS_PIPE_DIRECTORY/control") &
else
    read command
    if [ "$command" = quit ]; then {quit}; fi
fi
"""


def _daemon(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: str = ":",
    quit: str = 'echo > "$CUDA_MPS_PIPE_DIRECTORY/control"',
) -> Service:
    script = folder / CONTROL
    script.write_text(DAEMON.format(before=before, quit=quit))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return Service(folder / "mps")


@pytest.mark.parametrize("quit", ['echo > "$CUDA_MPS_PIPE_DIRECTORY/control"', "exit 1"])
def test_a_daemon_ends_when_asked_or_by_force_and_another_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quit: str
) -> None:
    service = _daemon(tmp_path, monkeypatch, quit=quit)
    seen = set()
    for _ in range(2):
        service.start()
        service.start()  # runs already
        assert service.running
        seen.update(service.processes())
        service.stop()
        assert service.processes() == []
        assert (service.running, service.refusal) == (False, "")
    assert len(seen) == 2
    assert not (tmp_path / "mps").exists()


def test_ranks_run_without_a_daemon_that_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = _daemon(tmp_path, monkeypatch, before="exit 3")
    service.start()
    assert not service.running
    assert "exit status 3" in service.refusal
    service.start()
    service.stop()
    assert not (tmp_path / "mps").exists()
    monkeypatch.setenv("SHARDSTEP_NO_MPS", "1")
    assert "SHARDSTEP_NO_MPS" in Service(tmp_path).refusal


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


def _one_raises(text: str) -> None:
    if dist.get_rank() == 1:
        raise RuntimeError(text)


@pytest.mark.slow
def test_another_daemon_follows_a_failed_rank_but_none_an_error_of_mps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = _daemon(tmp_path, monkeypatch)
    monkeypatch.setattr(on_nccl, "MPS", service)
    monkeypatch.setattr(on_nccl, "_on_the_gpu", _call)
    monkeypatch.setattr(on_nccl, "_sum_of_ranks", int)
    ranks = lambda *args, backend, **kwargs: run_ranks(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(on_nccl, "run_ranks", ranks)
    seen = []
    for _ in range(2):
        assert on_nccl.run_on_nccl(int, 2, "7") == [7, 7]
        seen.append(service.processes())
        with pytest.raises(RankFailure, match="too bad"):
            on_nccl.run_on_nccl(_one_raises, 2, "too bad")
        assert service.processes() == []
    assert seen[0] != seen[1]
    with pytest.raises(RankFailure), pytest.warns(UserWarning, match="no MPS daemon"):
        on_nccl.run_on_nccl(_one_raises, 2, "MPS client terminated")
    assert service.refusal
    assert service.processes() == []


def _host() -> tuple[str, int, str]:
    os.environ["SOME_SETTING"] = "1"
    del os.environ["SOME_SETTING"]
    assert dist.is_initialized()
    return os.environ["NCCL_HOSTID"], os.getpid(), os.environ["CUDA_MPS_PIPE_DIRECTORY"]


def test_each_process_keeps_a_host_name_of_its_own() -> None:
    first, again = run_ranks(_host, 2), run_ranks(_host, 2)
    assert set(first) == set(again)  # a setting that was restored leaves no trace
    assert len({host for host, _, _ in first}) == 2
    assert {folder for *_, folder in first} == {f"/tmp/mps-{os.getpid()}/pipe"}
