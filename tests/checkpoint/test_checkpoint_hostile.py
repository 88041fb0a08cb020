"""A checkpoint from an untrusted source loads, or raises an error that names the file.

No code runs, no memory is allocated beyond the file's content, nothing hangs, and a refused load
changes nothing.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import FILES, HUGE, KINDS, MODEL, OPTIMIZER
from hostile import (
    MANIFEST,
    build,
    copy_of,
    edit_contents,
    edit_header,
    outcome,
    picture,
    write,
    write_manifest,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import difference, same_bits
from ranks import run_ranks


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("valid") / "checkpoint"
    write(path)
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    return path


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("divided") / "checkpoint"
    run_ranks(write, 2, path)
    return path


def _alarm(*_: object) -> None:
    raise TimeoutError("it takes too long")


def refuse_all(kind: str, valid: Path, work: Path) -> tuple[int, list[str]]:
    """Load each damaged checkpoint with little memory to spare; say which were not refused well."""
    copy_of(valid, work / "checkpoint-copy")
    net, opt = build(2, 2)
    os.environ["BOMB_TARGET"] = str(work / "exploded")
    signal.signal(signal.SIGALRM, _alarm)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + 700 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    wrong = []
    kinds = list(KINDS[kind]())
    for name, damage, named in kinds:
        path = copy_of(valid, work / "checkpoint")
        damage(path)
        signal.setitimer(signal.ITIMER_REAL, 20)
        message, trouble = outcome(path, net, opt)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if trouble is not None:
            wrong.append(f"{name}: {trouble}"[:500])
        elif message is None:
            wrong.append(f"{name}: it was loaded")
        elif named not in message or str(path) not in message:
            wrong.append(f"{name}: the message does not name {named!r}: {message[:300]}")
        elif len(message) > 3000:
            wrong.append(f"{name}: the message has {len(message)} characters")
    if (work / "exploded").exists():
        wrong.append("a pickle was loaded")
    return len(kinds), wrong


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k == "contents")) for k in KINDS]
)
def test_what_is_damaged_is_refused_by_name(kind: str, valid: Path, tmp_path: Path) -> None:
    [(count, wrong)] = run_ranks(refuse_all, 1, kind, valid, tmp_path)
    assert not wrong, "\n".join(wrong)
    assert count > 5


def load_into_fresh(path: Path) -> Any:
    net, opt = build(2, 2)
    message, trouble = outcome(path, net, opt)
    assert message is None, message
    assert trouble is None, trouble
    return picture(net, opt)


def test_the_checkpoint_that_is_damaged_is_fine_before(valid: Path) -> None:
    """Without this, everything above could be refused for another reason."""
    assert difference(picture(*build(1, 3)), load_into_fresh(valid)) is None


def test_a_file_that_nobody_needs_is_not_read(valid: Path, tmp_path: Path) -> None:
    path = copy_of(valid, tmp_path / "checkpoint")
    (path / "more.safetensors").touch()
    os.truncate(path / "more.safetensors", HUGE)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"]["more.safetensors"] = {"nbytes": HUGE, "sha256": "0" * 64}
    write_manifest(path, manifest)
    started = time.process_time()
    load_into_fresh(path)
    assert time.process_time() - started < 5


def test_values_are_read_from_where_they_are_said_to_be(divided: Path) -> None:
    """The same, out of chunks of two ranks."""
    assert difference(picture(*build(1, 3)), load_into_fresh(divided)) is None


def test_chunks_that_overlap_are_refused(valid: Path, tmp_path: Path) -> None:
    """As many elements as the tensor has, in chunks that cover one half twice, and are there.

    What they do not cover would be whatever the memory held before.
    """
    path = copy_of(valid, tmp_path / "checkpoint")
    halves: list[str] = []

    def cut(header: Any) -> Any:
        made = {}
        for name, said in header.items():
            if said["shape"] == [24, 7]:
                start, stop = said["data_offsets"]
                middle = (start + stop) // 2
                made[name] = {**said, "shape": [12, 7], "data_offsets": [start, middle]}
                made[f"{name}+"] = {**said, "shape": [12, 7], "data_offsets": [middle, stop]}
                halves.append(name)
            else:
                made[name] = said
        return made

    def describe(offset: int) -> Callable[[Any], None]:
        def edit(said: Any) -> None:
            for stored in said["optimizer"]["params"][1]["state"]["stored"].values():
                file, name = stored["chunks"][0][:2]
                stored["chunks"] = [
                    [file, name.rstrip("+"), [0, 0], [12, 7]],
                    [file, name.rstrip("+") + "+", [offset, 0], [12, 7]],
                ]

        return edit

    edit_header(path, OPTIMIZER, cut)
    assert len(halves) == 2
    edit_contents(path, describe(12))
    assert difference(picture(*build(1, 3)), load_into_fresh(path)) is None
    for offset in (0, 1, 11):
        edit_contents(path, describe(offset))
        message, trouble = outcome(path, *build(2, 2))
        assert trouble is None
        assert message is not None
        assert "overlap" in message


# -------------------------------------------------------------------------------------- fuzz

FUZZ = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def target() -> Any:
    return build(2, 2)


def _fuzz(path: Path, target: Any) -> str | None:
    """Load; what was refused must have changed nothing, and what was loaded is looked at."""
    message, trouble = outcome(path, *target)
    assert trouble is None, trouble
    return message


@FUZZ
@given(data=st.data())
def test_changed_bytes_are_noticed(
    data: st.DataObject, divided: Path, target: Any, tmp_path: Path
) -> None:
    path = copy_of(divided, tmp_path / "checkpoint")
    name = data.draw(st.sampled_from(sorted(file.name for file in path.iterdir())))
    raw = (path / name).read_bytes()
    at = data.draw(st.integers(0, len(raw) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "drop", "swap"]))
    some = data.draw(st.binary(min_size=1, max_size=9))
    changed = {
        "flip": raw[:at] + bytes([raw[at] ^ (1 << some[0] % 8)]) + raw[at + 1 :],
        "cut": raw[:at],
        "insert": raw[:at] + some + raw[at:],
        "drop": raw[:at] + raw[at + len(some) :],
        "swap": raw[at:] + raw[:at],
    }[kind]
    (path / name).write_bytes(changed)
    message = _fuzz(path, target)
    # The index of weights is for other programs and is not read here.
    if "index" in name or _same(name, raw, changed):
        assert message is None
    else:
        assert message is not None
        assert name in message or name == MANIFEST


def _same(name: str, raw: bytes, changed: bytes) -> bool:
    """Return whether the change means nothing: the manifest's digest is of its values."""
    try:
        return raw == changed or (name == MANIFEST and json.loads(raw) == json.loads(changed))
    except ValueError:
        return False


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if path:
        yield path
    if isinstance(node, dict):
        for key, item in node.items():
            yield from _places(item, (*path, key))
    elif isinstance(node, list):
        for number, item in enumerate(node):
            yield from _places(item, (*path, number))


