"""One process reshards and verifies checkpoints, atomically and in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hostile import edit_contents
from problems import difference, differing
from ranks import run_ranks
from test_checkpoint import AFTER, BEFORE, CASES, plain, sharded, take_steps
from torch import optim

from shardstep import checkpoint as ckpt
from shardstep.checkpoint import safetensors
from shardstep.checkpoint.files import digest_of, read_manifest
from shardstep.checkpoint.safetensors import Streamed

WRITTEN = (("AdamW", "sliced", 3), ("SGD", "whole", 2), ("Adafactor", "whole", 3))
RANKS = (1, 2, 3)


def save_one(root: Path, case: str, layout: str, where: str) -> None:
    net, opt = sharded(case, layout)
    take_steps(net, opt, BEFORE)
    ckpt.save(root / where, opt, net, {"step": 3, "seen": torch.arange(100), "pair": (1, None)})


def save_all(root: Path, world_size: int) -> None:
    for case, (_, _, layouts) in CASES.items():
        for layout in layouts:
            save_one(root, case, layout, f"{case}-{layout}-{world_size}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for world_size in RANKS:
        run_ranks(save_all, world_size, root, world_size)
    return root


@pytest.fixture
def small(tmp_path: Path) -> Path:
    save_one(tmp_path, "AdamW", "sliced", "small")
    return tmp_path / "small"


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return not differing(list(a.state_dict().values()), list(b.state_dict().values()))


def read_plainly(path: Path) -> dict[str, torch.Tensor]:
    """A safetensors file as its specification says it is to be read, and no more."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    dtypes = {"F32": torch.float32, "I64": torch.int64}
    found = {}
    for name, entry in header.items():
        start, stop = (8 + length + each for each in entry["data_offsets"])
        raw = torch.frombuffer(bytearray(data[start:stop]), dtype=dtypes[entry["dtype"]])
        found[name] = raw.view(entry["shape"])
    return found


