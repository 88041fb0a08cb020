"""Loading what somebody else wrote: refused by name or loaded, and never anything else.

No code is run, no memory taken that is not there, nothing hangs, and what is refused has changed
nothing.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import (
    CONTENTS,
    MANIFEST,
    build,
    copy_of,
    edit_contents,
    edit_header,
    join,
    outcome,
    picture,
    seal,
    split,
    write,
    write_manifest,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import difference, same_bits
from ranks import run_ranks

OPTIMIZER, MODEL, EXTRA = "optimizer.safetensors", "model.safetensors", "extra.safetensors"
FILES = (MANIFEST, CONTENTS, OPTIMIZER, MODEL, EXTRA)
HUGE = 2**40
DEEP = 100_000

Damage = Callable[[Path], object]


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


class Bomb:
    def __reduce__(self) -> Any:
        return (os.mkdir, (f"{os.environ['BOMB_TARGET']}",))


# --------------------------------------------------------------------------- kinds of damage


def _replaced(name: str, make: Callable[[Path], object]) -> Damage:
    def damage(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return damage


def _bytes(name: str, change: Callable[[bytes], bytes], sealed: bool = False) -> Damage:
    def damage(path: Path) -> None:
        (path / name).write_bytes(change((path / name).read_bytes()))
        if sealed:
            seal(path)

    return damage


def _moved_away(file: Path) -> None:
    """A link to a file that is as it should be, but elsewhere."""
    elsewhere = file.parent.parent / f"elsewhere-{file.name}"
    elsewhere.write_bytes((file.parent.parent / "checkpoint-copy" / file.name).read_bytes())
    file.symlink_to(elsewhere)


def _socket(file: Path) -> None:
    here = os.getcwd()
    os.chdir(file.parent)  # the name of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(file.name)
    finally:
        os.chdir(here)


def on_files() -> Iterator[tuple[str, Damage, str]]:
    bomb = pickle.dumps(Bomb())
    for name in FILES:
        yield f"{name} missing", lambda path, n=name: (path / n).unlink(), name
        yield f"{name} empty", _bytes(name, lambda raw: b""), name
        yield f"{name} cut short", _bytes(name, lambda raw: raw[: len(raw) // 2]), name
        yield f"{name} too long", _bytes(name, lambda raw: raw + b"x"), name
        for place in (0.1, 0.6, 0.98):

            def flip(raw: bytes, place: float = place) -> bytes:
                at = int(place * len(raw))
                return raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :]

            yield f"{name} with a bit flipped at {place}", _bytes(name, flip), name
        yield f"{name} a pickle", _bytes(name, lambda raw: bomb), name
        if name != MANIFEST:
            yield f"{name} a pickle with its digest", _bytes(name, lambda raw: bomb, True), name
        yield f"{name} a folder", _replaced(name, Path.mkdir), name
        yield f"{name} a pipe", _replaced(name, os.mkfifo), name
        yield f"{name} a socket", _replaced(name, _socket), name
        yield f"{name} a link", _replaced(name, _moved_away), name
        yield (
            f"{name} a link to a device",
            _replaced(name, lambda file: file.symlink_to("/dev/zero")),
            name,
        )

    def sealed_pipe(path: Path) -> None:
        (path / MODEL).unlink()
        os.mkfifo(path / MODEL)
        manifest = json.loads((path / MANIFEST).read_text())
        manifest["files"][MODEL]["nbytes"] = 0
        write_manifest(path, manifest)

    yield "an empty pipe with its length", sealed_pipe, ""


def _manifest(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(path: Path) -> None:
        said = json.loads((path / MANIFEST).read_text())
        other = change(said)
        write_manifest(path, said if other is None else other)

    return damage


def in_manifest() -> Iterator[tuple[str, Damage, str]]:
    names = (
        "../checkpoint-copy/model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        ".hidden.json",
        "model.safetensors\n",
        "model.safetensors\0.json",
        "model.pt",
        MANIFEST,
    )
    for name in names:

        def add(said: Any, name: str = name) -> None:
            said["files"][name] = dict(said["files"][MODEL])

        yield f"file called {name!r}", _manifest(add), MANIFEST
    for key, values in {
        "version": (2, 0, True, 1.0, "1", None, [1]),
        "format": ("safetensors", None, 3),
        "saved_at": (math.inf, math.nan, -1, "now", None, 1.5, 2**70, True),
        "files": ([], None, 3, {MODEL: None}, {MODEL: []}, {}, {CONTENTS: {}}),
    }.items():
        for value in values:
            yield f"{key} {value!r}", _manifest(lambda s, k=key, v=value: {**s, k: v}), ""
    for key, values in {
        "nbytes": (math.inf, math.nan, -1, "7", None, 1e3, 2**70, True, [3]),
        "sha256": (None, 7, "", "0" * 64, ["x"]),
    }.items():
        for value in values:

            def put(said: Any, key: str = key, value: Any = value) -> None:
                said["files"][OPTIMIZER][key] = value

            yield f"{key} of a file {value!r}", _manifest(put), ""
    for text in ("", "[]", "null", "3", "{", "\ud800", '{"format": 1', "[" * DEEP):
        raw = text.encode(errors="surrogatepass")
        yield f"manifest {text[:10]!r}", _bytes(MANIFEST, lambda _, r=raw: r), MANIFEST
    deep = '{"format": "shardstep checkpoint", "version": 1, "digest": "", "deep": %s%s}'
    for depth in (400, 900, 985, DEEP):
        text = deep % ("[" * depth, "]" * depth)
        yield f"manifest {depth} deep", _bytes(MANIFEST, lambda _, t=text: t.encode()), MANIFEST
    twice = '{"version": 1, "version": 1, '
    yield "manifest says it twice", _bytes(MANIFEST, lambda r: twice.encode() + r[1:]), MANIFEST
    big = b" " * (129 * 2**20)
    yield "manifest too large", _bytes(MANIFEST, lambda r: r + big), MANIFEST


def in_header() -> Iterator[tuple[str, Damage, str]]:
    for length in (0, 1, 2**20, 2**31, 2**63, 2**64 - 1):

        def relength(raw: bytes, length: int = length) -> bytes:
            return length.to_bytes(8, "little") + raw[8:]

        yield f"header of {length}", _bytes(OPTIMIZER, relength, sealed=True), OPTIMIZER

    def whole(header: Any) -> Damage:
        return lambda path: edit_header(path, OPTIMIZER, lambda _: header)

    deep = b"[" * DEEP
    for header in ([], 3, "x", {}, deep, b'{"a": ' * DEEP, b"\xff\xfe", b"{}"):
        yield f"header {str(header)[:20]}", whole(header), OPTIMIZER

    def entry(change: Callable[[dict[str, Any]], Any]) -> Damage:
        def edit(header: Any) -> None:
            for key, said in header.items():
                other = change(said)
                if other is not None:
                    header[key] = other

        return lambda path: edit_header(path, OPTIMIZER, edit)

    for key, values in {
        "dtype": ("load", "__class__", "f32", "C64", None, 3, ["F32"], {}, "F16", "F64"),
        "shape": (
            [-1],
            [-24, -7],
            [2**63],
            [2**32, 2**32],
            [2**61] * 3,
            [1] * 100_000,
            [2**58] * 100_000,
            [1.5],
            [math.nan],
            [math.inf],
            ["7"],
            [True],
            [None],
            None,
            "7",
            {},
            168,
        ),
        "data_offsets": (
            [0, -1],
            [-8, 0],
            [8, 0],
            [0, 2**63],
            [2**63, 2**63],
            [2**70, 2**71],
            [0, math.inf],
            [0, math.nan],
            [0.0, 4.0],
            [0],
            [0, 1, 2],
            list(range(100_000)),
            None,
            "04",
            {},
        ),
    }.items():
        for value in values:
            change = lambda said, k=key, v=value: {**said, k: v}  # noqa: E731
            yield f"{key} {str(value)[:30]}", entry(change), OPTIMIZER
            less = lambda said, k=key: {a: b for a, b in said.items() if a != k}  # noqa: E731
        yield f"no {key}", entry(less), OPTIMIZER
    for what in (None, [], 3, "x"):
        yield f"entry {what!r}", whole({"a": what}), OPTIMIZER
    for metadata in (3, ["x"], {"format": 3}, {"format": {"a": "b"}}, None):

        def say(header: Any, metadata: Any = metadata) -> None:
            header["__metadata__"] = metadata

        yield f"metadata {metadata!r}", lambda p, s=say: edit_header(p, OPTIMIZER, s), OPTIMIZER

    def gap(header: Any) -> None:
        last = max(header.values(), key=lambda said: said["data_offsets"][1])
        last["data_offsets"] = [each + 8 for each in last["data_offsets"]]

    yield "header with a gap", lambda p: edit_header(p, OPTIMIZER, gap), OPTIMIZER

    def overlap(header: Any) -> None:
        for said in header.values():
            said["data_offsets"] = [0, said["data_offsets"][1] - said["data_offsets"][0]]

    yield "header with overlaps", lambda p: edit_header(p, OPTIMIZER, overlap), OPTIMIZER

    def renamed(header: Any) -> Any:
        return {f"{key}?": said for key, said in header.items()}

    yield "header with other names", lambda p: edit_header(p, OPTIMIZER, renamed), OPTIMIZER

    def twice(path: Path) -> None:
        header, data = split(path / OPTIMIZER)
        text = json.dumps(header)
        join(path / OPTIMIZER, (text[:-1] + ", " + text[1:]).encode(), data)
        seal(path)

    yield "header that says it twice", twice, OPTIMIZER
    digits = lambda p: edit_header(p, OPTIMIZER, lambda _: b'{"a": ' + b"9" * 10_000 + b"}")  # noqa: E731
    yield "header with a number without end", digits, OPTIMIZER


def in_contents() -> Iterator[tuple[str, Damage, str]]:
    """Damage to what the checkpoint says it holds, with digests that fit."""

    def edits(
        name: str, edit: Callable[[Any], Any], named: str = CONTENTS
    ) -> tuple[str, Damage, str]:
        return name, lambda path: edit_contents(path, edit), named

    def stored(said: Any) -> Any:
        """A tensor of the state of the first parameter that lies in a file."""
        return said["optimizer"]["params"][1]["state"]["stored"]["1"]

    def node(said: Any) -> Any:
        """The description of the same tensor."""
        return said["optimizer"]["params"][1]["state"]["node"][1][1][1]

    for what in (
        [],
        3,
        "x",
        {"optimizer": 3},
        {"optimizer": []},
        {"model": {}},
        {"extra": 1},
    ):
        yield edits(f"all {what!r}", lambda said, w=what: w)

    def put(find: Callable[[Any], Any], key: Any, value: Any) -> Callable[[Any], None]:
        def edit(said: Any) -> None:
            find(said)[key] = value

        return edit

    sizes = (
        [-1, 7],
        [7, 24],
        [24, 8],
        [24, 6],
        [168],
        [2**61, 2**61],
        [2**32, 2**32],
        [2**58] * 100_000,
        [24.0, 7.0],
        [math.nan, 7],
        [math.inf, 7],
        ["24", "7"],
        [True, 7],
        None,
        "24",
        {},
        0,
    )
    dtypes = (
        "__class__",
        "load",
        "_inductor",
        "quint8",
        "int4",
        "float",
        "F32",
        "",
        None,
        3,
        [],
        {},
    )
    for value in sizes:
        yield edits(f"stored shape {str(value)[:30]}", put(stored, "shape", value))
        yield edits(f"node shape {str(value)[:30]}", put(node, 2, value))
        yield edits(f"node stride {str(value)[:30]}", put(node, 3, value))
        if value != [24, 7]:
            param = lambda said: said["optimizer"]["params"][1]  # noqa: E731
            yield edits(f"param shape {str(value)[:30]}", put(param, "shape", value))
            weight = lambda said: said["model"]["tensors"]["wide.weight"]  # noqa: E731
            yield edits(f"weight shape {str(value)[:30]}", put(weight, "shape", value))
    for value in dtypes:
        yield edits(f"stored dtype {value!r}", put(stored, "dtype", value))
        yield edits(f"node dtype {value!r}", put(node, 1, value))
        yield edits(f"weight dtype {value!r}", put(weight, "dtype", value))
        yield edits(f"param dtype {value!r}", put(param, "dtype", value))

    def both(shape: list[int]) -> Callable[[Any], None]:
        """Everything says that the tensor has this shape, except for the file."""

        def edit(said: Any) -> None:
            stored(said).update(shape=shape)
            stored(said)["chunks"][0][2:] = [[0] * len(shape), shape]
            node(said)[2:4] = [shape, _contiguous(shape)]

        return edit

    for shape in ([2**20, 2**19], [7, 24], [168], [2**29, 2**29]):
        yield edits(f"shape {shape} throughout", both(shape))

    def extra(shape: list[int], stride: list[int] | None = None) -> Callable[[Any], None]:
        def edit(said: Any) -> None:
            seen = said["extra"]["node"][1][1][1]
            where = said["extra"]["stored"]["0"]
            seen[2:4] = [shape, stride or _contiguous(shape)]
            where.update(shape=shape)
            where["chunks"][0][2:] = [[0] * len(shape), shape]

        return edit

    for shape, stride in (
        ([2**40], None),
        ([2**58], None),
        ([2**29, 2**29], None),
        ([0, 2**58, 2**58], None),
        ([0, 2**58], [2**61, 2**61]),
        ([100], [0]),
        ([100], [2]),
    ):
        yield edits(f"extra {shape} {stride}", extra(shape, stride))

    key = lambda said: stored(said)["chunks"][0]  # noqa: E731
    for place, values in {
        0: (
            "../checkpoint-copy/" + OPTIMIZER,
            "/etc/passwd",
            "",
            None,
            3,
            [],
            CONTENTS,
            "x.safetensors",
        ),
        1: ("", None, 3, [], "other"),
        2: ([-1, 0], [1, 0], [0], [2**63, 0], [0.0, 0.0], [math.nan, 0], None, "00", {}),
        3: ([24, 8], [23, 7], [-24, -7], [24], [2**63, 7], [24.0, 7.0], None, {}),
    }.items():
        for value in values:
            named = OPTIMIZER if value in ("", "other") and place == 1 else CONTENTS
            yield edits(f"chunk [{place}] {value!r}", put(key, place, value), named)
    for value in ([], None, {}, 3, "x", [[]], [None], [[1, 2, 3]], [["a"] * 5]):
        yield edits(f"chunks {value!r}", put(stored, "chunks", value))

    def chunks(*cut: list[list[int]]) -> Callable[[Any], None]:
        """Instead of its one chunk, the tensor has these, as many elements together."""

        def edit(said: Any) -> None:
            file, name, *_ = stored(said)["chunks"][0]
            stored(said)["chunks"] = [
                [file, f"{name}{n or ''}", at, size] for n, (at, size) in enumerate(cut)
            ]

        return edit

    top, bottom = [[0, 0], [12, 7]], [[12, 0], [12, 7]]
    yield edits("one half twice", chunks(top, top))
    yield edits("halves that overlap", chunks(top, [[6, 0], [12, 7]]))
    yield edits("three halves", chunks(top, bottom, bottom))
    yield edits("a gap", chunks(top, [[13, 0], [11, 7]]))
    yield edits("halves that are not there", chunks(top, bottom), OPTIMIZER)
    yield edits("the same chunk twice", lambda s: stored(s)["chunks"].extend(stored(s)["chunks"]))

    def diagonal(said: Any) -> None:
        count = 4_000
        file, name, *_ = stored(said)["chunks"][0]
        shape = [count, count]
        stored(said).update(shape=shape)
        stored(said)["chunks"] = [
            [file, f"{name}{n}", [n, n], [count - n, 1]] for n in range(count)
        ] + [[file, f"{name}-{n}", [n, n + 1], [1, count - n - 1]] for n in range(count)]

    yield edits("wild chunks", diagonal)

    def deep(path: Path, depth: int, closed: bool = True) -> None:
        text = (path / CONTENTS).read_text()
        bomb = '["list", [' * depth + '["value", 3]' + "]]" * depth * closed
        (path / CONTENTS).write_text(text.replace('["value", 3]', bomb, 1))
        seal(path)

    for depth in (70, 300, 480, DEEP):
        yield f"extra {depth} deep", lambda path, d=depth: deep(path, d), CONTENTS
    yield "extra deep without end", lambda path: deep(path, DEEP, False), CONTENTS
    state = lambda said: said["optimizer"]["params"][1]["state"]  # noqa: E731
    for value in (
        ["list", []],
        ["value", 3],
        ["value", {"a": 1}],
        ["value", [1]],
        ["value"],
        ["tensor"],
        ["tensor", "float32", [], [], True],
        ["tensor", "float32", [], [], True, "zz"],
        ["tensor", "float32", [], [], True, "00"],
        ["tensor", "float32", [], [], True, 3],
        ["tensor", "float32", [9, 9], [9, 1], True, "00" * 324],
        ["dict", [["a"]]],
        ["dict", [[["a"], ["value", 1]]]],
        ["dict", [[None, ["value", 1]]]],
        ["dict", [["a", ["value", 1]], ["a", ["value", 2]]]],
        ["dict", {"a": 1}],
        ["dict", 3],
        ["object", []],
        ["__class__", []],
        [],
        {},
        None,
        3,
        "dict",
    ):
        yield edits(f"state {str(value)[:50]}", put(state, "node", value))
        yield edits(
            f"options {str(value)[:50]}",
            put(lambda s: s["optimizer"]["groups"][0][1], "node", value),
        )
    for value in ({}, None, 3, {"1": None}, {"x": {}}, {"7": {}}, {"-1": {}}, {"1": 3, "01": 3}):
        yield edits(f"stored {value!r}", put(state, "stored", value))
    for value in (
        [],
        [True, True, False],
        [False] * 3,
        [True] * 3,
        [1, 1, 1],
        None,
        "ttt",
        [False, True],
    ):
        yield edits(f"per_element {value!r}", put(param, "per_element", value))
    for value in (1, None, "true", [], 0.0):
        yield edits(f"trainable {value!r}", put(param, "trainable", value))
        yield edits(f"stepped {value!r}", put(lambda s: s["optimizer"], "stepped", value))
        yield edits(f"positional {value!r}", put(lambda s: s["optimizer"], "positional", value))
    for value in ("scale", None, 3, [], "other", ""):
        yield edits(f"name {value!r}", put(param, "name", value))
    for name in ("params", "groups", "loose", "class", "positional", "stepped"):
        for value in (3, [], {}, "x", [[]], [None], {"a": 1}):
            named = "checkpoint" if (name, value) == ("class", "x") else CONTENTS
            yield edits(f"{name} {value!r}", put(lambda s: s["optimizer"], name, value), named)
        yield edits(f"no {name}", lambda s, n=name: s["optimizer"].pop(n) and None)
    listed = lambda said: said["optimizer"]["groups"][0]  # noqa: E731
    yield edits("group without a parameter", lambda s: listed(s)[0].pop() and None)
    yield edits("group with one twice", lambda s: listed(s)[0].append("scale"))
    yield edits("group with a stranger", lambda s: listed(s)[0].append("stranger"))
    yield edits("group with a number", lambda s: listed(s)[0].append(3))
    yield edits("groups twice", lambda s: s["optimizer"]["groups"].extend(s["optimizer"]["groups"]))
    options = lambda said: listed(said)[1]["node"][1]  # noqa: E731
    for name in ("params", "param_names"):
        yield edits(f"option {name}", lambda s, n=name: options(s).append([n, ["list", []]]))
    loose = lambda said: said["optimizer"]["loose"]["node"][1]  # noqa: E731
    yield edits("loose state as a parameter's", lambda s: loose(s).append([0, ["dict", []]]))

    def no_step(said: Any) -> None:
        """What the optimizer's own loading code trips over."""
        items = said["optimizer"]["params"][0]["state"]["node"][1]
        items[0][0] = "steps"

    yield edits("state without a step", no_step, "checkpoint")
    tensor = ["tensor", "float32", [3], [1], True, "00" * 12]
    whole = ["tensor", "int64", [], [], True, "00" * 8]
    for value in (["value", 3], ["value", None], ["dict", []], tensor, whole):

        def master(said: Any, value: Any = value) -> None:
            said["optimizer"]["params"][0]["state"]["node"][1].insert(
                0, ["shardstep.master", value]
            )
            if value[0] == "tensor":
                said["optimizer"]["params"][0]["per_element"].insert(0, value[2] == [])

        yield edits(f"master {value}", master, "checkpoint")
    for value in (-1, 1.5, None, "x", True, 2**70, math.inf):
        yield edits(f"rounded {value!r}", put(lambda s: s["optimizer"], "rounded", value))
    for value in (None, 3, {"node": ["list", []], "stored": {}}):
        yield edits(f"beside {value!r}", put(lambda s: s["optimizer"], "beside", value))
    model = lambda said: said["model"]  # noqa: E731
    for name in ("tensors", "aliases", "rest"):
        for value in (None, 3, [], "x", {"a": 1}, {"a": None}, {"a": {}}):
            yield edits(f"{name} {value!r}", put(model, name, value))
    alias = lambda value: put(lambda s: s["model"]["aliases"], "again", value)  # noqa: E731
    for value in ("nothing", "", None, 3, [], {}):
        yield edits(f"alias of {value!r}", alias(value))

    def count(said: Any) -> None:
        said["model"]["rest"]["node"][1][0][1] = ["value", 3]

    yield edits("module state that the module does not take", count, "checkpoint")
    yield edits("made_by", put(lambda s: s, "made_by", [1, 2]))


