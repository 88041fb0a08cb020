"""Ways to damage the checkpoint of `hostile.write`, with the file that the error must name."""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hostile import (
    CONTENTS,
    MANIFEST,
    edit_contents,
    edit_header,
    join,
    seal,
    split,
    write_manifest,
)

from shardstep.plan import contiguous

OPTIMIZER, MODEL, EXTRA = "optimizer.safetensors", "model.safetensors", "extra.safetensors"
FILES = (MANIFEST, CONTENTS, OPTIMIZER, MODEL, EXTRA)
HUGE = 2**40
DEEP = 100_000

Damage = Callable[[Path], object]
Case = tuple[str, Damage, str]
Place = tuple[Any, ...]


class Bomb:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.mkdir, (f"{os.environ['BOMB_TARGET']}",))


def at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def put(place: Place, new: Any) -> Callable[[Any], Any]:
    """Change one place of a JSON value, or all of it."""

    def edit(value: Any) -> Any:
        if not place:
            return new
        at(value, place[:-1])[place[-1]] = new
        return value

    return edit


def drop(place: Place) -> Callable[[Any], None]:
    return lambda value: at(value, place[:-1]).pop(place[-1]) and None


def append(place: Place, *new: Any) -> Callable[[Any], None]:
    return lambda value: at(value, place).extend(new)


# ------------------------------------------------------------------------------------- files


def change(name: str, edit: Callable[[bytes], bytes], sealed: bool = False) -> Damage:
    def damage(path: Path) -> None:
        (path / name).write_bytes(edit((path / name).read_bytes()))
        if sealed:
            seal(path)

    return damage


