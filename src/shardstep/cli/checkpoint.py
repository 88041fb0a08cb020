"""The commands `shardstep checkpoint ...`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal as show_nbytes
from rich.table import Table
from rich.text import Text

from shardstep import checkpoint as ckpt
from shardstep.checkpoint.offline.export import Form
from shardstep.cli.options import App, parse_nbytes
from shardstep.cli.reporting import printable, reporting
from shardstep.params.names import shorten_list
from shardstep.plan import Layout

app = App(help="Inspect, verify, reshard, export and import checkpoints.")

Source = Annotated[Path, typer.Argument(metavar="PATH", help="The checkpoint.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NoVerify = Annotated[
    bool, typer.Option("--no-verify", help="Skip the comparison of files with their digests.")
]


MAX_WIDTH = 60


def _say(as_json: bool, text: str, **values: object) -> None:
    typer.echo(json.dumps(values) if as_json else text)


@app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint, or a folder of checkpoints.")
    ],
    as_json: AsJson = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List the tensors in safetensors files.")
    ] = False,
) -> None:
    """Describe a checkpoint, or list the checkpoints in a folder.

    For a checkpoint: its date and versions, the optimizer's class, groups and options, sizes and
    files. For a folder: its complete checkpoints, oldest first, and the remains of failed saves.
    Reads no tensors, and takes no longer for large checkpoints. Exits with 1 if a file is missing,
    or its length or header is wrong; `verify` compares digests too.
    """
    with reporting():
        single = ckpt.is_checkpoint(path)
        info = ckpt.summary(path, tensors=tensors) if single else ckpt.listing(path)
        report = _summary_report(info) if single else _listing_report(info)
    if as_json:
        typer.echo(json.dumps(info, indent=2))
    else:
        Console(width=None if Console().is_terminal else 160).print(report)
    if info.get("damage"):
        typer.echo(f"error: {printable(info['damage'])}", err=True)
        raise typer.Exit(1)


@app.command()
def verify(path: Source, as_json: AsJson = False) -> None:
    """Check that a checkpoint is complete and undamaged.

    Compares every file with its digest, and finds every chunk of every tensor in its file, without
    gaps or overlaps. If something is wrong, names the file and exits with 1.
    """
    with reporting() as stages:
        nbytes, num_tensors = ckpt.verify(path, stages=stages)
    text = f"OK: {printable(path)} is complete, {num_tensors:,} tensors, {show_nbytes(nbytes)}"
    _say(as_json, text, path=str(path), complete=True, tensors=num_tensors, nbytes=nbytes)


@app.command()
def reshard(
    path: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    ranks: Annotated[int, typer.Option(metavar="N", min=1, help="Number of ranks to write for.")],
    layout: Annotated[
        Layout | None,
        typer.Option(
            help="The layout. [default: that of the optimizer's class]",
            show_default=False,
        ),
    ] = None,
    no_verify: NoVerify = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite a checkpoint as another number of ranks would have written it.

    This is optional: a checkpoint loads at any world size. Resharded, each rank reads one file;
    for one rank, the model is a single `model.safetensors`. Takes about 40 MB of memory beyond the
    lists of tensors, whatever the size. The result counts as saved now: it becomes the newest
    checkpoint of its folder.
    """
    with reporting() as stages:
        made = ckpt.reshard(path, out, ranks, layout, verify=not no_verify, stages=stages)
    _say(as_json, f"wrote {printable(made)}", path=str(made))


@app.command()
def export(
    path: Source,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The file to make; for safetensors, the folder."),
    ],
    to: Annotated[Form, typer.Option("--to", help="The format.")] = "torch",
    model_only: Annotated[
        bool, typer.Option("--model-only", help="The model's state dict alone.")
    ] = False,
    optimizer_only: Annotated[
        bool, typer.Option("--optimizer-only", help="The optimizer's state dict alone.")
    ] = False,
    max_shard_size: Annotated[
        Any,
        typer.Option(
            parser=parse_nbytes,
            metavar="BYTES",
            help="For safetensors: the largest size of a file.",
        ),
    ] = "5GB",
    no_verify: NoVerify = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another program's format.

    **torch**: a file for `torch.load(..., weights_only=True)`. It has a dict of `model`,
    `optimizer` (the plain `torch.optim` state dict) and `extra`, if they were saved. With
    `--model-only` or `--optimizer-only` it has that state dict alone.

    **torch-named**: the same, with optimizer state keyed by parameter name, as in full state dicts
    of `torch.distributed.checkpoint` and FSDP2.

    **safetensors**: the model's weights, for Hugging Face's libraries.

    Memory: 40 MB for safetensors. For torch, the size of the largest tensor, and a temporary file
    of the size of all tensors, next to OUT.
    """
    if model_only and optimizer_only:
        raise typer.BadParameter("use --model-only or --optimizer-only, not both")
    with reporting() as stages:
        made = ckpt.export(
            path,
            out,
            to,
            part="model" if model_only else "optimizer" if optimizer_only else "all",
            max_shard_nbytes=max_shard_size,
            verify=not no_verify,
            stages=stages,
        )
    _say(as_json, f"wrote {printable(made)}", path=str(made))


@app.command(name="import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A file of torch.save, or safetensors: a file, its index or a folder.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The checkpoint to make.")],
    model_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Key of the model's state dict, if it is not a usual one."
        ),
    ] = None,
    optimizer_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Key of the optimizer's state dict, if it is not a usual one."
        ),
    ] = None,
    optimizer_class: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            help="The optimizer's class, such as AdamW or some.module.Lion. It is compared with "
            "the state now, and on load.",
        ),
    ] = None,
    names: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file with the names of the optimizer's parameters, one per line, in the order "
            "of its groups, if its state dict has none.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint from another program's file, for `shardstep.checkpoint.load`.

    Takes what `torch.save` wrote: `{"model": ..., "optimizer": ...}`, an optimizer's state dict
    alone (of `torch.optim`, or as consolidated by torch's ZeroRedundancyOptimizer, or keyed by
    parameter names as FSDP2 gives it in full), or a model's. Takes weights in safetensors too.
    Nothing is unpickled but tensors and plain values. Prefixes of wrappers (`module.`,
    `_orig_mod.`) are removed from names. Without names, `load` matches parameters by position.
    """
    with reporting() as stages:
        made = ckpt.import_file(
            file,
            out,
            model_key=model_key,
            optimizer_key=optimizer_key,
            names=None if names is None else names.read_text().splitlines(),
            optimizer_class=optimizer_class,
            stages=stages,
        )
        info = ckpt.summary(made)
    parts = [part for part in ("model", "optimizer", "extra") if info[part] is not None]
    if "extra" in parts and isinstance(info["extra"]["value"], Mapping):
        parts[-1] += f" ({shorten_list(info['extra']['value'])})"
    _say(as_json, f"wrote {printable(made)}: {', '.join(parts)}", path=str(made))