NASTY = st.sampled_from(
    [None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**64, 0.5, math.nan, math.inf, "", "x", "0",
     "float32", "load", "tensor", "dict", "../x", "/etc/passwd", MODEL, [], {}, [0], [1, 2], [[]],
     {"a": 1}, ["value", 1], ["dict", []], ["list", [["value", 1]]], [2**62, 2**62]]
)  # fmt: skip


def _mutate(said: Any, data: st.DataObject) -> tuple[Any, ...]:
    """Change one place of a JSON value; says which."""
    place = data.draw(st.sampled_from(list(_places(said))))
    *way, last = place
    within = said
    for key in way:
        within = within[key]
    kind = data.draw(st.sampled_from(["replace", "replace", "delete", "double", "borrow"]))
    if kind == "delete":
        del within[last]
    elif kind == "double" and isinstance(within, list):
        within.insert(last, within[last])
    elif kind == "borrow":
        *others, key = data.draw(st.sampled_from(list(_places(said))))
        source = said
        for each in others:
            source = source[each]
        within[last] = json.loads(json.dumps(source[key]))
    else:
        within[last] = data.draw(NASTY)
    return place


@FUZZ
@given(data=st.data())
def test_changed_descriptions_are_refused_or_change_what_they_describe(
    data: st.DataObject, divided: Path, target: Any, tmp_path: Path
) -> None:
    """With digests that fit: what the change does not concern is loaded exactly, or nothing is."""
    path = copy_of(divided, tmp_path / "checkpoint")
    place: tuple[Any, ...] = ()

    def edit(said: Any) -> None:
        nonlocal place
        place = _mutate(said, data)

    edit_contents(path, edit)
    if _fuzz(path, target) is None:
        expected, got = picture(*build(1, 3)), picture(*target)
        if place[:2] != ("model", "tensors"):
            for name, value in expected["model"].items():
                if isinstance(value, torch.Tensor):
                    assert same_bits(value, got["model"][name]), name
        if place[:2] != ("optimizer", "params"):
            assert difference(expected["state"], got["state"]) is None
        for number, (name, state) in enumerate(expected["state"].items()):
            if place[:3] != ("optimizer", "params", number):
                assert difference(state, got["state"][name]) is None
            for key, value in state.items():
                if value.shape and key in got["state"][name]:
                    assert got["state"][name][key].shape == value.shape


@FUZZ
@given(data=st.data())
def test_changed_headers_are_refused_or_load_the_same(
    data: st.DataObject, divided: Path, target: Any, tmp_path: Path
) -> None:
    path = copy_of(divided, tmp_path / "checkpoint")
    name = data.draw(st.sampled_from(sorted(file.name for file in path.glob("*.safetensors"))))

    def edit(header: Any) -> None:
        _mutate(header, data)

    edit_header(path, name, edit)
    if _fuzz(path, target) is None:
        # Dtype and shape in a file are for other programs, as long as the bytes are as many.
        got = picture(*target)
        assert difference(picture(*build(1, 3)), got) is None