def _contiguous(shape: list[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def sparse() -> Iterator[tuple[str, Damage, str]]:
    """Files that are long and take no room: whoever reads or allocates them does not come back."""

    def stretched(path: Path, name: str, key: str, nbytes: int, contents: Any) -> None:
        header, data = split(path / name)
        end = max(said["data_offsets"][1] for said in header.values() if "data_offsets" in said)
        header[key] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [end, end + nbytes]}
        join(path / name, header, data)
        os.truncate(path / name, (path / name).stat().st_size + nbytes)
        (path / CONTENTS).write_text(json.dumps(contents))
        seal(path)
        manifest = json.loads((path / MANIFEST).read_text())
        manifest["files"][name]["nbytes"] = (path / name).stat().st_size
        write_manifest(path, manifest)

    def unasked(name: str) -> Damage:
        return lambda path: stretched(
            path, name, "long", HUGE, json.loads((path / CONTENTS).read_text())
        )

    for name in (OPTIMIZER, MODEL, EXTRA):
        yield f"{name} has a terabyte more", unasked(name), CONTENTS

    def state(nbytes: int, param: int) -> Damage:
        def damage(path: Path) -> None:
            said = json.loads((path / CONTENTS).read_text())
            each = said["optimizer"]["params"][param]
            each["state"]["node"][1].append(
                ["long", ["tensor", "uint8", [nbytes], [1], True, None]]
            )
            each["per_element"].append(False)
            each["state"]["stored"]["3"] = {
                "dtype": "uint8",
                "shape": [nbytes],
                "chunks": [[OPTIMIZER, "long", [0], [nbytes]]],
            }
            stretched(path, OPTIMIZER, "long", nbytes, said)

        return damage

    yield "a terabyte of state for a scalar", state(HUGE, 0), "checkpoint"
    yield "a gigabyte of state for a scalar", state(2**30, 0), "checkpoint"

    def extra(path: Path) -> None:
        said = json.loads((path / CONTENTS).read_text())
        said["extra"]["node"][1].append(["long", ["tensor", "uint8", [HUGE], [1], True, None]])
        said["extra"]["stored"]["1"] = {
            "dtype": "uint8",
            "shape": [HUGE],
            "chunks": [[EXTRA, "long", [0], [HUGE]]],
        }
        stretched(path, EXTRA, "long", HUGE, said)

    yield "a terabyte of extra", extra, "checkpoint"


KINDS = {
    "files": on_files,
    "manifest": in_manifest,
    "header": in_header,
    "contents": in_contents,
    "sparse": sparse,
}


# --------------------------------------------------------------------------------- the tests


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


@pytest.mark.parametrize("kind", KINDS)
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
    """Whether nothing was said otherwise: the list of files has a digest of what it says."""
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
