"""Runs the low-bit optimizers of `torchao` and `bitsandbytes` sharded and unsharded.

    pip install --no-deps torchao bitsandbytes
    python benchmarks/lowbit_table.py --out docs/optimizers.md

Each class is tried (`layout="auto"`) on parameters of 32 and of 16 bits, of 7 to 102,400 elements,
and trained at two ranks beside itself unsharded, on the CPU or, with `--device cuda`, on one GPU
that both ranks share. Then a parameter is frozen and unfrozen, so that its state moves; the state
is consolidated and compared; and training goes on in three optimizers that have loaded it: a
sharded one and a plain one from the state dict, and a sharded one from a checkpoint in files. All
is compared to the bit: a class is *exact* if everything is equal, *refused* if it says why it
cannot be sharded, *does not run* if it raises unsharded too, *not reproducible* if two unsharded
runs differ, and *WRONG* otherwise, which makes this script fail.

torchao compiles its steps, which takes a C++ compiler and minutes; `--eager` does without.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from optimizer_table import counted, first_difference, put_section, shorten

SHAPES = [(33, 41), (64, 80), (7,), (70, 65), (300,), (320, 320), (12,), (64, 64)]
"""Some are cut in blocks of 256 without a rest, and some beyond any block size among the options;
the largest is one that bitsandbytes pages."""
FIRST, FROZEN, MELTED, THEN = range(5), range(5, 6), range(6, 8), range(8, 11)
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A class with options, by the name of its library."""

    library: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def cls(self) -> Any:
        return getattr(importlib.import_module(f"{self.library}.optim"), self.name)

    def __str__(self) -> str:
        said = ", ".join(f"{k}={v}" for k, v in self.options.items() if k != "lr")
        return f"{self.name}({said})" if said else self.name


VARIANTS = [
    Case("torchao", "AdamW8bit", {"amsgrad": True}),
    Case("torchao", "AdamW8bit", {"block_size": 2048}),
    Case("torchao", "AdamW4bit", {"block_size": 320}),
    Case("torchao", "AdamW8bit", {"bf16_stochastic_round": True}),
    Case("bitsandbytes", "AdamW8bit", {"min_8bit_size": 16}),
    Case("bitsandbytes", "AdamW8bit", {"min_8bit_size": 50_000}),
    Case("bitsandbytes", "AdamW", {"optim_bits": 8, "weight_decay": 0.1}),
    Case("bitsandbytes", "AdEMAMix8bit", {"t_alpha": 10, "t_beta3": 10}),
]
NEEDED = {"SGD": {"momentum": 0.9}, "LARS": {"momentum": 0.9}, "PytorchLARS": {"momentum": 0.9}}
WITHOUT = {
    "AdEMAMix32bit": "writes beyond its own state, unsharded too",
    "PagedAdEMAMix32bit": "writes beyond its own state, unsharded too",
    "AdEMAMix8bit": "not reproducible: two unsharded runs differ, not every time",
    "PagedAdEMAMix8bit": "not reproducible: two unsharded runs differ, not every time",
}
"""On a GPU. On the CPU they raise."""


def cases(libraries: Iterable[str]) -> list[Case]:
    found = []
    for library in libraries:
        module = importlib.import_module(f"{library}.optim")
        names = sorted(
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        )
        for name in names:
            stem = name.removesuffix("8bit").removesuffix("32bit")
            found.append(Case(library, name, NEEDED.get(stem, {})))
        found += [case for case in VARIANTS if case.library == library]
    return found


def parameters(dtype: torch.dtype, device: str) -> list[torch.nn.Parameter]:
    source = torch.Generator().manual_seed(1)
    tensors = [0.1 * torch.randn(shape, generator=source) for shape in SHAPES]
    return [torch.nn.Parameter(tensor.to(device, dtype)) for tensor in tensors]


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.002}]


