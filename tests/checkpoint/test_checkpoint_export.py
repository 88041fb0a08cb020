"""Checkpoints go to other programs' formats and come back, without running code."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from problems import difference
from ranks import run_ranks
from test_checkpoint import AFTER, BEFORE, Net, flattened, plain, sharded, take_steps
from test_checkpoint_offline import (
    WRITTEN,
    assert_same_weights,
    read_by_index,
    read_plainly,
    same_weights,
    save_one,
)
from torch import optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer as Upstream

from shardstep import ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt
from shardstep.checkpoint import safetensors


@pytest.fixture
def small(tmp_path: Path) -> Path:
    save_one(tmp_path, "AdamW", "sliced", "small")
    return tmp_path / "small"


# -------------------------------------------------------------------------------------- export


@pytest.mark.parametrize(("case", "layout", "world_size"), WRITTEN)
def test_a_torch_file_has_what_the_plain_optimizer_would_have_saved(
    tmp_path: Path, case: str, layout: str, world_size: int
) -> None:
    run_ranks(save_one, world_size, tmp_path, case, layout, "saved")
    out = ckpt.export(tmp_path / "saved", tmp_path / "all.pt")
    loaded = torch.load(out, weights_only=True)
    net, opt = plain(case, BEFORE)
    assert list(loaded) == ["model", "optimizer", "extra"]
    assert loaded["extra"].keys() == {"step", "seen", "pair"}
    assert loaded["extra"]["pair"] == (1, None)
    fresh = Net()
    fresh.load_state_dict(loaded["model"])
    assert same_weights(net, fresh)
    expected = opt.state_dict()
    assert difference(loaded["optimizer"]["state"], expected["state"]) is None
    assert loaded["optimizer"]["param_groups"] == expected["param_groups"]


def test_parts_are_the_state_dicts_themselves_with_memory_of_their_own(
    small: Path, tmp_path: Path
) -> None:
    model = torch.load(ckpt.export(small, tmp_path / "m.pt", part="model"), weights_only=True)
    assert difference(model, ckpt.weights(small)) is None
    assert model["head.weight"].data_ptr() == model["table.weight"].data_ptr()
    out = ckpt.export(small, tmp_path / "o.pt", part="optimizer")
    optimizer = torch.load(out, weights_only=True)
    assert difference(optimizer, ckpt.state_dict(small)) is None
    for tensor in flattened(optimizer):  # none keeps another one's memory alive
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "no space left")])
def test_what_stops_an_export_is_raised_as_it_is(tmp_path: Path, error: BaseException) -> None:
    model = {f"w{number}": torch.ones(2**20) for number in range(4)}
    path = ckpt.import_state_dict(tmp_path / "saved", model=model)
    calls: Counter[str] = Counter()

    def stages(stage: str, nbytes: int) -> Callable[[int], None]:
        def progress(done: int) -> None:
            calls[stage] += 1
            if (stage, calls[stage]) == ("writing", 2):
                raise error

        return progress

    with pytest.raises(type(error)) as raised:
        ckpt.export(path, tmp_path / "all.pt", stages=stages)
    assert raised.value is error
    assert os.listdir(tmp_path) == ["saved"]


def test_names_are_as_torch_s_own_full_state_dicts_have_them(small: Path, tmp_path: Path) -> None:
    out = ckpt.export(small, tmp_path / "named.pt", "torch-named", part="optimizer")
    loaded = torch.load(out, weights_only=True)
    net, opt = plain("AdamW", BEFORE)
    expected = get_optimizer_state_dict(net, opt)
    assert loaded.keys() == expected.keys()
    # Theirs has empty state for a parameter that has none.
    known = {name: state for name, state in expected["state"].items() if state}
    assert difference(loaded["state"], known) is None
    for ours, theirs in zip(loaded["param_groups"], expected["param_groups"], strict=True):
        assert ours == {key: value for key, value in theirs.items() if key != "param_names"}


def save_without_names(path: Path) -> None:
    net = Net()
    opt = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    take_steps(net, opt, BEFORE)
    state = opt.state_dict()
    # The frozen and the unused one have no state, and so no shape that anybody could know.
    params = [key for key in state["param_groups"][0]["params"] if key in state["state"]]
    state["param_groups"][0]["params"] = params
    ckpt.import_state_dict(path, state)


@pytest.mark.parametrize("limit", [10**9, 4000])
def test_weights_are_in_files_as_hugging_face_has_them(
    small: Path, tmp_path: Path, limit: int
) -> None:
    out = ckpt.export(small, tmp_path / "hf", "safetensors", max_shard_nbytes=limit)
    if limit > 10**6:
        assert os.listdir(out) == ["model.safetensors"]
        assert_same_weights(read_plainly(out / "model.safetensors"), small)
        return
    assert_same_weights(read_by_index(out), small)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    assert len(list(out.iterdir())) == len(files) + 1, "and the index"
    for file in files:
        tensors = read_plainly(file)
        assert len(tensors) == 1 or sum(each.nbytes for each in tensors.values()) <= limit


def refusing_checkpoint(path: Path, kind: str) -> None:
    if kind == "numbers":
        save_without_names(path)
    elif kind == "weights":
        ckpt.import_state_dict(path, model={"a": torch.ones(40)})
    elif kind == "complex":
        ckpt.import_state_dict(path, model={"wave": torch.zeros(20, dtype=torch.complex64)})
    else:
        net, opt = sharded("AdamW", "sliced")
        ckpt.save(path, opt, net, {"losses": [deque([1.0], maxlen=9)]})


@pytest.mark.parametrize(
    ("kind", "to", "part", "match"),
    [
        ("numbers", "torch-named", "all", "have no names"),
        ("numbers", "safetensors", "all", "no model"),
        ("weights", "torch", "optimizer", "no optimizer"),
        ("complex", "safetensors", "all", r"'wave' is torch\.complex64"),
        ("deque", "torch", "all", r"extra has a deque at \['losses'\]\[0\]"),
        ("deque", "torch-named", "all", r"extra has a deque at \['losses'\]\[0\]"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_anything_is_made(
    tmp_path: Path, kind: str, to: Any, part: Any, match: str
) -> None:
    path = tmp_path / kind
    refusing_checkpoint(path, kind)
    with pytest.raises(ckpt.CheckpointError, match=match):
        ckpt.export(path, tmp_path / "out", to, part=part)
    assert os.listdir(tmp_path) == [kind]
    if kind == "deque":  # the other parts can be exported
        for other in ("model", "optimizer"):
            out = ckpt.export(path, tmp_path / f"{other}.pt", to, part=other)
            torch.load(out, weights_only=True)


# -------------------------------------------------------------------------------------- import


def wrapped(value: dict[str, Any]) -> dict[str, Any]:
    return {f"module._orig_mod.{name}": each for name, each in value.items()}


def unnamed(state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [
        {k: v for k, v in group.items() if k != "param_names"}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def goes_on_after(paths: list[Path]) -> None:
    expected, _ = plain("AdamW", range(BEFORE.start, AFTER.stop))
    for path in paths:
        net, opt = sharded("AdamW", "sliced")
        assert ckpt.load(path, opt, net).extra == {"epoch": 7}, path
        take_steps(net, opt, AFTER)
        assert same_weights(expected, net), path


def test_checkpoints_of_other_programs_go_on_to_the_bit(tmp_path: Path) -> None:
    net, opt = plain("AdamW", BEFORE)
    model, optimizer = net.state_dict(), opt.state_dict()
    names = [name for group in net.groups() for name, _ in group["params"]]
    assert "param_names" in optimizer["param_groups"][0]
    files: dict[str, tuple[Any, dict[str, Any]]] = {
        "ddp": ({"model": wrapped(model), "optimizer": optimizer, "epoch": 7}, {}),
        "lightning": (
            {"state_dict": model, "optimizer_states": [optimizer], "epoch": 7},
            {"optimizer_class": "AdamW"},
        ),
        "keys": (
            {"net": model, "adam": unnamed(optimizer), "epoch": 7},
            {"model_key": "net", "optimizer_key": "adam", "names": names},
        ),
        "named": (
            {"model": model, "optim": get_optimizer_state_dict(net, opt), "epoch": 7},
            {"optimizer_class": "torch.optim.adamw.AdamW"},
        ),
    }
    paths = []
    for name, (value, options) in files.items():
        torch.save(value, tmp_path / f"{name}.pt")
        paths.append(ckpt.import_file(tmp_path / f"{name}.pt", tmp_path / name, **options))
        ckpt.verify(paths[-1])
    # What was exported comes back.
    exported = ckpt.export(paths[0], tmp_path / "exported.pt")
    paths.append(ckpt.import_file(exported, tmp_path / "again"))
    run_ranks(goes_on_after, 2, paths)


@on_ranks(2)
def test_what_torch_s_own_class_consolidated_goes_on_here(tmp_path: Path) -> None:
    net = Net()
    params = [p for n, p in net.named_parameters() if p.requires_grad and n != "unused"]
    opt = Upstream(params, optim.AdamW, lr=0.01)
    take_steps(net, opt, BEFORE)
    opt.consolidate_state_dict(0)
    if opt.rank == 0:
        torch.save(opt.state_dict(), tmp_path / "upstream.pt")
        ckpt.import_file(tmp_path / "upstream.pt", tmp_path / "upstream", optimizer_class="AdamW")
    torch.distributed.barrier()
    again = Net()
    again.load_state_dict(net.state_dict())
    ours = [p for n, p in again.named_parameters() if p.requires_grad and n != "unused"]
    mine = ZeroRedundancyOptimizer(ours, optim.AdamW, lr=0.5)
    ckpt.load(tmp_path / "upstream", mine)
    for model, optimizer in ((net, opt), (again, mine)):
        take_steps(model, optimizer, AFTER)
    assert same_weights(net, again)


@pytest.mark.parametrize("links", [False, True])
def test_weights_from_hugging_face_s_folders_load(small: Path, tmp_path: Path, links: bool) -> None:
    source = ckpt.export(small, tmp_path / "hf", "safetensors", max_shard_nbytes=4000)
    if links:  # as in its download cache
        (tmp_path / "cache").mkdir()
        for file in source.iterdir():
            (tmp_path / "cache" / file.name).symlink_to(file)
        source = tmp_path / "cache"
    made = ckpt.import_file(source, tmp_path / "made")
    net = Net()
    for tensor in net.state_dict().values():
        tensor.zero_()
    ckpt.load(made, model=net)
    assert same_weights(net, plain("AdamW", BEFORE)[0])


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_files_from_before_torch_1_6_are_read_too(tmp_path: Path) -> None:
    model = {"a": torch.arange(40.0)}
    torch.save(model, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    made = ckpt.import_file(tmp_path / "old.pt", tmp_path / "made")
    assert difference(ckpt.weights(made), model) is None


def optimizer_file(state: Any, params: list[Any], **entries: Any) -> dict[str, Any]:
    return {"state": state, "param_groups": [{"params": params}], **entries}


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        ({"model": {"a": torch.ones(2)}, "bomb": Bomb()}, {}, "could run any code"),
        ([1, 2], {}, "expected a state dict, got a list"),
        ({"epoch": 3, "lr": 0.1}, {}, "neither a model nor an optimizer was found.*'epoch', 'lr'"),
        ({"model": {"a": torch.ones(2)}}, {"model_key": "net"}, "has no 'net'; it has 'model'"),
        ({"model": 3, "optimizer": {}}, {}, "'model' is a int, not a state dict"),
        ({"optimizer": {"state": 3}}, {}, "not the state dict of an optimizer"),
        (optimizer_file({}, [0]), {}, "'param 0' cannot be told from its state, since it has none"),
        (
            optimizer_file({0: {"row": torch.ones(3, 1), "col": torch.ones(1, 4)}}, [0]),
            {},
            "shape of parameter 'param 0' cannot be told from its state; give the model",
        ),
        (optimizer_file({7: {"m": torch.ones(3)}}, []), {}, "state for .7., which no group has"),
        (optimizer_file({0: torch.ones(3)}, [0]), {}, "'param 0' is a Tensor, and not a dict"),
        (optimizer_file({}, [], masters=[1]), {}, "'masters' of the optimizer.* are not tensors"),
        (optimizer_file({}, [], masters={"a": torch.ones(3)}), {}, "for .'a'., which no group"),
        (optimizer_file({}, [], rounding_step="x"), {}, "'rounding_step' of the .* is 'x'"),
        (optimizer_file({}, [], rounding_step=True), {}, "'rounding_step' of the .* is True"),
        (
            optimizer_file({}, [0], masters={0: torch.ones(30, dtype=torch.int64)}),
            {},
            "the master of 'param 0' is no float tensor of its shape",
        ),
        (optimizer_file({}, [0]), {"names": ["a", "b"]}, "2 names were given for the 1 parameters"),
        (optimizer_file({}, ["module.a", "module._orig_mod.a"]), {}, "have the same name"),
        (optimizer_file({}, []), {"optimizer_class": "Adamw"}, "torch.optim has no class 'Adamw'"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: Any,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(value, tmp_path / "file.pt")
    with pytest.raises(ckpt.CheckpointError, match=message):
        ckpt.import_file(tmp_path / "file.pt", tmp_path / "made", **options)
    assert os.listdir(tmp_path) == ["file.pt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty.pt", "is neither a file of torch.save nor safetensors"),
        ("text.pt", "is neither a file of torch.save nor safetensors"),
        ("text.safetensors", "damaged or not safetensors"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_text("" if name == "empty.pt" else "something else")
    with pytest.raises(ckpt.CheckpointError, match=f"{name}: .*{message}"):
        ckpt.import_file(tmp_path / name, tmp_path / "made")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../secret.safetensors"}, "leads out of the folder"),
        ({"a": "one.safetensors", "b": "two.safetensors"}, "'a' is in one.safetensors too"),
        ({"c": "one.safetensors"}, "one.safetensors: there should be a tensor 'c'"),
        ({"b": "three.safetensors"}, "the same name without wrappers"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, weight_map: dict[str, str], message: str
) -> None:
    (tmp_path / "hf").mkdir()
    a, b = torch.zeros(2), torch.ones(2)
    safetensors.write(tmp_path / "hf" / "one.safetensors", {"a": a})
    safetensors.write(tmp_path / "hf" / "two.safetensors", {"a": b, "b": b})
    safetensors.write(tmp_path / "hf" / "three.safetensors", {"b": a, "_orig_mod.b": b})
    index = {"weight_map": weight_map}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ckpt.CheckpointError, match=message):
        ckpt.import_file(tmp_path / "hf", tmp_path / "made")
    assert os.listdir(tmp_path) == ["hf"]


def test_a_module_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    model = {"module.weight": torch.ones(20), "head.weight": torch.ones(20, 2)}
    made = ckpt.import_state_dict(tmp_path / "made", model=model)
    assert difference(ckpt.weights(made), model) is None


def test_scalars_and_empty_tensors_are_imported(tmp_path: Path) -> None:
    net = torch.nn.ParameterList([torch.ones(()), torch.ones(1), torch.ones(0, 3)])
    opt = optim.AdamW(net.parameters())
    for param in net:
        param.grad = torch.ones_like(param)
    opt.step()
    path = ckpt.import_state_dict(tmp_path / "made", opt.state_dict())
    assert difference(ckpt.state_dict(path)["state"], opt.state_dict()["state"]) is None
    cut = ckpt.reshard(path, tmp_path / "cut", 2)
    assert difference(ckpt.state_dict(cut), ckpt.state_dict(path)) is None
