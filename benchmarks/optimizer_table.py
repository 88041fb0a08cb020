"""Runs the classes of other packages sharded and unsharded, and writes what came of each.

    pip install --no-deps pytorch_optimizer einops
    python benchmarks/optimizer_table.py --out docs/optimizers.md
    pip install --no-deps schedulefree lion-pytorch prodigyopt dadaptation came-pytorch \\
        torch-optimizer pytorch_ranger adabelief-pytorch tabulate colorama
    python benchmarks/optimizer_table.py --others --out docs/optimizers.md

Each class is tried (`layout="auto"`), trained for 14 steps at two ranks beside itself unsharded,
its state consolidated and compared, and loaded into a fresh one that trains on for 6 steps. All is
compared to the bit: a class is *exact* if everything is equal, *refused* if it says why it cannot
be sharded, and *WRONG* otherwise, which makes this script fail.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import os
import re
import tempfile
import time
import warnings
from collections import Counter, deque
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SHAPES = [(33, 41), (24, 17), (7,), (64, 9), (300,), (12, 12)]
FIRST, THEN = range(14), range(14, 20)

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # What a class cannot do without: options, and options of its groups.
    "AdaMuon": ({}, {"use_muon": True}),
    "AdaGO": ({}, {"use_muon": True}),
    "Muon": ({}, {"use_muon": True}),
    "MuonClip": ({}, {"use_muon": True}),
    "NorMuon": ({}, {"use_muon": True}),
    "BSAM": ({"num_data": 100}, {}),
    "Ranger21": ({"num_iterations": 100}, {}),
    "CAME": ({"lr": 1e-3}, {}),
}
MATRICES = {"AdaMuon", "AdaGO", "Muon", "MuonClip", "NorMuon", "SpectralSphere"}
WITHOUT = {
    "AdaLOMO": "takes a model in place of parameters",
    "AdamMini": "takes a model in place of parameters",
    "DistributedMuon": "divides its work among ranks itself",
    "LOMO": "takes a model in place of parameters",
    "Lookahead": "takes an optimizer in place of parameters",
}
OTHERS = {
    "schedulefree": "schedulefree",
    "lion-pytorch": "lion_pytorch",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "came-pytorch": "came_pytorch",
    "adabelief-pytorch": "adabelief_pytorch",
    "torch-optimizer": "torch_optimizer",
}


def classes(others: bool) -> list[tuple[str, Any]]:
    """The classes, each with the name of the package that it is installed with."""
    if not others:
        from pytorch_optimizer.optimizer import OPTIMIZERS

        found = sorted(set(OPTIMIZERS.values()), key=lambda cls: str(cls.__name__))
        return [("pytorch-optimizer", cls) for cls in found]
    return [
        (package, value)
        for package, module in OTHERS.items()
        for name, value in sorted(vars(importlib.import_module(module)).items())
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and name == value.__name__
        and value.__module__.startswith(module)
    ]


def parameters(name: str) -> list[torch.nn.Parameter]:
    source = torch.Generator().manual_seed(1)
    shapes = [s for s in SHAPES if len(s) == 2 or name not in MATRICES]
    return [torch.nn.Parameter(0.1 * torch.randn(s, generator=source)) for s in shapes]


def train(opt: Any, params: list[torch.nn.Parameter], steps: range) -> None:
    """Take these steps; what has modes is turned to judge and back in between."""
    turn(opt, "train")
    for step in steps:

        def closure(step: int = step) -> torch.Tensor:
            """The gradients depend on where the parameters are when it is called."""
            source = torch.Generator().manual_seed(1000 + step)
            for param in params:
                param.grad = torch.randn(param.shape, generator=source) + 0.1 * param.detach()
            return torch.ones(())

        closure()

        try:
            opt.step()
        except (TypeError, AttributeError, RuntimeError, NotImplementedError):
            opt.step(closure)
    turn(opt, "eval")


def turn(opt: Any, mode: str) -> None:
    if hasattr(opt, "train") and hasattr(opt, "eval"):
        getattr(opt, mode)()


def groups(params: list[torch.nn.Parameter], options: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"params": params[:3], **options}, {"params": params[3:], **options, "lr": 0.002}]


def first_difference(one: Any, other: Any, path: str = "") -> str | None:
    """Where two state dicts differ; None if they are equal to the bit."""
    if isinstance(one, torch.Tensor):
        if type(one) is not type(other) or one.shape != other.shape:
            return path
        if is_traceable_wrapper_subclass(one):
            return first_difference(_inner(one), _inner(other), path)
        a, b = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
        return None if one.dtype == other.dtype and torch.equal(a, b) else path
    if isinstance(one, dict):
        if not isinstance(other, dict) or set(one) != set(other):
            return f"{path} (keys)"
        pairs = [(f"{path}.{key}", value, other[key]) for key, value in one.items()]
    elif isinstance(one, (list, tuple, deque)):
        if len(one) != len(other):
            return path
        pairs = [(f"{path}.{n}", *both) for n, both in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other or one != one else path
    return next((found for p, a, b in pairs if (found := first_difference(a, b, p))), None)


def _inner(tensor: Any) -> dict[str, Any]:
    names, context = tensor.__tensor_flatten__()
    return {**{name: getattr(tensor, name) for name in names}, "context": context}


def judge(cls: Any) -> tuple[str, str, str]:
    """Layout, outcome and remark, the same on every rank."""
    from shardstep import ZeroRedundancyOptimizer

    name = cls.__name__
    if name in WITHOUT:
        return "", "not tried", WITHOUT[name]
    options, group_options = OPTIONS.get(name, ({}, {}))
    params = parameters(name)
    try:
        opt = ZeroRedundancyOptimizer(groups(params, group_options), cls, **copy.deepcopy(options))
    except Exception as error:
        return "", "refused", " ".join(str(error).split())
    layout = opt.plan.layout
    plain = parameters(name)
    unsharded = cls(groups(plain, group_options), **copy.deepcopy(options))
    train(unsharded, plain, FIRST)
    train(opt, params, FIRST)
    if found := first_difference(list(plain), list(params)):
        return layout, "WRONG", f"parameter{found} differs in training"
    try:
        opt.consolidate_state_dict(to=0)
    except RuntimeError as error:
        return layout, "exact, cannot be saved", " ".join(str(error).split())
    # Every rank needs the full dict to load its share of it.
    box = [opt.state_dict() if opt.rank == 0 else None]
    dist.broadcast_object_list(box)
    saved: Any = box[0]
    if found := first_difference(unsharded.state_dict()["state"], saved["state"]):
        return layout, "WRONG", f"state{found} differs once consolidated"
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    again = ZeroRedundancyOptimizer(groups(resumed, group_options), cls, **copy.deepcopy(options))
    again.load_state_dict(saved)
    # Not every class goes on unsharded as if it had not been saved: that is the measure here.
    reloaded = [torch.nn.Parameter(p.detach().clone()) for p in plain]
    reference = cls(groups(reloaded, group_options), **copy.deepcopy(options))
    reference.load_state_dict(copy.deepcopy(unsharded.state_dict()))
    train(reference, reloaded, THEN)
    train(again, resumed, THEN)
    if found := first_difference(list(reloaded), list(resumed)):
        return layout, "WRONG", f"parameter{found} differs once loaded"
    return layout, "exact", ""


def rank_main(rank: int, world_size: int, folder: str, others: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size
    )
    rows = []
    for package, cls in classes(others):
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                row = judge(cls)
            except Exception as error:
                # Raised on both ranks alike, by the class itself.
                row = ("", "raised", f"{type(error).__name__}: {' '.join(str(error).split())}")
        answers: list[Any] = [None] * world_size
        dist.all_gather_object(answers, row)
        if any(answer != answers[0] for answer in answers):
            row = (row[0], "WRONG", f"ranks differ: {answers}")
        rows.append((package, cls.__name__, *row))
        if rank == 0:
            print(f"{time.perf_counter() - start:6.1f} s  {rows[-1]}", flush=True)
    if rank == 0:
        torch.save(rows, os.path.join(folder, "rows"))
    dist.destroy_process_group()


PAGE = """# Optimizer classes

