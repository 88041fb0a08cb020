"""A checkpoint, or a folder of them, as tables.

What is shown comes from files that anybody may have written: it is never taken for markup, and
characters that a terminal would act on are written out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

MAX_NAMES = 5
MAX_WIDTH = 60


def printable(value: Any) -> str:
    """A value as text without anything that a terminal would act on."""
    text = str(value)
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def size(nbytes: int) -> str:
    """A number of bytes for people, and exactly.

    Example:
        >>> size(999), size(1_234_567)
        ('999 B', '1.2 MB')
    """
    number, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            break
        number /= 1000
    return f"{nbytes} B" if unit == "B" else f"{number:.1f} {unit}"


def summary_report(said: Mapping[str, Any]) -> RenderableType:
    """A checkpoint as `checkpoint.summary` describes it."""
    parts: list[RenderableType] = [_table(said["path"], _facts(said))]
    if said["optimizer"] is not None:
        parts.append(_groups(said["optimizer"]["groups"]))
    files = Table(box=box.SIMPLE_HEAD)
    files.add_column("file")
    files.add_column("bytes", justify="right")
    for name, nbytes in said["files"].items():
        files.add_row(Text(printable(name)), f"{nbytes:,}")
    parts.append(files)
    if "tensors" in said:
        parts.append(_tensors(said["tensors"]))
    return Group(*parts)


def listing_report(said: Mapping[str, Any]) -> RenderableType:
    """A folder of checkpoints as `checkpoint.listing` describes it."""
    table = Table(box=box.SIMPLE_HEAD, title=Text(printable(said["path"])), title_justify="left")
    for column in ("checkpoint", "saved at"):
        table.add_column(column)
    table.add_column("size", justify="right")
    table.add_column("ranks", justify="right")
    table.add_column("")
    for entry in said["checkpoints"]:
        table.add_row(
            Text(_last(entry["path"])),
            entry["saved_at"],
            size(entry["nbytes"]),
            Text(printable(entry["made_by"].get("world_size", "?"))),
            "newest" if entry["newest"] else "",
        )
    lines = [f"{_last(each['path'])}: not complete: {each['why']}" for each in said["damaged"]]
    for each in said["unfinished"]:
        what = (
            "a save is under way"
            if each["under_way"]
            else "left by a save that did not finish; the next save here clears it away"
        )
        lines.append(f"{_last(each['path'])}: {what}")
    return Group(table, *(Text(printable(line)) for line in lines))


def _last(path: str) -> str:
    return printable(path.rstrip("/").rpartition("/")[2])


def _table(title: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(
        box=box.SIMPLE,
        show_header=False,
        title=Text(printable(title)),
        title_justify="left",
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(printable(value)))
    return table


def _facts(said: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "what", f"{said['format']}, version {said['version']}"
    yield "saved at", said["saved_at"]
    yield "made by", _versions(said["made_by"])
    origin = said["made_by"].get("cut_from")
    if isinstance(origin, Mapping):
        yield "cut from one", f"made by {_versions(origin)}"
    optimizer, model, extra = said["optimizer"], said["model"], said["extra"]
    if optimizer is not None:
        kind = optimizer["class"] or "of unknown class"
        stepped = "" if optimizer["stepped"] else ", before its first step"
        yield "optimizer", f"{kind}{stepped}"
        named = "" if optimizer["named"] else ", known by number only"
        yield (
            "parameters",
            f"{optimizer['parameters']:,} ({optimizer['trainable']:,} trainable, "
            f"{optimizer['elements']:,} elements){named}",
        )
        yield "optimizer state", size(optimizer["state_nbytes"])
        if optimizer["without_state"]:
            yield "without state", _some(optimizer["without_state"])
    if model is not None:
        further = len(model["aliases"])
        aliases = f", {further} further name{'' if further == 1 else 's'}" if further else ""
        yield (
            "model",
            f"{size(model['nbytes'])} in {model['tensors']:,} tensors ({model['elements']:,} "
            f"elements, {', '.join(model['dtypes'])}){aliases}",
        )
    if extra is not None:
        yield "extra", size(extra["nbytes"])
        value = extra["value"]
        if isinstance(value, Mapping):
            for key, item in list(value.items())[:20]:
                yield f"  {printable(key)}", _short(item)
        else:
            yield "  value", _short(value)
    yield "all", size(said["nbytes"])


def _versions(made_by: Mapping[str, Any]) -> str:
    known = [name for name in ("shardstep", "torch", "python") if name in made_by]
    versions = ", ".join(f"{name} {made_by[name]}" for name in known) or "unknown versions"
    ranks = made_by.get("world_size", "an unknown number of")
    how = " (imported)" if made_by.get("imported") else ""
    return f"{versions}, for {ranks} rank{'' if ranks == 1 else 's'}{how}"


def _groups(groups: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("group", justify="right")
    table.add_column("parameters", justify="right")
    table.add_column("elements", justify="right")
    table.add_column("options")
    for number, group in enumerate(groups):
        options = ", ".join(f"{key}={_short(value)}" for key, value in group["options"].items())
        table.add_row(
            str(number),
            f"{group['parameters']:,}",
            f"{group['elements']:,}",
            Text(printable(options)),
        )
    return table


def _tensors(tensors: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("tensor", "dtype", "shape"):
        table.add_column(column, overflow="fold")
    for column in ("bytes", "chunks"):
        table.add_column(column, justify="right")
    table.add_column("files", overflow="fold")
    for each in tensors:
        files = sorted({chunk["file"].removesuffix(".safetensors") for chunk in each["chunks"]})
        table.add_row(
            Text(printable(each["name"])),
            each["dtype"],
            str(each["shape"]),
            f"{each['nbytes']:,}",
            str(len(each["chunks"])),
            Text(_some(files)),
        )
    return table


def _some(names: list[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"


def _short(value: Any) -> str:
    text = printable(value)
    return text if len(text) <= MAX_WIDTH else f"{text[:MAX_WIDTH]}…"