def replace(name: str, make: Callable[[Path], object]) -> Damage:
    def damage(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return damage


def _socket(file: Path) -> None:
    here = os.getcwd()
    os.chdir(file.parent)  # the name of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(file.name)
    finally:
        os.chdir(here)


def _flip(place: float, raw: bytes) -> bytes:
    index = int(place * len(raw))
    return raw[:index] + bytes([raw[index] ^ 16]) + raw[index + 1 :]


def on_files() -> Iterator[Case]:
    bomb = pickle.dumps(Bomb())
    for name in FILES:
        ways: dict[str, Damage] = {
            "missing": partial(lambda name, path: (path / name).unlink(), name),
            "empty": change(name, lambda raw: b""),
            "cut short": change(name, lambda raw: raw[: len(raw) // 2]),
            "too long": change(name, lambda raw: raw + b"x"),
            "a pickle": change(name, lambda raw: bomb),
            "a folder": replace(name, Path.mkdir),
            "a pipe": replace(name, os.mkfifo),
            "a socket": replace(name, _socket),
            "a link": replace(
                name, lambda file: file.symlink_to(f"../checkpoint-copy/{file.name}")
            ),
            "a link to a device": replace(name, lambda file: file.symlink_to("/dev/zero")),
        }
        for place in (0.1, 0.6, 0.98):
            ways[f"with a bit flipped at {place}"] = change(name, partial(_flip, place))
        if name != MANIFEST:
            ways["a pickle with its digest"] = change(name, lambda raw: bomb, sealed=True)
        for way, damage in ways.items():
            yield f"{name} {way}", damage, name

    def sealed_pipe(path: Path) -> None:
        replace(MODEL, os.mkfifo)(path)
        edit_manifest(put(("files", MODEL, "nbytes"), 0))(path)

    yield "an empty pipe with its length", sealed_pipe, ""


# ---------------------------------------------------------------------------------- manifest

NAMES = ["../checkpoint-copy/model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""]
NAMES += [".hidden.json", "model.safetensors\n", "model.safetensors\0.json", "model.pt", MANIFEST]
NO_NUMBER = (math.inf, math.nan, -1, None, 2**70, True)
IN_MANIFEST: dict[Place, tuple[Any, ...]] = {
    ("version",): (2, 0, True, 1.0, "1", None, [1]),
    ("format",): ("safetensors", None, 3),
    ("saved_at",): (*NO_NUMBER, "now", 1.5),
    ("files",): ([], None, 3, {MODEL: None}, {MODEL: []}, {}, {CONTENTS: {}}),
    ("files", OPTIMIZER, "nbytes"): (*NO_NUMBER, "7", 1e3, [3]),
    ("files", OPTIMIZER, "sha256"): (None, 7, "", "0" * 64, ["x"]),
}


def edit_manifest(edit: Callable[[Any], Any]) -> Damage:
    def damage(path: Path) -> None:
        said = json.loads((path / MANIFEST).read_text())
        edit(said)
        write_manifest(path, said)

    return damage


def in_manifest() -> Iterator[Case]:
    for name in NAMES:
        add = lambda said, n=name: put(("files", n), dict(said["files"][MODEL]))(said)  # noqa: E731
        yield f"file called {name!r}", edit_manifest(add), MANIFEST
    for place, values in IN_MANIFEST.items():
        for value in values:
            yield f"{place} {value!r}", edit_manifest(put(place, value)), ""
    deep = '{"format": "shardstep checkpoint", "version": 1, "digest": "", "deep": %s%s}'
    texts = ["", "[]", "null", "3", "{", "\ud800", '{"format": 1', "[" * DEEP]
    texts += [deep % ("[" * depth, "]" * depth) for depth in (400, 900, 985, DEEP)]
    for text in texts:
        raw = text.encode(errors="surrogatepass")
        yield f"{text[:80]!r}", change(MANIFEST, partial(lambda new, _: new, raw)), MANIFEST
    twice = b'{"version": 1, "version": 1, '
    yield "says it twice", change(MANIFEST, lambda raw: twice + raw[1:]), MANIFEST
    yield "too large", change(MANIFEST, lambda raw: raw + b" " * (129 * 2**20)), MANIFEST


# ------------------------------------------------------------------------------------ header

IN_HEADER: dict[str, list[Any]] = {
    "dtype": ["load", "__class__", "f32", "C64", None, 3, ["F32"], {}, "F16", "F64"],
    "shape": [
        *([-1], [-24, -7], [2**63], [2**32, 2**32], [2**61] * 3, [1] * 100_000, [2**58] * 100_000),
        *([1.5], [math.nan], [math.inf], ["7"], [True], [None], None, "7", {}, 168),
    ],
    "data_offsets": [
        *([0, -1], [-8, 0], [8, 0], [0, 2**63], [2**63, 2**63], [2**70, 2**71], [0, math.inf]),
        *([0, math.nan], [0.0, 4.0], [0], [0, 1, 2], list(range(100_000)), None, "04", {}),
    ],
}


def header(edit: Callable[[Any], Any]) -> Damage:
    return lambda path: edit_header(path, OPTIMIZER, edit)


def each_entry(edit: Callable[[Any], Any]) -> Damage:
    return header(lambda said: {name: edit(entry) for name, entry in said.items()})


def in_header() -> Iterator[Case]:
    for length in (0, 1, 2**20, 2**31, 2**63, 2**64 - 1):
        raw = length.to_bytes(8, "little")
        relength = change(OPTIMIZER, partial(lambda new, old: new + old[8:], raw), sealed=True)
        yield f"header of {length}", relength, OPTIMIZER
    digits = b'{"a": ' + b"9" * 10_000 + b"}"
    headers = [[], 3, "x", {}, b"[" * DEEP, b'{"a": ' * DEEP, b"\xff\xfe", b"{}", digits]
    for said in [*headers, {"a": None}, {"a": []}, {"a": 3}, {"a": "x"}]:
        yield f"header {str(said)[:20]}", header(put((), said)), OPTIMIZER
    for key, values in IN_HEADER.items():
        for value in values:
            yield f"{key} {str(value)[:30]}", each_entry(put((key,), value)), OPTIMIZER
        less = lambda said, k=key: {a: b for a, b in said.items() if a != k}  # noqa: E731
        yield f"no {key}", each_entry(less), OPTIMIZER
    for metadata in (3, ["x"], {"format": 3}, {"format": {"a": "b"}}, None):
        yield f"metadata {metadata!r}", header(put(("__metadata__",), metadata)), OPTIMIZER

    def gap(said: Any) -> None:
        last = max(said.values(), key=lambda entry: entry["data_offsets"][1])
        last["data_offsets"] = [each + 8 for each in last["data_offsets"]]

    def overlap(said: Any) -> None:
        for entry in said.values():
            entry["data_offsets"] = [0, entry["data_offsets"][1] - entry["data_offsets"][0]]

    def twice(path: Path) -> None:
        said, data = split(path / OPTIMIZER)
        text = json.dumps(said)
        join(path / OPTIMIZER, (text[:-1] + ", " + text[1:]).encode(), data)
        seal(path)

    yield "gap", header(gap), OPTIMIZER
    yield "overlaps", header(overlap), OPTIMIZER
    yield "other names", header(lambda said: {f"{key}?": said[key] for key in said}), OPTIMIZER
    yield "says it twice", twice, OPTIMIZER


# ---------------------------------------------------------------------------------- contents

OPT: Place = ("optimizer",)
PARAM: Place = (*OPT, "params", 1)
STATE: Place = (*PARAM, "state")
STORED: Place = (*STATE, "stored", "1")  # a tensor of the state that is in a file
NODE: Place = (*STATE, "node", 1, 1, 1)  # its description
CHUNK: Place = (*STORED, "chunks", 0)
GROUP: Place = (*OPT, "groups", 0)
WEIGHT: Place = ("model", "tensors", "wide.weight")

SIZES = [
    *([-1, 7], [7, 24], [24, 8], [24, 6], [168], [2**61, 2**61], [2**32, 2**32], [2**58] * 100_000),
    *([24.0, 7.0], [math.nan, 7], [math.inf, 7], ["24", "7"], [True, 7], None, "24", {}, 0),
]
DTYPES = ["__class__", "load", "_inductor", "quint8", "int4", "float", "F32", "", None, 3, [], {}]
FLAGS = [1, None, "true", [], 0.0]
JUNK = [3, [], {}, "x", [[]], [None], {"a": 1}]
JUNK_OF_MODEL = [None, 3, [], "x", {"a": 1}, {"a": None}, {"a": {}}]
NODES: list[Any] = [
    *(["list", []], ["value", 3], ["value", {"a": 1}], ["value", [1]], ["value"], ["tensor"]),
    *(["tensor", "float32", [], [], True, *data] for data in ([], ["zz"], ["00"], [3])),
    ["tensor", "float32", [9, 9], [9, 1], True, "00" * 324],
    *(["dict", [["a"]]], ["dict", [[["a"], ["value", 1]]]], ["dict", [[None, ["value", 1]]]]),
    ["dict", [["a", ["value", 1]], ["a", ["value", 2]]]],
    *(["dict", {"a": 1}], ["dict", 3], ["object", []], ["__class__", []], [], {}, None, 3, "dict"),
]
TRUES = [[], [True, True, False], [False] * 3, [True] * 3, [1, 1, 1], None, "ttt", [False, True]]

IN_CONTENTS: list[tuple[Place, list[Any]]] = [
    ((), [[], 3, "x", {"optimizer": 3}, {"optimizer": []}, {"model": {}}, {"extra": 1}]),
    *(((*place, "shape"), SIZES) for place in (STORED, PARAM, WEIGHT)),
    *(((*NODE, number), SIZES) for number in (2, 3)),
    *(((*place, "dtype"), DTYPES) for place in (STORED, PARAM, WEIGHT)),
    ((*NODE, 1), DTYPES),
    ((*CHUNK, 0), [f"../checkpoint-copy/{OPTIMIZER}", "/etc/passwd", "", None, 3, [], CONTENTS]),
    ((*CHUNK, 0), ["x.safetensors"]),
    ((*CHUNK, 1), [None, 3, []]),
    ((*CHUNK, 2), [[-1, 0], [1, 0], [0], [2**63, 0], [0.0, 0.0], [math.nan, 0], None, "00", {}]),
    ((*CHUNK, 3), [[24, 8], [23, 7], [-24, -7], [24], [2**63, 7], [24.0, 7.0], None, {}]),
    ((*STORED, "chunks"), [[], None, {}, 3, "x", [[]], [None], [[1, 2, 3]], [["a"] * 5]]),
    *(((*place, "node"), NODES) for place in (STATE, (*GROUP, 1))),
    ((*STATE, "stored"), [{}, None, 3, {"1": None}, {"x": {}}, {"7": {}}, {"-1": {}}]),
    ((*STATE, "stored"), [{"1": 3, "01": 3}]),
    ((*PARAM, "per_element"), TRUES),
    ((*PARAM, "trainable"), FLAGS),
    *(((*OPT, name), FLAGS) for name in ("stepped", "positional")),
    ((*PARAM, "name"), ["scale", None, 3, [], "other", ""]),
    *(((*OPT, name), JUNK) for name in ("params", "groups", "loose", "positional", "stepped")),
    ((*OPT, "class"), [each for each in JUNK if each != "x"]),
    ((*OPT, "rounded"), [*NO_NUMBER, 1.5, "x"]),
    ((*OPT, "beside"), [None, 3, {"node": ["list", []], "stored": {}}]),
    *((("model", name), JUNK_OF_MODEL) for name in ("tensors", "aliases", "rest")),
    (("model", "aliases", "again"), ["nothing", "", None, 3, [], {}]),
    (("made_by",), [[1, 2]]),
]


def _extra(shape: list[int], stride: list[int] | None = None) -> Callable[[Any], None]:
    return _reshaped(("extra", "stored", "0"), ("extra", "node", 1, 1, 1), shape, stride)


def _reshaped(
    stored: Place, node: Place, shape: list[int], stride: list[int] | None = None
) -> Callable[[Any], None]:
    """Everything says that the tensor has this shape, except for the file."""

    def edit(said: Any) -> None:
        at(said, stored).update(shape=shape)
        at(said, stored)["chunks"][0][2:] = [[0] * len(shape), shape]
        at(said, node)[2:4] = [shape, stride or contiguous(shape)]

    return edit


def _cut(*boxes: Any, shape: Any = None) -> Callable[[Any], None]:
    """Instead of its one chunk, the tensor has these."""

    def edit(said: Any) -> None:
        stored = at(said, STORED)
        file, name, *_ = stored["chunks"][0]
        stored["chunks"] = [[file, f"{name}{n or ''}", *box] for n, box in enumerate(boxes)]
        stored["shape"] = shape or stored["shape"]

    return edit


def _wild(count: int) -> Callable[[Any], None]:
    """Columns below the diagonal, rows right of it."""
    columns = [([n, n], [count - n, 1]) for n in range(count)]
    rows = [([n, n + 1], [1, count - n - 1]) for n in range(count)]
    return _cut(*columns, *rows, shape=[count, count])


def _master(value: Any) -> Callable[[Any], None]:
    def edit(said: Any) -> None:
        param = said["optimizer"]["params"][0]
        param["state"]["node"][1].insert(0, ["shardstep.master", value])
        if value[0] == "tensor":
            param["per_element"].insert(0, value[2] == [])

    return edit


def _deep(depth: int, closed: bool, path: Path) -> None:
    text = (path / CONTENTS).read_text()
    bomb = '["list", [' * depth + '["value", 3]' + "]]" * depth * closed
    (path / CONTENTS).write_text(text.replace('["value", 3]', bomb, 1))
    seal(path)


def _edits() -> Iterator[tuple[str, Callable[[Any], Any], str]]:
    for place, values in IN_CONTENTS:
        for value in values:
            yield f"{place} = {str(value)[:50]}", put(place, value), CONTENTS
    for name in ("params", "groups", "loose", "class", "positional", "stepped"):
        yield f"no {name}", drop((*OPT, name)), CONTENTS
    for value in ("", "other"):
        yield f"chunk called {value!r}", put((*CHUNK, 1), value), OPTIMIZER
    for shape in ([2**20, 2**19], [7, 24], [168], [2**29, 2**29]):
        yield f"shape {shape}", _reshaped(STORED, NODE, shape), CONTENTS
    for shape in ([2**40], [2**58], [2**29, 2**29], [0, 2**58, 2**58]):
        yield f"extra {shape}", _extra(shape), CONTENTS
    for shape, stride in (([0, 2**58], [2**61, 2**61]), ([100], [0]), ([100], [2])):
        yield f"extra {shape} {stride}", _extra(shape, stride), CONTENTS
    top, bottom = ([0, 0], [12, 7]), ([12, 0], [12, 7])
    gap = (top, ([13, 0], [11, 7]))
    for boxes in ((top, top), (top, ([6, 0], [12, 7])), (top, bottom, bottom), gap):
        yield f"chunks {boxes}", _cut(*boxes), CONTENTS
    yield "halves that are not there", _cut(top, bottom), OPTIMIZER
    yield "the same chunk twice", lambda s: append((*STORED, "chunks"), at(s, CHUNK))(s), CONTENTS
    yield "wild chunks", _wild(4_000), CONTENTS
    yield "no master: 3 floats", _master(["tensor", "float32", [3], [1], True, "00" * 12]), ""
    yield "no master: an integer", _master(["tensor", "int64", [], [], True, "00" * 8]), ""
    for value in (["value", 3], ["value", None], ["dict", []]):
        yield f"master {value}", _master(value), ""
    for name in ("params", "param_names"):
        yield f"option {name}", append((*GROUP, 1, "node", 1), [name, ["list", []]]), CONTENTS
    for value in ("scale", "stranger", 3):
        yield f"group with {value} more", append((*GROUP, 0), value), CONTENTS
    yield "group without a parameter", drop((*GROUP, 0, -1)), CONTENTS
    yield "groups twice", lambda s: append((*OPT, "groups"), at(s, GROUP))(s), CONTENTS
    as_param = append((*OPT, "loose", "node", 1), [0, ["dict", []]])
    yield "loose state as a parameter's", as_param, CONTENTS
    yield "class x", put((*OPT, "class"), "x"), ""
    # What the optimizer's and the module's own loading code trip over.
    yield "no step", put((*OPT, "params", 0, "state", "node", 1, 0, 0), "steps"), ""
    yield "module state", put(("model", "rest", "node", 1, 0, 1), ["value", 3]), ""


def in_contents() -> Iterator[Case]:
    """Damage to what the checkpoint says it holds, with digests that fit."""
    for name, edit, named in _edits():
        yield name, partial(lambda edit, path: edit_contents(path, edit), edit), named
    for depth in (70, 300, 480, DEEP):
        yield f"extra {depth} deep", partial(_deep, depth, True), CONTENTS
    yield "extra deep without end", partial(_deep, DEEP, False), CONTENTS


# ------------------------------------------------------------------------------------ sparse


def _long(name: str, tree: Place | None, nbytes: int, path: Path) -> None:
    """Add a tensor without disk space to a file, and to a value if it is to be read."""

    def lengthen(said: Any) -> None:
        end = max(entry["data_offsets"][1] for entry in said.values() if "data_offsets" in entry)
        said["long"] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [end, end + nbytes]}

    def describe(said: Any) -> None:
        if tree is None:
            return
        value, chunks = at(said, tree), [[name, "long", [0], [nbytes]]]
        value["node"][1].append(["long", ["tensor", "uint8", [nbytes], [1], True, None]])
        number = "3" if name == OPTIMIZER else "1"
        value["stored"][number] = {"dtype": "uint8", "shape": [nbytes], "chunks": chunks}
        if name == OPTIMIZER:
            at(said, tree[:-1])["per_element"].append(False)

    edit_header(path, name, lengthen)
    edit_contents(path, describe)
    total = (path / name).stat().st_size + nbytes
    os.truncate(path / name, total)
    edit_manifest(put(("files", name, "nbytes"), total))(path)


def sparse() -> Iterator[Case]:
    """Files that are long and take no disk space: reading them would not end."""
    for name in (OPTIMIZER, MODEL, EXTRA):
        yield f"{name} has a terabyte more", partial(_long, name, None, HUGE), CONTENTS
    scalar: Place = (*OPT, "params", 0, "state")
    for nbytes in (HUGE, 2**30):
        name = f"{nbytes} bytes of state for a scalar"
        yield name, partial(_long, OPTIMIZER, scalar, nbytes), ""
    yield "a terabyte of extra", partial(_long, EXTRA, ("extra",), HUGE), ""


KINDS: dict[str, Callable[[], Iterator[Case]]] = {
    "files": on_files,
    "manifest": in_manifest,
    "header": in_header,
    "contents": in_contents,
    "sparse": sparse,
}