def train(opt: Any, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        source = torch.Generator().manual_seed(1000 + step)
        for param in params:
            grad = torch.randn(param.shape, generator=source)
            param.grad = grad.to(param) if param.requires_grad else None
        opt.step()


def raw_state(opt: Any, params: list[torch.nn.Parameter]) -> dict[int, Any]:
    """State as the class keeps it: one of these gives it out in another form."""
    state = getattr(opt, "state", {})  # one that hands its parameters on has none
    return {number: state[param] for number, param in enumerate(params) if param in state}


def clones(params: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(param.detach().clone()) for param in params]


def twin(state_dict: Any) -> Any:
    """A copy that shares nothing: `copy.deepcopy` and `pickle` do not know all of these tensors."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _of_any(answer: str | None) -> str | None:
    """What any rank answers, the lowest first: all go on, or none does. Called on every rank."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, answer)
    return next((each for each in answers if each is not None), None)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def judge(case: Case, dtype: torch.dtype, device: str, folder: str) -> tuple[str, str, str]:
    """Layout, outcome and remark, the same on every rank."""
    from shardstep import ZeroRedundancyOptimizer, checkpoint

    cls, options = case.cls, {"lr": 0.001, **case.options}
    if device != "cpu" and case.name in WITHOUT:
        return "", "not tried", WITHOUT[case.name]

    def sharded(params: list[torch.nn.Parameter]) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(groups(params), cls, bucket_bytes=100_000, **options)

    params, plain = parameters(dtype, device), parameters(dtype, device)
    once, twice = clones(plain), clones(plain)
    raised = None
    results: list[Any] = []
    try:
        for each in (once, twice):
            alone = cls(groups(each), **options)
            train(alone, each, range(MELTED.stop))
            results.append((list(each), raw_state(alone, each)))
    except Exception as error:
        raised = f"{type(error).__name__}: {_first_line(error)}"
    if raised := _of_any(raised):
        return "", "does not run", raised
    unlike = "two unsharded runs differ" if first_difference(*results) else None
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, [param.detach().cpu() for param in once])
    if unlike is None and first_difference(others[0], others[-1]):
        unlike = "unsharded runs on two ranks differ"
    unlike = _of_any(unlike)
    try:
        opt = sharded(params)
    except Exception as error:
        return "", "refused", " ".join(str(error).split()) or type(error).__name__
    layout = opt.plan.layout
    if unlike:
        return layout, "not reproducible", f"{unlike}, so nothing can be compared"
    unsharded = cls(groups(plain), **options)
    for steps, trains in ((FIRST, True), (FROZEN, False), (MELTED, True)):
        plain[1].requires_grad_(trains)
        params[1].requires_grad_(trains)
        train(unsharded, plain, steps)
        try:
            train(opt, params, steps)
        except RuntimeError as error:
            if "cannot be moved" not in str(error):
                raise
            return layout, "exact, cannot be saved", " ".join(str(error).split())
        if found := _of_any(first_difference(list(plain), list(params))):
            return layout, "WRONG", f"parameter{found} differs in training"
    opt.consolidate_state_dict(to=0)
    # Every rank needs the full dict to load its share of it.
    if opt.rank == 0:
        torch.save(opt.state_dict(), f"{folder}.dict")
    dist.barrier()
    saved = torch.load(f"{folder}.dict", weights_only=False)
    if found := _of_any(first_difference(raw_state(unsharded, plain), saved["state"])):
        return layout, "WRONG", f"state{found} differs once consolidated"
    where = checkpoint.save(folder, opt)
    # Not every class goes on unsharded as if it had not been saved: that is the measure here.
    expected = clones(plain)
    reference = cls(groups(expected), **options)
    reference.load_state_dict(twin(unsharded.state_dict()))
    train(reference, expected, THEN)
    for how in ("from the state dict", "into the plain class", "from a checkpoint"):
        resumed = clones(params)
        again: Any
        if how == "into the plain class":
            again = cls(groups(resumed), **options)
        else:
            again = sharded(resumed)
        if how == "from a checkpoint":
            checkpoint.load(where, again)
        else:
            again.load_state_dict(twin(saved))
        train(again, resumed, THEN)
        if found := _of_any(first_difference(list(expected), list(resumed))):
            return layout, "WRONG", f"parameter{found} differs once loaded {how}"
    return layout, "exact", ""


def rank_main(
    rank: int, world_size: int, device: str, libraries: list[str], eager: bool, folder: str
) -> None:
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager" if eager else "default")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    rows = []
    for number, (case, dtype) in enumerate(
        (case, dtype) for case in cases(libraries) for dtype in DTYPES
    ):
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                row = judge(case, dtype, device, f"{folder}/{number}")
            except Exception as error:
                row = ("", "WRONG", f"{type(error).__name__}: {' '.join(str(error).split())}")
        answers: list[Any] = [None] * world_size
        dist.all_gather_object(answers, row)
        if any(answer != answers[0] for answer in answers):
            row = (row[0], "WRONG", f"ranks differ: {answers}")
        rows.append((case.library, str(case), str(dtype).removeprefix("torch."), *row))
        if rank == 0:
            print(f"{time.perf_counter() - start:6.1f} s  {rows[-1]}", flush=True)
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


Row = tuple[str, str, str, str, str, str]

HEAD = """## {library} on {where}

The table shows what `layout="auto"` does with the classes of
[{library}](https://pypi.org/project/{library}/) {version}, on parameters of 32 and of 16 bits:
{counts}. It ran with torch {torch} on {ranks} ranks.
[benchmarks/lowbit_table.py](../benchmarks/lowbit_table.py) writes it.

*Exact* also covers state that moves between ranks, and loading into this optimizer, into the plain
class and from a checkpoint folder. A class *does not run* if it raises unsharded too. It is *not
reproducible* if two unsharded runs differ.

| class | parameters | layout | outcome | remark |
|---|---|---|---|---|
"""


def section(rows: list[Row], ranks: int, device: str, library: str) -> str:
    from importlib.metadata import version

    where = "the CPU" if device == "cpu" else torch.cuda.get_device_name()
    outcomes = [row[4] for row in rows]
    counts = counted(outcomes)
    head = HEAD.format(
        where=where,
        library=library,
        version=version(library),
        torch=torch.__version__.split("+")[0],
        ranks=ranks,
        counts=counts,
    )
    lines = []
    while rows:
        same = [row for row in rows if row[:2] == rows[0][:2] and row[3:] == rows[0][3:]]
        rows = [row for row in rows if row not in same]
        _, name, _, layout, outcome, remark = same[0]
        dtypes = ", ".join(row[2] for row in same)
        said = shorten(name.partition("(")[0], remark)
        lines.append(f"| {name} | {dtypes} | {layout} | {outcome} | {said} |")
    return head + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--libraries", nargs="+", default=["torchao", "bitsandbytes"])
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(
            rank_main,
            (options.ranks, options.device, options.libraries, options.eager, folder),
            nprocs=options.ranks,
        )
        rows = [tuple(row) for row in json.loads(Path(folder, "rows").read_text())]
    for library in options.libraries if options.out is not None else ():
        own = [row for row in rows if row[0] == library]
        text = section(own, options.ranks, options.device, library)
        put_section(options.out, f"{library}, {options.device}", text)
    wrong = [row for row in rows if row[4] == "WRONG"]
    print(f"{len(rows)} cases, {len(wrong)} wrong: {[row[1:3] for row in wrong]}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