def read_by_index(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {name: read_plainly(folder / file)[name] for name, file in index["weight_map"].items()}


def assert_same_weights(found: dict[str, torch.Tensor], path: Path) -> None:
    expected = ckpt.weights(path)
    expected.pop("head.weight")  # the same tensor as table.weight: once in the file
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def digests(path: Path, *kinds: str) -> dict[str, str]:
    files = read_manifest(path).files
    return {name: each.sha256 for name, each in files.items() if name.startswith(kinds)}


def contents_of(path: Path) -> tuple[Any, Any, Any]:
    return ckpt.state_dict(path), ckpt.weights(path), ckpt.load(path).extra


# ------------------------------------------------------------------------------------ reshard


@pytest.mark.parametrize(("case", "layout", "world_size"), WRITTEN)
@pytest.mark.parametrize("ranks", RANKS)
def test_resharding_writes_the_files_that_those_ranks_would_have_written(
    saved: Path, tmp_path: Path, case: str, layout: str, world_size: int, ranks: int
) -> None:
    original = saved / f"{case}-{layout}-{world_size}"
    made = ckpt.reshard(original, tmp_path / "made", ranks, layout)
    ckpt.verify(made)
    assert difference(contents_of(made), contents_of(original)) is None
    expected = saved / f"{case}-{layout}-{ranks}"
    assert digests(made, "optimizer", "extra") == digests(expected, "optimizer", "extra")
    weights = digests(made, "model-" if ranks > 1 else "model.safetensors")
    assert len(weights) == ranks


def read_resharded(paths: list[tuple[str, str, Path]]) -> None:
    opening = safetensors.File.__init__
    for case, layout, path in paths:
        net, opt = sharded(case, layout)
        with mock.patch.object(
            safetensors.File, "__init__", autospec=True, side_effect=opening
        ) as opened:
            ckpt.load(path, opt, net)
        number = f"-{opt.rank + 1:05}-of-{opt.world_size:05}.safetensors"
        mine = {f"model{number}", f"optimizer{number}", "extra.safetensors"}
        assert {call.args[1].name for call in opened.call_args_list} == mine
        take_steps(net, opt, AFTER)
        expected, _ = plain(case, range(BEFORE.start, AFTER.stop))
        assert same_weights(expected, net), path


def test_ranks_that_it_was_cut_for_read_one_file_each_and_go_on(
    saved: Path, tmp_path: Path
) -> None:
    paths = []
    for case, layout, world_size in WRITTEN:
        original = saved / f"{case}-{layout}-{world_size}"
        paths.append((case, layout, ckpt.reshard(original, tmp_path / case, 2)))
        if layout == "whole" and case == "SGD":  # cut as its class is by default
            paths[-1] = (case, "sliced", paths[-1][2])
    run_ranks(read_resharded, 2, paths)


def test_weights_are_one_file_for_one_rank_and_have_an_index_for_several(
    small: Path, tmp_path: Path
) -> None:
    alone = ckpt.reshard(small, tmp_path / "alone", 1)
    assert set(digests(alone, "model")) == {"model.safetensors"}
    several = ckpt.reshard(alone, tmp_path / "several", 2)
    made_by = ckpt.summary(several)["made_by"]
    assert made_by["world_size"] == 2
    assert made_by["cut_from"] == ckpt.summary(small)["made_by"], "the first maker is remembered"
    assert_same_weights(read_by_index(several), small)


@pytest.mark.parametrize(
    "act",
    [
        lambda path, out: ckpt.reshard(path, out, 2),
        lambda path, out: ckpt.export(path, out),
        lambda path, out: ckpt.export(path, out, "safetensors"),
    ],
    ids=["reshard", "torch", "safetensors"],
)
def test_what_is_written_is_complete_or_not_there(
    act: Callable[[Path, Path], Any], small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    made.write_text("mine")
    with pytest.raises(FileExistsError):
        act(small, made)
    assert made.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["made", "small"]
    made.unlink()
    read, reads = safetensors.File.read, count(1)

    def fails_at_the_fifth(*args: Any) -> None:
        if next(reads) == 5:
            raise OSError("the disk is gone")
        read(*args)

    monkeypatch.setattr(safetensors.File, "read", fails_at_the_fifth)
    with pytest.raises(OSError, match="the disk is gone"):
        act(small, made)
    assert os.listdir(tmp_path) == ["small"]


MEASURE = """
    import os, sys, threading, time
    import torch
    from shardstep import checkpoint as ckpt

    def held():  # all that is resident, and what of it is the process's own and no file's
        text = open("/proc/self/status").read()
        return [int(text.partition(key)[2].split()[0]) * 1024 for key in ("VmRSS:", "RssAnon:")]

    def peak(act, *args):
        most = before = held()
        thread = threading.Thread(target=act, args=args)
        thread.start()
        while thread.is_alive():
            most = list(map(max, most, held()))
            time.sleep(0.001)
        return most[0] - before[0], most[1] - before[1]

    os.chdir(sys.argv[1])
    torch.save({"warm": torch.zeros(1)}, "warm")
    print(*peak(ckpt.reshard, "large", "cut", 3))
    print(*peak(ckpt.reshard, "cut", "again", 1))
    print(*peak(ckpt.export, "cut", "torch"))
    print(*peak(ckpt.export, "cut", "safetensors", "safetensors"))
    print(*peak(ckpt.import_file, "torch", "imported"))
    print(*peak(ckpt.verify, "large"))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    # 200 MB: a matrix of 64 MiB, and its optimizer's state of two more.
    net = torch.nn.Linear(4096, 4096, bias=False)
    opt = optim.AdamW(net.parameters())
    for key in ("exp_avg", "exp_avg_sq"):
        opt.state[net.weight][key] = torch.rand(4096, 4096)
    opt.state[net.weight]["step"] = torch.tensor(1.0)
    large = ckpt.import_state_dict(
        tmp_path / "large", opt.state_dict(), net.state_dict(), names=["weight"]
    )
    assert sum(file.stat().st_size for file in large.iterdir()) > 200 * 10**6
    script = [sys.executable, "-c", textwrap.dedent(MEASURE), str(tmp_path)]
    done = subprocess.run(script, check=True, capture_output=True, text=True, timeout=100)
    peaks = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(peaks) == 6
    # Two chunks of 16 MiB, and what torch and Python need to import and to list things.
    bound = 60 * 2**20
    cut, again, exported, weights, imported, verified = peaks
    assert max(all_of_it for all_of_it, _ in (cut, again, weights, verified)) < bound
    # In files that are mapped: a tensor, and what is imported, which the system may drop.
    assert exported[0] < bound + net.weight.nbytes
    assert max(exported[1], imported[1]) < bound
    assert digests(tmp_path / "again", "optimizer", "model") == digests(large, "optimizer", "model")
    assert digests(tmp_path / "imported", "model") == digests(large, "model")
    assert digests(tmp_path / "imported", "optimizer") == digests(large, "optimizer")


# -------------------------------------------------------------------------------------- verify


@pytest.mark.parametrize(
    ("tensor", "change", "match"),
    [
        (
            "scale",
            lambda stored: stored["chunks"][0].__setitem__(1, "other"),
            r"model\.safetensors: chunk 'other' of model tensor 'scale' is missing",
        ),
        ("unused", lambda stored: stored.update(dtype="int32"), r"float32 of shape .130,. there"),
    ],
)
def test_verify_finds_a_file_of_another_checkpoint(
    small: Path, tensor: str, change: Callable[[Any], None], match: str
) -> None:
    assert ckpt.verify(small)[1] == len(ckpt.summary(small, tensors=True)["tensors"])
    edit_contents(small, lambda said: change(said["model"]["tensors"][tensor]))
    with pytest.raises(ckpt.CheckpointError, match=match):
        ckpt.verify(small)


def test_chunks_that_overlap_and_leave_a_gap_are_refused(tmp_path: Path) -> None:
    state = {
        "state": {0: {"momentum_buffer": torch.ones(128, 64)}},
        "param_groups": [{"params": [0], "momentum": 0.9}],
    }
    whole = ckpt.import_state_dict(tmp_path / "whole", state, optimizer_class="SGD")
    path = ckpt.reshard(whole, tmp_path / "cut", 2)

    def twice(said: Any) -> None:
        (stored,) = said["optimizer"]["params"][0]["state"]["stored"].values()
        (_, _, first, size), (_, _, second, same) = stored["chunks"]
        assert (first, second) == ([0, 0], [64, 0])
        assert size == same
        # As many elements as before and every chunk in its file, but the second half is missing.
        second[0] = 0

    edit_contents(path, twice)
    for read in (ckpt.verify, ckpt.state_dict):
        with pytest.raises(ckpt.CheckpointError, match=r"shape \(128, 64\) overlap"):
            read(path)


# -------------------------------------------------------------------------------- small things


def test_a_tensor_is_written_as_it_is_read_in_whatever_stretches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        "cube": torch.randn(5, 7, 11),
        "row": torch.randn(1, 97),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "bytes": torch.arange(100, dtype=torch.uint8),
    }
    safetensors.write(tmp_path / "at-once", tensors)
    monkeypatch.setattr(safetensors, "CHUNK_NBYTES", 52)

    def streamed(tensor: torch.Tensor) -> Streamed:
        def read(box: Any, target: torch.Tensor) -> None:
            assert target.nbytes <= 52
            assert target.is_contiguous()
            target.copy_(tensor[tuple(map(lambda o, s: slice(o, o + s), box.offsets, box.sizes))])

        return Streamed(tensor.dtype, tuple(tensor.shape), read)

    told: list[int] = []
    sources = {name: streamed(tensor) for name, tensor in tensors.items()}
    digest = safetensors.write(tmp_path / "streamed", sources, progress=told.append)
    assert (tmp_path / "streamed").read_bytes() == (tmp_path / "at-once").read_bytes()
    assert digest == digest_of(tmp_path / "at-once")
    assert sum(told) == sum(tensor.nbytes for tensor in tensors.values())


def test_a_save_goes_on_when_another_s_folder_is_gone_at_a_second_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".other.saving").mkdir()

    def gone(look: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def patched(folder: Any) -> Any:
            if Path(folder).name == ".other.saving" and Path(folder).exists():
                os.rename(folder, tmp_path / "other")
            return look(folder)

        return patched

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, gone(getattr(os, name)))
    ckpt.save(tmp_path / "mine", extra=1)
    assert sorted(os.listdir(tmp_path)) == ["mine", "other"]


def test_what_a_killed_export_left_is_cleared_away(small: Path, tmp_path: Path) -> None:
    left = tmp_path / ".out.pt.saving"
    left.mkdir()
    (left / "export.pt").write_text("half")
    os.utime(left, (0, 0))
    assert [each["under_way"] for each in ckpt.listing(tmp_path)["unfinished"]] == [False]
    ckpt.export(small, tmp_path / "out.pt")
    assert sorted(os.listdir(tmp_path)) == ["out.pt", "small"]
