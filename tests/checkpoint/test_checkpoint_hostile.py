"""A checkpoint from an untrusted source loads, or raises an error that names the file.

No code runs, no memory is allocated beyond the file's content, nothing hangs, and a refused load
changes nothing.
"""

from __future__ import annotations

import copy
import json
import math
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import FILES, HUGE, KINDS, MODEL, at, edit_manifest, put
from hostile import MANIFEST, build, copy_of, edit_contents, edit_header, outcome, picture, write
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


def test_the_checkpoints_that_are_damaged_are_fine_before(valid: Path, divided: Path) -> None:
    """Without this, everything could be refused for another reason."""
    for path in (valid, divided):
        assert difference(picture(*build(1, 3)), load_into_fresh(path)) is None


def test_a_file_that_nobody_needs_is_not_read(valid: Path, tmp_path: Path) -> None:
    path = copy_of(valid, tmp_path / "checkpoint")
    (path / "more.safetensors").touch()
    os.truncate(path / "more.safetensors", HUGE)
    more = {"nbytes": HUGE, "sha256": "0" * 64}
    edit_manifest(put(("files", "more.safetensors"), more))(path)
    started = time.process_time()
    load_into_fresh(path)
    assert time.process_time() - started < 5


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
    start = data.draw(st.integers(0, len(raw) - 1))
    some = data.draw(st.binary(min_size=1, max_size=9))
    head, tail = raw[:start], raw[start:]
    flipped = bytes([tail[0] ^ (1 << some[0] % 8)]) + tail[1:]
    ways = [head + flipped, head, head + some + tail, head + tail[len(some) :], tail + head]
    changed = data.draw(st.sampled_from(ways))
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
    if isinstance(node, (dict, list)):
        for key, item in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _places(item, (*path, key))


NASTY = st.sampled_from(
    [None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, 2**64, 0.5, math.nan, math.inf, "", "x", "0",
     "float32", "load", "tensor", "dict", "../x", "/etc/passwd", MODEL, [], {}, [0], [1, 2], [[]],
     {"a": 1}, ["value", 1], ["dict", []], ["list", [["value", 1]]], [2**62, 2**62]]
)  # fmt: skip


def _mutate(said: Any, data: st.DataObject) -> tuple[Any, ...]:
    """Change one place of a JSON value; says which."""
    places = st.sampled_from(list(_places(said)))
    place = data.draw(places)
    within, last = at(said, place[:-1]), place[-1]
    kind = data.draw(st.sampled_from(["replace", "replace", "delete", "double", "borrow"]))
    if kind == "delete":
        del within[last]
    elif kind == "double" and isinstance(within, list):
        within.insert(last, within[last])
    elif kind == "borrow":
        within[last] = copy.deepcopy(at(said, data.draw(places)))
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

    edit_header(path, name, lambda header: _mutate(header, data) and None)
    if _fuzz(path, target) is None:
        # Dtype and shape in a file are for other programs, as long as the bytes are as many.
        assert difference(picture(*build(1, 3)), picture(*target)) is None
