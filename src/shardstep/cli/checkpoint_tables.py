"""Tables of a checkpoint, or of a folder of checkpoints.

Anyone may have written the files: text from them is never markup, and control characters are
escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal as show_nbytes
from rich.table import Table
from rich.text import Text

from shardstep.cli.errors import printable

MAX_NAMES = 5
MAX_WIDTH = 60


def summary_report(said: Mapping[str, Any]) -> RenderableType:
    """Lay out a description that `checkpoint.summary` returned."""
    facts = Table(box=box.SIMPLE, show_header=False, title=_text(said["path"]))
    facts.title_justify = "left"
    facts.add_column(style="bold", no_wrap=True)
    for name, value in _facts(said):
        facts.add_row(name, _text(value))
    parts: list[RenderableType] = [facts]
    if said["optimizer"] is not None:
        groups = _table("group>", "parameters>", "elements>", "options")
        for number, group in enumerate(said["optimizer"]["groups"]):
            options = ", ".join(f"{key}={_short(value)}" for key, value in group["options"].items())
            counts = (f"{group[key]:,}" for key in ("parameters", "elements"))
            groups.add_row(str(number), *counts, _text(options))
        parts.append(groups)
    files = _table("file", "bytes>")
    for name, nbytes in said["files"].items():
        files.add_row(_text(name), f"{nbytes:,}")
    parts.append(files)
    if "tensors" in said:
        tensors = _table("tensor", "dtype", "shape", "bytes>", "chunks>", "files")
        for each in said["tensors"]:
            names = {chunk["file"].removesuffix(".safetensors") for chunk in each["chunks"]}
            numbers = (f"{each['nbytes']:,}", str(len(each["chunks"])))
            form = (each["dtype"], str(each["shape"]))
            tensors.add_row(_text(each["name"]), *form, *numbers, _text(_first_few(sorted(names))))
        parts.append(tensors)
    return Group(*parts)


def listing_report(said: Mapping[str, Any]) -> RenderableType:
    """Lay out a description that `checkpoint.listing` returned."""
    table = _table("checkpoint", "saved at", "size>", "ranks>", "")
    table.title, table.title_justify = _text(said["path"]), "left"
    for entry in said["checkpoints"]:
        table.add_row(
            _text(_last(entry["path"])),
            entry["saved_at"],
            show_nbytes(entry["nbytes"]),
            _text(entry["made_by"].get("world_size", "?")),
            "newest" if entry["newest"] else "",
        )
    lines = [f"{_last(each['path'])}: not complete: {each['why']}" for each in said["damaged"]]
    for each in said["unfinished"]:
        left = "left by a save that did not finish; the next save here removes it"
        what = "a save is under way" if each["under_way"] else left
        lines.append(f"{_last(each['path'])}: {what}")
    return Group(table, *map(_text, lines))


def _table(*columns: str) -> Table:
    """Make a table; a column whose name ends with `>` has numbers."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in columns:
        justify = "right" if name.endswith(">") else "left"
        table.add_column(name.removesuffix(">"), justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _facts(said: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "what", f"{said['format']}, version {said['version']}"
    yield "saved at", said["saved_at"]
    yield "made by", _versions(said["made_by"])
    origin = said["made_by"].get("cut_from")
    if isinstance(origin, Mapping):
        yield "resharded from", f"made by {_versions(origin)}"
    optimizer, model, extra = said["optimizer"], said["model"], said["extra"]
    if optimizer is not None:
        stepped = "" if optimizer["stepped"] else ", before its first step"
        yield "optimizer", f"{optimizer['class'] or 'of unknown class'}{stepped}"
        named = "" if optimizer["named"] else ", known by number only"
        yield (
            "parameters",
            f"{optimizer['parameters']:,} ({optimizer['trainable']:,} trainable, "
            f"{optimizer['elements']:,} elements){named}",
        )
        yield "optimizer state", show_nbytes(optimizer["state_nbytes"])
        if optimizer["without_state"]:
            yield "without state", _first_few(optimizer["without_state"])
    if model is not None:
        further = len(model["aliases"])
        aliases = f", {further} further name{'' if further == 1 else 's'}" if further else ""
        yield (
            "model",
            f"{show_nbytes(model['nbytes'])} in {model['tensors']:,} tensors "
            f"({model['elements']:,} elements, {', '.join(model['dtypes'])}){aliases}",
        )
    if extra is not None:
        yield "extra", show_nbytes(extra["nbytes"])
        value = extra["value"]
        items = value.items() if isinstance(value, Mapping) else [("value", value)]
        for key, item in list(items)[:20]:
            yield f"  {printable(key)}", _short(item)
    yield "all", show_nbytes(said["nbytes"])


def _versions(made_by: Mapping[str, Any]) -> str:
    known = [name for name in ("shardstep", "torch", "python") if name in made_by]
    versions = ", ".join(f"{name} {made_by[name]}" for name in known) or "unknown versions"
    ranks = made_by.get("world_size", "an unknown number of")
    how = " (imported)" if made_by.get("imported") else ""
    return f"{versions}, for {ranks} rank{'' if ranks == 1 else 's'}{how}"


def _text(value: Any) -> Text:
    return Text(printable(value))


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _first_few(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


def _short(value: Any) -> str:
    text = printable(value)
    return text if len(text) <= MAX_WIDTH else f"{text[:MAX_WIDTH]}…"