# ------------------------------------------------------------------------------------ tables

# Anyone may have written the files: text from them is never markup, and control characters are
# escaped.


def _summary_report(info: Mapping[str, Any]) -> RenderableType:
    """Lay out a description that `checkpoint.summary` returned."""
    facts = Table(box=box.SIMPLE, show_header=False, title=_text(info["path"]))
    facts.title_justify = "left"
    facts.add_column(style="bold", no_wrap=True)
    for name, value in _facts(info):
        _add_row(facts, name, value)
    parts = [facts]
    if info["optimizer"] is not None:
        parts.append(_table("group>", "parameters>", "elements>", "options"))
        for number, group in enumerate(info["optimizer"]["groups"]):
            options = ", ".join(f"{key}={_short(value)}" for key, value in group["options"].items())
            _add_row(parts[-1], number, group["parameters"], group["elements"], options)
    parts.append(_table("file", "bytes>"))
    for name, nbytes in info["files"].items():
        _add_row(parts[-1], name, "missing" if name in info["missing"] else nbytes)
    if "tensors" in info:
        parts.append(_table("tensor", "dtype", "shape", "bytes>", "chunks>", "files"))
        for each in info["tensors"]:
            names = {chunk["file"].removesuffix(".safetensors") for chunk in each["chunks"]}
            form = (each["name"], each["dtype"], each["shape"], each["nbytes"])
            _add_row(parts[-1], *form, len(each["chunks"]), shorten_list(sorted(names)))
    return Group(*parts)


def _listing_report(info: Mapping[str, Any]) -> RenderableType:
    """Lay out a description that `checkpoint.listing` returned."""
    table = _table("checkpoint", "saved at", "size>", "ranks>", "", title=info["path"])
    for entry in info["checkpoints"]:
        name, size = _last(entry["path"]), show_nbytes(entry["nbytes"])
        ranks, newest = entry["made_by"].get("world_size", "?"), "newest" if entry["newest"] else ""
        _add_row(table, name, entry["saved_at"], size, ranks, newest)
    lines = [
        f"{_last(each['path'])}: not complete: {each['why'].removeprefix(each['path'] + ': ')}"
        for each in info["damaged"]
    ]
    for each in info["unfinished"]:
        left = "left by a save that did not finish; the next save here removes it"
        what = "a save is under way" if each["under_way"] else left
        lines.append(f"{_last(each['path'])}: {what}")
    return Group(table, *map(_text, lines))


def _table(*columns: str, title: str | None = None) -> Table:
    """Make a table; a column whose name ends with `>` has numbers."""
    table = Table(box=box.SIMPLE_HEAD, title=title and _text(title), title_justify="left")
    for name in columns:
        justify = "right" if name.endswith(">") else "left"
        table.add_column(name.removesuffix(">"), justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _add_row(table: Table, *cells: Any) -> None:
    table.add_row(*(_text(f"{cell:,}" if type(cell) is int else cell) for cell in cells))


def _facts(info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "format", f"{info['format']}, version {info['version']}"
    yield "saved at", info["saved_at"]
    yield "made by", _versions(info["made_by"])
    origin = info["made_by"].get("cut_from")
    if isinstance(origin, Mapping):
        yield "resharded from", f"made by {_versions(origin)}"
    optimizer, model, extra = info["optimizer"], info["model"], info["extra"]
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
            yield "without state", shorten_list(optimizer["without_state"])
    if model is not None:
        further = len(model["aliases"])
        aliases = f", {further} further name{'' if further == 1 else 's'}" if further else ""
        yield (
            "model",
            f"{show_nbytes(model['nbytes'])} in {model['tensors']:,} tensors "
            f"({model['elements']:,} elements, {', '.join(model['dtypes'])}){aliases}",
        )
    if extra is not None:
        nbytes = extra["nbytes"]
        yield "extra", f"{show_nbytes(nbytes)} of tensors" if nbytes else "without tensors"
        value = extra["value"]
        items = value.items() if isinstance(value, Mapping) else [("value", value)]
        for key, item in list(items)[:20]:
            yield f"  {key}", _short(item)
    yield "total", show_nbytes(info["nbytes"])


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


def _short(value: Any) -> str:
    text = printable(value)
    return text if len(text) <= MAX_WIDTH else f"{text[:MAX_WIDTH]}…"
