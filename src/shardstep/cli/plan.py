"""The command `shardstep plan`: memory and traffic of a training run that has not begun."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from shardstep.cli.options import output_png, parse_nbytes, parse_rate
from shardstep.cli.plan_inputs import Precision, import_model, make_job, read_model
from shardstep.cli.reporting import reporting
from shardstep.plan import ParamSpec
from shardstep.plan.methods import MAX_RANKS, Footprint, Job, fewest_ranks
from shardstep.plan.models import MODELS, model
from shardstep.report import show_nbytes
from shardstep_command import exit_on_ctrl_c

METHODS: dict[str, tuple[str, Callable[[Job, int], Footprint]]] = {
    "ddp": ("DDP", Job.ddp),
    "torch_zero": ("torch ZeRO", Job.torch_zero),
    "drop_in": ("shardstep drop-in", Job.drop_in),
    "module": ("shardstep module=", Job.module_mode),
    "fsdp2": ("FSDP2", Job.fsdp2),
}
"""A title and a function of the job and the number of ranks, by name in JSON."""

COLUMNS = ("parameters", "gradients", "masters", "state", "buffers", "peak")
TRAFFIC = ("imbalance", "sent", "time")
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def _parse_ranks(text: str) -> list[int]:
    try:
        ranks = [int(part) for part in str(text).split(",")]
    except ValueError:
        ranks = [0]
    if not all(1 <= each <= MAX_RANKS for each in ranks):
        raise typer.BadParameter(
            f"expected numbers from 1 to {MAX_RANKS:,}, such as 8,64, not {text!r}"
        )
    return sorted(set(ranks))


@exit_on_ctrl_c()  # torch imports more while it tries the class
def plan(
    name: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help=f"A known model: {', '.join(MODELS)}."),
    ] = None,
    factory: Annotated[
        str | None,
        typer.Option(
            "--import",
            metavar="PACKAGE.MODULE:FACTORY",
            help="A function or class that makes the model. It is called without arguments, on "
            "the meta device.",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--safetensors",
            metavar="PATH",
            help="Weights: a safetensors file, its index, or a folder.",
        ),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="CLASS",
            help="A class of torch.optim, or module.Class. With `Muon+AdamW`, Muon takes the "
            "matrices of the blocks, and AdamW the rest.",
        ),
    ] = "AdamW",
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="An option of the class, such as momentum=0.9. Repeatable."
        ),
    ] = None,
    precision: Annotated[
        Precision,
        typer.Option(
            help="own: the model's dtypes, with fp32 masters for 16-bit parameters. bf16: with "
            "fp32 masters. bf16-stochastic: stochastic rounding instead. bf16-only: neither."
        ),
    ] = "own",
    layout: Annotated[
        Literal["auto", "sliced", "whole"],
        typer.Option(help="auto: the layout that the class needs."),
    ] = "auto",
    ranks: Annotated[
        Any,
        typer.Option(
            parser=_parse_ranks,
            metavar="N,N,...",
            help="Numbers of ranks to plan for, up to 16,384.",
        ),
    ] = "1,2,4,8,16,64",
    link: Annotated[
        Any,
        typer.Option(
            parser=parse_rate, metavar="RATE", help="Rate of each rank's link, such as 400gbit."
        ),
    ] = "100gbit",
    memory: Annotated[
        Any,
        typer.Option(
            parser=parse_nbytes,
            metavar="BYTES",
            help="Memory of a rank, such as 80GB. Also prints the fewest ranks that fit.",
        ),
    ] = None,
    backend: Annotated[
        Literal["nccl", "gloo"],
        typer.Option(help="Sets the default size of a bucket, which is larger over NCCL."),
    ] = "nccl",
    bucket_bytes: Annotated[
        Any,
        typer.Option(parser=parse_nbytes, metavar="BYTES", help="Size of a bucket, such as 25MiB."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    picture: Annotated[
        Any,
        typer.Option(
            parser=output_png,
            metavar="FILE",
            help="Draw memory and owners to a PNG file (needs matplotlib).",
        ),
    ] = None,
) -> None:
    """Predict memory and traffic per rank, for shardstep, DDP, torch ZeRO and FSDP2.

    Nothing is allocated: the model is a list of shapes. The optimizer class runs on small or empty
    tensors to find its layout and its state. torch ZeRO is torch's ZeroRedundancyOptimizer. It and
    the drop-in run under DDP.

    *peak* is the sum of the columns before it, on the fullest rank, without activations and
    temporary tensors of the step. *imbalance* is the fullest rank's share as a multiple of the
    mean. *time* sends the bytes at the full rate of the link, as if nothing overlapped.
    """
    with reporting(f"planning with {optimizer}"):
        specs = _specs(name, factory, weights)
        job, reasons = make_job(
            specs, optimizer, option or [], precision, layout, backend, bucket_bytes
        )
        result = _predict(job, ranks, link, memory)
        result = {
            "model": name or factory or str(weights),
            "num_parameters": sum(spec.numel for spec in job.specs),
            "parameter_bytes": sum(spec.nbytes for spec in job.specs),
            "optimizer": optimizer,
            "precision": _precision(job),
            "layouts": reasons,
            "backend": backend,
            "bucket_bytes": job.bucket_bytes,
            **result,
        }
        if picture is not None:
            from shardstep.cli.plan_picture import draw

            draw(result, job.plan(min((n for n in ranks if n > 1), default=1)), picture)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _print(result)


def _specs(name: str | None, factory: str | None, weights: Path | None) -> list[ParamSpec]:
    if sum(each is not None for each in (name, factory, weights)) != 1:
        raise typer.BadParameter("expected exactly one of --model, --import and --safetensors")
    if factory is not None:
        return import_model(factory)
    if weights is not None:
        return read_model(weights)
    if name not in MODELS:
        raise typer.BadParameter(
            f"unknown model {name!r}; choose from {', '.join(MODELS)}, or use --import or "
            "--safetensors",
            param_hint="--model",
        )
    return model(name)


def _precision(job: Job) -> str:
    """Return the dtypes of the parameters, each with the one that is stepped on if it differs."""
    trained = {spec.dtype for spec in job.specs if spec.trainable}
    pairs = [(dtype, job.policy.step_dtype(dtype)) for dtype in sorted(trained, key=str)]
    words = [f"{a}" if a == b else f"{a} updated in {b}" for a, b in pairs]
    return ", ".join(words).replace("torch.", "") or "nothing trains"


def _predict(job: Job, ranks: list[int], link: int, memory: int | None) -> dict[str, Any]:
    def describe(footprint: Footprint) -> dict[str, Any]:
        seconds = footprint.sent * 8 / link
        return asdict(footprint) | {"peak": footprint.peak, "seconds": seconds}

    result: dict[str, Any] = {
        "link_bits_per_second": link,
        "plans": [
            {"ranks": n} | {key: describe(method(job, n)) for key, (_, method) in METHODS.items()}
            for n in ranks
        ],
    }
    if memory is not None:
        result["memory"] = memory
        result["fewest_ranks"] = {
            key: fewest_ranks(lambda n, method=method: method(job, n), memory)  # type: ignore[misc]
            for key, (_, method) in METHODS.items()
        }
    return result


def _print(result: dict[str, Any]) -> None:
    terminal = Console().is_terminal
    # A model's name is no markup.
    console = Console(width=None if terminal else 140, highlight=False, markup=False, emoji=False)
    unit, size = unit_of(result)
    console.print(
        f"{result['model']}: {result['num_parameters']:,} parameters, "
        f"{result['parameter_bytes'] / size:,.2f} {unit}; {result['optimizer']}, "
        f"{result['precision']}"
    )
    for line in result["layouts"]:
        console.print(line)
    tables = [_table(result, size, [*COLUMNS, *TRAFFIC])]
    if _width(tables[0]) > console.width:
        tables = [_table(result, size, columns, padding=0) for columns in (COLUMNS, TRAFFIC)]
        # A terminal that is narrower still breaks lines. Cut numbers would be worse.
        console.width = max(console.width, *map(_width, tables))
    tables[-1].caption = (
        f"{unit} on the fullest rank; sent and time per step; buckets of "
        f"{result['bucket_bytes'] / 2**20:.3g} MiB, over {result['backend']}"
    )
    console.print(*tables)
    most = result["plans"][-1]
    if result["backend"] == "gloo" and most["module"]["sent_most"] > 1.05 * most["module"]["sent"]:
        console.print(
            "Whole tensors make uneven segments, which Gloo sends directly. The busiest "
            f"of {most['ranks']:,} ranks sends {most['module']['sent_most'] / size:,.2f} {unit}."
        )
    if "memory" in result:
        console.print(f"Fewest ranks with a peak of at most {show_nbytes(result['memory'])}:")
        for key, (title, _) in METHODS.items():
            ranks = result["fewest_ranks"][key]
            console.print(f"  {title:<18} {ranks or f'none up to {MAX_RANKS:,}'}")


def unit_of(result: dict[str, Any]) -> tuple[str, float]:
    """Return the unit for all bytes of a result, and its number of bytes."""
    largest = max(row["ddp"]["peak"] for row in result["plans"])
    return next(each for each in UNITS if largest >= 10 * each[1] or each is UNITS[-1])


def _time(seconds: float) -> str:
    if 0 < seconds < 1e-4:
        return f"{seconds * 1e6:,.1f} µs"
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds * 1e3:,.1f} ms"


def _width(table: Table) -> int:
    return Console(width=1000).measure(table).maximum


def _table(
    result: dict[str, Any], size: float, columns: Sequence[str], padding: Any = (0, 1)
) -> Table:
    """Return a row for each number of ranks and method, with bytes as multiples of `size`."""
    table = Table(box=box.SIMPLE_HEAD, caption_justify="left", padding=padding)
    for column in ("ranks", "method", *columns):
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in result["plans"]:
        for number, (key, (title, _)) in enumerate(METHODS.items()):
            cells = {name: f"{row[key][name] / size:,.2f}" for name in (*COLUMNS, "sent")}
            cells["imbalance"] = f"{row[key]['imbalance']:.3f}"
            cells["time"] = _time(row[key]["seconds"])
            ranks = f"{row['ranks']:,}" if number == 0 else ""
            table.add_row(ranks, title, *(cells[name] for name in columns))
        table.add_section()
    return table