The table shows what `layout="auto"` does with the {total} classes of
[pytorch-optimizer](https://pypi.org/project/pytorch-optimizer/) {version}:
{counts}.
It ran with torch {torch} on {ranks} ranks.
[benchmarks/optimizer_table.py](../benchmarks/optimizer_table.py) writes it.

- **exact**: equal bit for bit to the unsharded class: in training, in the consolidated state, and
  in training after loading it.
- **refused**: construction raises on every rank. A class that couples all parameters has to run
  unsharded. A class that draws random numbers runs with `layout="whole"`. Its ranks draw other
  numbers than a single process; seed each rank differently. A class that could not be probed runs
  with `layout="whole"` if each tensor's update depends only on that tensor.

[Layouts](layouts.md) explains `sliced`, `whole` and the probe.

| class | layout | outcome | remark |
|---|---|---|---|
"""

OTHERS_PAGE = """## Other packages

The same comparison for {packages}:
{counts}.
Schedule-free classes call `eval()` before saving, and `train()` before further training.

| package | class | layout | outcome | remark |
|---|---|---|---|---|
"""

Row = tuple[str, str, str, str, str]


def page(rows: list[Row], ranks: int, others: bool) -> str:
    outcomes = [row[3] for row in rows]
    packages = sorted({row[0] for row in rows})
    head = (OTHERS_PAGE if others else PAGE).format(
        total=len(rows),
        version=version(packages[0]),
        packages=",\n".join(f"{package} {version(package)}" for package in packages),
        torch=torch.__version__.split("+")[0],
        ranks=ranks,
        counts=counted(outcomes),
    )
    lines = [
        f"| {package + ' | ' if others else ''}{name} | {layout} | {outcome} "
        f"| {shorten(name, remark)} |"
        for package, name, layout, outcome, remark in rows
    ]
    return head + "\n".join(lines) + "\n"


def counted(outcomes: list[str]) -> str:
    """Return how often each outcome came, the most frequent first."""
    return ", ".join(f"{number} *{outcome}*" for outcome, number in Counter(outcomes).most_common())


REMEDIES = re.compile(
    r"(; use it unsharded|; pass layout='whole' to accept that"
    r"|; if each tensor's update depends only on).*"
)


def shorten(name: str, remark: str) -> str:
    """Return a remark without the class's name and the remedy, which the page gives once."""
    return REMEDIES.sub("", remark.removeprefix(f"{name} ")).replace("|", "/")[:220]


def put_section(page: Path, name: str, text: str) -> None:
    """Write `text` to a page in the place of what is there under `name`, or at its end."""
    first, last = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"
    before, after = page.read_text() if page.exists() else "", ""
    if first in before:
        before, _, rest = before.partition(first)
        after = rest.partition(last)[2]
    else:
        before += "\n" if before else ""
    page.write_text(f"{before}{first}{text}{last}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--others", action="store_true", help="the packages other than that one")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (options.ranks, folder, options.others), nprocs=options.ranks)
        rows = torch.load(os.path.join(folder, "rows"), weights_only=False)
    text = page(rows, options.ranks, options.others)
    if options.out is not None:
        put_section(options.out, "others" if options.others else "pytorch-optimizer", text)
    wrong = [row for row in rows if row[3] == "WRONG"]
    print(f"{len(rows)} classes, {len(wrong)} wrong: {[row[1] for row in wrong]}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
