"""The choice of a checkpoint to continue from, and the runs that checkpoints belong to."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import build, flip, names, picture, write_manifest
from problems import difference
from ranks import raises_on_every_rank, run_ranks
from torch import distributed as dist

from shardstep import checkpoint as ckpt
from shardstep.checkpoint.files import continue_run, run_id


def save(parent: Path, *steps: int) -> None:
    net, opt = build(1, 2)
    for step in steps:
        opt.param_groups[0]["lr"] = float(step)
        ckpt.save(parent / f"step-{step}", opt, net, {"step": step}, keep_last=5)


def resumed(parent: Path) -> int | None:
    """Resume, and return the step. All ranks have chosen the same."""
    net, opt = build(3, 1)
    said = pytest.warns(UserWarning, match="resuming from .*step-1, not from .*step-3")
    with said if dist.get_rank() == 0 else nullcontext():
        loaded = ckpt.resume(parent, opt, net)
    return None if loaded is None else loaded.extra["step"]


@pytest.mark.parametrize("file", ["optimizer-00002", "model-00001", "contents", "checkpoint"])
def test_a_damaged_newest_checkpoint_is_passed_over_on_all_ranks(tmp_path: Path, file: str) -> None:
    run_ranks(save, 2, tmp_path, 1, 2, 3)
    (damaged,) = (tmp_path / "step-3").glob(f"{file}*")
    flip(damaged)
    os.truncate(next((tmp_path / "step-2").glob("model*")), 10)
    with pytest.raises(ckpt.CheckpointError, match=damaged.name):
        ckpt.verify(tmp_path / "step-3")
    newest = ckpt.latest(tmp_path)
    # `latest` reads the descriptions, not the tensors.
    assert newest == tmp_path / ("step-1" if file in ("contents", "checkpoint") else "step-3")
    assert run_ranks(resumed, 2, tmp_path) == [1, 1]
    # The names are free for the run that goes on.
    assert names(tmp_path) == ["step-1", "step-2.damaged", "step-3.damaged"]
    assert ckpt.latest(tmp_path) == tmp_path / "step-1"
    assert [Path(each["path"]).name for each in ckpt.listing(tmp_path)["checkpoints"]] == ["step-1"]


def test_keep_last_does_not_count_a_checkpoint_that_was_found_damaged(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ckpt.save(tmp_path / f"step-{step}", extra=torch.full((100,), step), keep_last=2)
    flip(tmp_path / "step-3" / "extra.safetensors")
    with pytest.warns(UserWarning, match="resuming from .*step-2, not from .*step-3"):
        ckpt.resume(tmp_path)
    ckpt.save(tmp_path / "step-3", extra=3, keep_last=2)
    assert names(tmp_path) == ["step-2", "step-3", "step-3.damaged"]
    flip(tmp_path / "step-3" / "contents.json")
    with pytest.warns(UserWarning, match=r"it is now .*step-3\.2\.damaged"):
        ckpt.resume(tmp_path)
    ckpt.save(tmp_path / "step-3", extra=3, keep_last=2)
    flip(tmp_path / "step-3" / "contents.json")
    (tmp_path / "step-2").rename(tmp_path / "step-2.damaged")
    with pytest.raises(ckpt.CheckpointError, match=r"no checkpoint in .*`resume` found it"):
        ckpt.resume(tmp_path)


def test_there_is_nothing_to_resume_from_or_nothing_that_loads(tmp_path: Path) -> None:
    net, opt = build(1, 1)
    before = picture(net, opt)
    assert ckpt.resume(tmp_path / "new", opt, net) is None
    ckpt.save(tmp_path / "step-1", opt, net)
    flip(tmp_path / "step-1" / "model.safetensors")
    with pytest.raises(ckpt.CheckpointError, match=r"no checkpoint in .* can be loaded.*model"):
        ckpt.resume(tmp_path, opt, net)
    assert difference(before, picture(net, opt)) is None
    assert names(tmp_path) == ["step-1"]


@pytest.mark.parametrize("find", [ckpt.resume, ckpt.latest])
def test_a_checkpoint_in_place_of_its_folder_is_refused(tmp_path: Path, find: Any) -> None:
    ckpt.save(tmp_path / "step-1", extra=1)
    with pytest.raises(ckpt.CheckpointError, match=r"step-1 is a checkpoint; pass the folder"):
        find(tmp_path / "step-1")


def other_model(parent: Path) -> None:
    ckpt.resume(parent, model=torch.nn.Linear(3, 2))


def test_a_checkpoint_that_does_not_fit_is_not_passed_over(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path, 1, 2)
    raises_on_every_rank(other_model, 2, (ckpt.CheckpointError, RuntimeError), tmp_path)
    assert names(tmp_path) == ["step-1", "step-2"]


def test_keep_last_counts_the_checkpoints_of_the_run_that_was_resumed(tmp_path: Path) -> None:
    """`load` starts another run from a checkpoint; `resume` continues its run."""

    def restart() -> None:
        continue_run(f"another than {run_id()}")

    first = run_id()
    try:
        for step in (1, 2):
            ckpt.save(tmp_path / f"step-{step}", extra=step, keep_last=2)
        restart()
        ckpt.load(tmp_path / "step-2")
        ckpt.save(tmp_path / "other", extra=0, keep_last=1)
        ckpt.save(tmp_path / "other-2", extra=0, keep_last=1)
        assert names(tmp_path) == ["other-2", "step-1", "step-2"]
        (tmp_path / "other-2").rename(tmp_path.parent / "elsewhere")
        restart()
        assert ckpt.resume(tmp_path).extra == 2  # type: ignore[union-attr]
        ckpt.save(tmp_path / "step-3", extra=3, keep_last=2)
        assert names(tmp_path) == ["step-2", "step-3"]
    finally:
        continue_run(first)


def test_checkpoints_from_before_runs_had_ids_are_not_taken_for_one_run(tmp_path: Path) -> None:
    first = run_id()
    for step in (1, 2):
        path = ckpt.save(tmp_path / f"step-{step}", extra=step)
        manifest = json.loads((path / "checkpoint.json").read_text())
        del manifest["run"]
        write_manifest(path, manifest)
    ckpt.resume(tmp_path)
    assert run_id() == first
    ckpt.save(tmp_path / "step-3", extra=3, keep_last=1)
    assert names(tmp_path) == ["step-1", "step-2", "step-3"]


@contextmanager
def as_another_user() -> Iterator[None]:
    """Root reads everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_checkpoint_that_may_not_be_read_keeps_its_name() -> None:
    """It may be intact, and another user's."""
    with tempfile.TemporaryDirectory() as folder:
        parent = Path(folder)
        parent.chmod(0o777)
        for step in (1, 2):
            ckpt.save(parent / f"step-{step}", extra=torch.full((100,), step))
        (parent / "step-2" / "extra.safetensors").chmod(0)
        warned = pytest.warns(UserWarning, match=r"not from .*step-2, .*Permission denied\)$")
        with as_another_user(), warned:
            assert ckpt.resume(parent).extra[0] == 1  # type: ignore[union-attr]
        assert names(parent) == ["step-1", "step-2"]


