"""The low-bit optimizers of torchao and bitsandbytes: their numbers and their state, to the bit.

Skipped where the packages are missing (`pip install -e '.[lowbit]'`); what they need of this
library is tested with classes of our own, in test_foreign_state.py and test_probe.py. All classes
are run by benchmarks/lowbit_table.py, of which some are run here, in its way.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import raises_on_every_rank, run_ranks
from reference.naive_masters import NaiveMasters
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardstep import MixedPrecision, ZeroRedundancyOptimizer, checkpoint

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from lowbit_table import Case, clones, judge, parameters, train

ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WHERE = [
    pytest.param("cpu", "gloo", 2, id="cpu"),
    pytest.param("cuda", "nccl", 1, id="nccl", marks=ON_CUDA),
    pytest.param("cuda", "gloo", 2, id="two on a gpu", marks=ON_CUDA),
]
LIBRARIES = ["torchao", "bitsandbytes"]
CASES = {
    "torchao": [
        Case("torchao", "AdamW8bit"),
        Case("torchao", "Adam4bit"),
        Case("torchao", "AdamWFp8"),
        Case("torchao", "AdamW8bit", {"block_size": 2048}),
    ],
    "bitsandbytes": [
        Case("bitsandbytes", "AdamW8bit"),
        Case("bitsandbytes", "AdamW8bit", {"min_8bit_size": 50_000}),
        Case("bitsandbytes", "AdEMAMix8bit"),
        Case("bitsandbytes", "LAMB8bit"),
        Case("bitsandbytes", "PagedAdamW"),
        Case("bitsandbytes", "PagedLion8bit"),
    ],
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


def _class(library: str) -> Any:
    """Any one of the library's, not to be compiled: torchao compiles its step, for seconds.

    Compiled it is in the table, and in one test here.
    """
    torch.compiler.set_stance("force_eager")
    return importlib.import_module(f"{library}.optim").AdamW8bit


def _judge(library: str, dtype: torch.dtype, device: str, folder: Path, eager: bool) -> list[Any]:
    if eager:
        _class(library)
    cases = CASES[library] if eager else CASES[library][:1]
    return [
        (str(case), *judge(case, dtype, device, str(folder / str(number))))
        for number, case in enumerate(cases)
    ]


def _not_exact(outcomes: list[list[Any]], device: str = "cpu") -> list[Any]:
    # Not all that is on the CPU is on a GPU.
    fine = ("exact",) if device == "cpu" else ("exact", "not tried", "does not run")
    return [row for rows in outcomes for row in rows if row[2] not in fine]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("device", "backend", "world_size"), WHERE)
def test_training_moving_saving_and_loading_are_exact(
    library: str, dtype: torch.dtype, device: str, backend: str, world_size: int, tmp_path: Path
) -> None:
    args = (library, dtype, device, tmp_path, True)
    outcomes = run_ranks(_judge, world_size, *args, backend=backend, timeout=100)
    assert _not_exact(outcomes, device) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_steps_are_exact(library: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert _not_exact(run_ranks(_judge, 2, library, dtype, "cpu", tmp_path, False)) == []


# ------------------------------------------------------------------------------- in a module


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 300), nn.LayerNorm(300), nn.Linear(300, 64)
    ).to(device)


def _pass(run: nn.Module, opt: Any, steps: range, rank: int, device: str) -> list[float]:
    losses = []
    for step in steps:
        source = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(16, 96, generator=source).to(device)
        loss = run(x).float().square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def _against_ddp(library: str, device: str) -> list[str]:
    """Sharded gradients and a schedule of the learning rate, which torchao keeps in a tensor."""
    cls, rank = _class(library), torch.distributed.get_rank()
    torch.use_deterministic_algorithms(True, warn_only=True)
    ddp = DistributedDataParallel(_model(device))
    ours = _model(device)
    a = cls(ddp.parameters(), lr=1e-2)
    b = ZeroRedundancyOptimizer(ours.parameters(), cls, module=ours, bucket_bytes=50_000, lr=1e-2)
    failures = []
    schedules = [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5) for opt in (a, b)]
    for step in range(4):
        expected = _pass(ddp, a, range(5 * step, 5 * step + 5), rank, device)
        if _pass(ours, b, range(5 * step, 5 * step + 5), rank, device) != expected:
            failures.append(f"losses differ in round {step}")
        for schedule in schedules:
            schedule.step()
    pairs = zip(ddp.parameters(), ours.parameters(), strict=True)
    if not all(torch.equal(p, q) for p, q in pairs):
        failures.append("parameters differ")
    return failures


def _with_masters(library: str, device: str) -> list[int]:
    """The numbers of the parameters that differ."""
    cls = _class(library)
    plain, params = (parameters(torch.bfloat16, device) for _ in range(2))
    naive = NaiveMasters([{"params": plain}], cls, lr=1e-3)
    opt = ZeroRedundancyOptimizer(params, cls, precision=MixedPrecision(), lr=1e-3)
    for step in range(5):
        train(opt, params, range(step, step + 1))
        for param, twin in zip(plain, params, strict=True):
            param.grad = twin.grad
        naive.take_gradients()
        naive.step()
    return [n for n, pair in enumerate(zip(plain, params, strict=True)) if not torch.equal(*pair)]


@pytest.mark.parametrize("differing", [_against_ddp, _with_masters])
@pytest.mark.parametrize(("device", "backend", "world_size"), WHERE)
def test_with_a_module_or_masters_it_equals_ddp_and_unsharded_masters(
    library: str, differing: Any, device: str, backend: str, world_size: int
) -> None:
    outcome = run_ranks(differing, world_size, library, device, backend=backend)
    assert outcome == [[]] * world_size


# ------------------------------------------------------------- other world sizes and devices


def _start(library: str, device: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    params = parameters(dtype, device)
    opt = ZeroRedundancyOptimizer(params, _class(library), lr=1e-3, bucket_bytes=1)
    return params, opt


def _save(library: str, how: str, folder: Path, device: str) -> list[torch.Tensor]:
    params, opt = _start(library, device)
    train(opt, params, range(4))
    if how == "dcp":
        dcp.save({"optim": checkpoint.Sharded(opt)}, checkpoint_id=folder)
    else:
        checkpoint.save(folder, opt)
    return [param.detach() for param in clones(params)]


def _load(
    library: str, how: str, folder: Path, device: str, values: list[torch.Tensor]
) -> tuple[list[torch.Tensor], set[str]]:
    """Train on. Return the parameters and the devices of the state."""
    params, opt = _start(library, device)
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)
    if how == "dcp":
        dcp.load({"optim": checkpoint.Sharded(opt)}, checkpoint_id=folder)
    else:
        checkpoint.load(folder, opt)
    devices = set()
    for state in opt.optim.state.values():
        for key, value in state.items():
            names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
            inner = [getattr(value, name) for name in names] or [value]
            moments = [t for t in inner if isinstance(t, torch.Tensor) and key != "step"]
            devices |= {tensor.device.type for tensor in moments}
    train(opt, params, range(4, 7))
    return [param.detach().cpu() for param in params], devices


def _unbroken(library: str, device: str) -> list[torch.Tensor]:
    params = parameters(torch.float32, device)
    opt = _class(library)(params, lr=1e-3)
    train(opt, params, range(7))
    return [param.detach().cpu() for param in params]


@pytest.mark.parametrize("how", ["ours", "dcp"])
@pytest.mark.parametrize(
    ("save_on", "load_on", "world_sizes"),
    [
        pytest.param("cpu", "cpu", (2, 3), id="cpu"),
        pytest.param("cuda", "cuda", (2, 1), id="gpu", marks=ON_CUDA),
    ],
)
def test_training_goes_on_at_another_world_size(
    library: str, how: str, save_on: str, load_on: str, world_sizes: tuple[int, int], tmp_path: Path
) -> None:
    first, then = world_sizes
    folder = tmp_path / "saved"
    values, *_ = run_ranks(_save, first, library, how, folder, save_on)
    outcomes = run_ranks(_load, then, library, how, folder, load_on, values)
    (expected,) = run_ranks(_unbroken, 1, library, load_on)
    assert set.union(*(devices for _, devices in outcomes)) == {load_on}
    for params, _ in outcomes:
        pairs = zip(expected, params, strict=True)
        differing = [n for n, pair in enumerate(pairs) if not torch.equal(*pair)]
        assert differing == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("save_on", "load_on"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_state_follows_its_parameters_to_another_device(
    library: str, save_on: str, load_on: str, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    values, *_ = run_ranks(_save, 2, library, "ours", folder, save_on)
    outcomes = run_ranks(_load, 2, library, "ours", folder, load_on, values)
    assert [devices for _, devices in outcomes] == [{load_on}] * 2


# ----------------------------------------------------------------------------------- refused


def _with_override() -> None:
    import bitsandbytes

    embedding = bitsandbytes.nn.StableEmbedding(100, 64)
    ZeroRedundancyOptimizer(embedding.parameters(), bitsandbytes.optim.AdamW8bit)


def _random() -> None:
    cls = _class("torchao")
    params = parameters(torch.bfloat16, "cpu")
    ZeroRedundancyOptimizer(params, cls, bf16_stochastic_round=True)


def _offloaded() -> None:
    from torchao.optim import CPUOffloadOptimizer

    ZeroRedundancyOptimizer(parameters(torch.float32, "cuda"), CPUOffloadOptimizer)


HANDS_ON = "CPUOffloadOptimizer does not keep state"


@pytest.mark.parametrize(
    ("library", "build", "world_size", "match"),
    [
        ("bitsandbytes", _with_override, 2, "GlobalOptimManager has options"),
        ("torchao", _random, 2, "AdamW8bit draws random numbers"),
        pytest.param("torchao", _offloaded, 1, HANDS_ON, marks=ON_CUDA),
        pytest.param("torchao", _offloaded, 2, HANDS_ON, marks=ON_CUDA),
    ],
    indirect=["library"],
)
def test_what_ranks_cannot_honour_is_refused(
    library: str, build: Any, world_size: int, match: str
) -> None:
    raises_on_every_rank(build, world_size, ValueError, match=match)
