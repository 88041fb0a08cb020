"""The commands `shardstep checkpoint ...`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal as show_nbytes

from shardstep import checkpoint as ckpt
from shardstep.cli.checkpoint_tables import listing_report, summary_report
from shardstep.cli.errors import printable, reporting
from shardstep.cli.flags import App
from shardstep.cli.units import parse_nbytes

app = App(help="Inspect, verify, reshard, export and import checkpoints.")

Source = Annotated[Path, typer.Argument(metavar="PATH", help="The checkpoint.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NoVerify = Annotated[
    bool, typer.Option("--no-verify", help="Do not compare files with their digests first.")
]


class Layout(StrEnum):
    """A layout."""

    sliced = "sliced"
    whole = "whole"


class Form(StrEnum):
    """A format to export to."""

    torch = "torch"
    torch_named = "torch-named"
    safetensors = "safetensors"


def _say(as_json: bool, text: str, **values: object) -> None:
    typer.echo(json.dumps(values) if as_json else text)


@app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint, or a folder of checkpoints.")
    ],
    as_json: AsJson = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor and its files.")
    ] = False,
) -> None:
    """Show what is in a checkpoint, or which checkpoints are in a folder.

    Of a checkpoint: when and by what it was saved, the optimizer's class, groups and options, sizes
    and files. Of a folder: its complete checkpoints, oldest first, and the remains of failed saves.
    Reads no tensors, and takes no longer for large checkpoints. Exits with 1 if a file is missing,
    or its length or header is wrong; `verify` compares digests too.
    """
    with reporting():
        if ckpt.is_checkpoint(path):
            said = ckpt.summary(path, tensors=tensors)
            report = summary_report(said)
        else:
            said = ckpt.listing(path)
            report = listing_report(said)
        if as_json:
            typer.echo(json.dumps(said, indent=2))
        else:
            Console(width=None if Console().is_terminal else 160).print(report)
        if said.get("damage"):
            raise ckpt.CheckpointError(said["damage"])


@app.command()
def verify(path: Source, as_json: AsJson = False) -> None:
    """Check that a checkpoint is as it was written.

    Compares every file with its digest, and finds every chunk of every tensor in its file, without
    gaps or overlaps. If something is wrong, names the file and exits with 1.
    """
    with reporting() as stages:
        nbytes, num_tensors = ckpt.verify(path, stages=stages)
    said = f"OK: {printable(path)} is complete, {num_tensors:,} tensors, {show_nbytes(nbytes)}"
    _say(as_json, said, path=str(path), complete=True, tensors=num_tensors, nbytes=nbytes)


@app.command()
def reshard(
    path: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks to reshard it for.")],
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

    A checkpoint loads at any world size as it is. Resharded for the ranks that load it, each reads
    one file; for one rank, its model is a single `model.safetensors`. Takes about 40 MB of memory
    beyond the lists of tensors, whatever the size. The result counts as saved now: in a folder with
    others it is the newest.
    """
    with reporting() as stages:
        made = ckpt.reshard(
            path,
            out,
            ranks,
            None if layout is None else layout.value,
            verify=not no_verify,
            stages=stages,
        )
    _say(as_json, f"wrote {printable(made)}", path=str(made))


@app.command()
def export(
    path: Source,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The file to make; for safetensors, the folder."),
    ],
    to: Annotated[Form, typer.Option("--to", help="The format.")] = Form.torch,
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

    **torch**: a file for `torch.load(..., weights_only=True)` with a dict of `model`, `optimizer`
    (the plain `torch.optim` state dict) and `extra`, as far as they were saved; with `--model-only`
    or `--optimizer-only` that state dict itself.

    **torch-named**: the same with optimizer state keyed by parameter names, as
    `torch.distributed.checkpoint` and FSDP2 have it in full state dicts.

    **safetensors**: the model's weights, as Hugging Face's libraries read them.

    Memory: 40 MB for safetensors. For torch, that of the largest tensor, and a temporary file of
    the size of all tensors in the folder of OUT.
    """
    if model_only and optimizer_only:
        raise typer.BadParameter("--model-only and --optimizer-only exclude each other")
    with reporting() as stages:
        made = ckpt.export(
            path,
            out,
            to.value,
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
            metavar="FILE", help="A file of torch.save, or safetensors: a file or a folder."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The checkpoint to make.")],
    model_key: Annotated[
        str | None,
        typer.Option(help="Where the model's state dict is, if not under a usual key."),
    ] = None,
    optimizer_key: Annotated[
        str | None,
        typer.Option(help="Where the optimizer's state dict is, if not under a usual key."),
    ] = None,
    optimizer_class: Annotated[
        str | None,
        typer.Option(
            help="The optimizer's class, such as AdamW or some.module.Lion, to be compared with "
            "the state now, and on load."
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
    """Make a checkpoint of another program's file, for `shardstep.checkpoint.load`.

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
    _say(as_json, f"wrote {printable(made)}", path=str(made))