@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_a_folder_that_cannot_be_read_says_so(mode: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        parent = Path(folder) / "run"
        path = ckpt.save(parent / "step-1", extra=torch.ones(1000))
        for closed in (path, parent):
            closed.chmod(mode)
            with as_another_user():
                for read in (ckpt.verify, ckpt.summary, ckpt.load):
                    with pytest.raises(ckpt.CheckpointError, match="Permission denied"):
                        read(path)
                with pytest.raises(ckpt.CheckpointError, match="Permission denied"):
                    ckpt.resume(parent)
                with pytest.raises(ckpt.CheckpointError, match="Permission denied"):
                    ckpt.is_checkpoint(path)
            closed.chmod(0o755)


def test_inspect_sees_what_verify_sees(tmp_path: Path) -> None:
    """A file that is gone, replaced by a link, or of another checkpoint with the same lengths."""
    for number, damage in enumerate(("gone", "link", "swapped")):
        path = ckpt.save(tmp_path / f"{number}", extra={"a": torch.ones(1000)})
        file = path / "extra.safetensors"
        if damage == "swapped":
            other = ckpt.save(tmp_path / "other", extra={"b": torch.ones(1000)})
            file.write_bytes((other / file.name).read_bytes())
        else:
            file.rename(tmp_path / "away")
        if damage == "link":
            file.symlink_to(tmp_path / "away")
        assert file.name in ckpt.summary(path)["damage"]
        with pytest.raises(ckpt.CheckpointError, match=file.name):
            ckpt.verify(path)
