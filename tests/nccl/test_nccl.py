"""Every scenario in every mode over NCCL, with several ranks on one GPU.

At two ranks each sum has one order, so the numbers are DDP's to the bit. At three and four, NCCL's
reduce-scatter adds in another order than its all-reduce: `module=` and `register` are close to DDP,
and all else is equal to the bit.

    make test-nccl
"""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import freezing  # noqa: F401  # the scenarios
import graphs  # noqa: F401
import loops  # noqa: F401
import pytest
import surroundings  # noqa: F401
import torch
import torch.distributed.checkpoint as dcp
import uneven  # noqa: F401
from models import ADAMW, MLP_PROBLEM, Failing, rank, train, world_size
from on_nccl import run_on_nccl
from problems import copies, differing
from ranks import RankFailure
from recorded import NOT_FUSED, capturable, graphs_counted
from recovery import differences
from scenarios import ALL, REFUSED, SCENARIOS, compared, sharded, unsharded
from torch.torch_version import TorchVersion

from shardstep import MixedPrecision, ZeroRedundancyOptimizer, checkpoint
from shardstep.comm import OutOfStepError

pytestmark = [
    pytest.mark.nccl,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with NCCL"),
]

WITHOUT_DDP = {"sparse_gradients": "DDP itself raises: NCCL does not reduce sparse tensors"}
"""Scenarios that cannot be compared with DDP, and the reason."""

if TorchVersion(torch.__version__) < "2.13":
    for name in (
        "a_compiled_model_with_buffers",
        "buffers_with_no_sync",
        "two_forwards_of_a_model_with_buffers",
    ):
        WITHOUT_DDP[name] = "DDP itself raises before torch 2.13: it writes buffers that were saved"


def _compare(name: str) -> list[str]:
    warnings.simplefilter("ignore")
    refused = {mode for each, modes in REFUSED for mode in modes if each == name}
    return compared([name], modes=[mode for mode in ALL if mode not in refused])


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_equal_ddp_to_the_bit(name: str) -> None:
    if name in WITHOUT_DDP:
        pytest.skip(WITHOUT_DDP[name])
    assert run_on_nccl(_compare, 2, name) == [[], []]


def _compare_with_graphs(name: str) -> list[str]:
    warnings.simplefilter("ignore")
    refused = {mode for each, modes in REFUSED for mode in modes if each == name}
    with graphs_counted() as made:
        modes = [mode for mode in ALL if mode not in refused]
        found = compared([name], modes=modes, kinds=[capturable()])
    if name == "every_model" and not any(each.replays for each in made):
        found.append("no step was replayed")
    return found


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, scenario in SCENARIOS.items()
        if ADAMW in scenario.kinds and name not in (*WITHOUT_DDP, *NOT_FUSED)
    ],
)
def test_steps_replayed_as_cuda_graphs_equal_ddp_to_the_bit(name: str) -> None:
    assert run_on_nccl(_compare_with_graphs, 2, name) == [[], []]


MORE_RANKS = [
    "every_model",
    "accumulate_with_no_sync",
    "clip",
    "grad_scaler",
    "unused_parameters_with_no_sync",
    "freeze_and_unfreeze",
    "add_a_group",
    "uneven_inputs_and_a_scheduler",
]


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("name", MORE_RANKS)
def test_more_ranks_come_to_ddp_s_numbers(name: str, world_size: int) -> None:
    assert run_on_nccl(_compare, world_size, name) == [[]] * world_size


def _muon(mode: str) -> list[str]:
    def groups(module: torch.nn.Module) -> list[dict[str, Any]]:
        params = list(module.parameters())
        matrices = [p for p in params if p.ndim == 2]
        muon = {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 0.02}
        return [muon, {"params": [p for p in params if p.ndim != 2]}]

    module = MLP_PROBLEM.fresh()
    setup = sharded(mode, module, ADAMW, groups)
    train(setup, MLP_PROBLEM, range(6))
    plain = unsharded(MLP_PROBLEM.fresh(), ADAMW)
    params = list(plain.module.parameters())
    muon = torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02)
    adamw = torch.optim.AdamW([p for p in params if p.ndim != 2], **copy.deepcopy(ADAMW[1]))
    for step in range(6):
        MLP_PROBLEM.loss(plain.model, step).backward()
        muon.step()
        adamw.step()
        plain.model.zero_grad()
    return [f"parameter {n}" for n in differing(plain.params, setup.params)]


@pytest.mark.parametrize(
    ("world_size", "mode"),
    [(2, "module"), (2, "register"), (3, "drop-in views"), (4, "drop-in"), (4, "hook")],
)
def test_muon_with_adamw_equals_ddp_to_the_bit(world_size: int, mode: str) -> None:
    assert run_on_nccl(_muon, world_size, mode) == [[]] * world_size


def _masters() -> list[float]:
    module = MLP_PROBLEM.fresh().bfloat16()
    opt = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, module=module, precision=MixedPrecision(), lr=0.01
    )
    for step in range(6):
        x = torch.full((4, 16), 0.1 * (step + rank() + 1), dtype=torch.bfloat16)
        module(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert {master.dtype for master in opt.shards.masters().values()} == {torch.float32}
    return [float(param.double().sum()) for param in module.parameters()]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_masters_leave_all_ranks_with_the_same_parameters(world_size: int) -> None:
    first, *others = run_on_nccl(_masters, world_size)
    assert all(other == first for other in others)


# -------------------------------------------------------------------------- saving and loading


def _trained(steps: range, load: Path | None = None, **options: Any) -> Any:
    module = MLP_PROBLEM.fresh()
    opt = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, module=module, lr=0.01, **options
    )
    if load is not None:
        checkpoint.load(load, opt, module)
    for step in steps:
        torch.manual_seed(step)  # the same batch on every rank, for any number of them
        module(torch.randn(8, 16)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return module, opt


def _save(folder: Path) -> list[torch.Tensor]:
    module, opt = _trained(range(3))
    checkpoint.save(folder / "now", opt, module)
    checkpoint.async_save(folder / "later", opt, module).wait()
    dcp.save({"optim": checkpoint.Sharded(opt)}, checkpoint_id=str(folder / "dcp"))
    opt.consolidate_state_dict(to=world_size() - 1)
    if rank() == world_size() - 1:
        assert len(opt.state_dict()["state"]) == len(list(module.parameters()))
    return copies(_trained(range(6))[0].parameters())


def _resume(path: Path, layout: str) -> list[torch.Tensor]:
    return copies(_trained(range(3, 6), path, layout=layout)[0].parameters())


def test_checkpoints_resume_at_any_number_of_ranks(tmp_path: Path) -> None:
    expected = run_on_nccl(_save, 2, tmp_path)[0]
    for world, kind, layout in ((2, "now", "whole"), (4, "later", "sliced"), (3, "now", "sliced")):
        for params in run_on_nccl(_resume, world, tmp_path / kind, layout):
            if world == 2:
                assert not differing(expected, params)
            close = [torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, params, strict=True)]
            assert all(close)


def _load_dcp(folder: Path) -> bool:
    _, opt = _trained(range(0))
    state = {"optim": checkpoint.Sharded(opt)}
    dcp.load(state, checkpoint_id=str(folder / "dcp"))
    return all(float(held["step"]) == 3.0 for held in opt.optim.state.values())


def test_dcp_loads_at_another_number_of_ranks(tmp_path: Path) -> None:
    run_on_nccl(_save, 2, tmp_path)
    assert run_on_nccl(_load_dcp, 3, tmp_path) == [True] * 3


# ----------------------------------------------------------------------------- errors and faults


def _different_models() -> str:
    module = torch.nn.Linear(8, 8 + rank())
    try:
        ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, module=module, lr=0.1)
    except ValueError as error:
        return str(error)
    return "did not raise"


@pytest.mark.parametrize("world_size", [2, 4])
def test_different_models_are_refused_on_every_rank(world_size: int) -> None:
    for said in run_on_nccl(_different_models, world_size):
        assert "weight" in said


def _apart(mode: str, cause: str, recoverable: bool = False) -> tuple[int, str]:
    """Let rank 1 leave the others' path in step 2, and return the step that tells this rank."""
    kind = (Failing if cause == "raises" else torch.optim.SGD, {"lr": 0.1})
    zero = {"layout": "sliced", "recoverable": recoverable}
    setup = sharded(mode, MLP_PROBLEM.fresh(), kind, zero=zero)
    for step in range(6):
        Failing.armed = step == 2
        if cause == "option" and step == 2 and rank() == 1:
            setup.opt.param_groups[0]["lr"] = 0.2
        try:
            setup.backward(step)
            setup.opt.step()
        except ArithmeticError:
            pass
        except OutOfStepError as error:
            return step, str(error)
        setup.opt.zero_grad()
    return -1, "it did not raise"


@pytest.mark.parametrize("mode", ["drop-in", "module", "register", "hook"])
@pytest.mark.parametrize(
    ("cause", "said", "world_size"),
    [("option", "option 'lr' of group 0 is 0.1", 2), ("raises", "step() that raised", 3)],
)
def test_every_rank_learns_that_one_is_out_of_step(
    mode: str, cause: str, said: str, world_size: int
) -> None:
    told = run_on_nccl(_apart, world_size, mode, cause)
    assert len(set(told)) == 1
    step, error = told[0]
    assert 2 <= step <= 4  # ranks compare their notes one step later, to let the host run ahead
    assert said in error


@pytest.mark.parametrize(("cause", "noticed"), [("option", 2), ("raises", 3)])
def test_a_rank_that_can_recover_learns_it_at_the_next_step(cause: str, noticed: int) -> None:
    assert {step for step, _ in run_on_nccl(_apart, 2, "module", cause, True)} == {noticed}


def _recover() -> str:
    setup = sharded("module", MLP_PROBLEM.fresh())
    with pytest.raises(RuntimeError) as caught:
        setup.opt.recover()
    return str(caught.value)


def test_recovery_is_refused_where_the_others_may_have_stepped() -> None:
    for said in run_on_nccl(_recover, 2):
        assert "recoverable=True" in said


def _skip(where: str) -> list[str]:
    return differences(where, recoverable=True)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("where", ["loader", "forward", "backward"])
def test_a_batch_that_fails_on_a_rank_is_skipped_on_all(where: str, world_size: int) -> None:
    assert run_on_nccl(_skip, world_size, where) == [[]] * world_size


def _one_dies() -> None:
    module, opt = _trained(range(2))
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    module(torch.ones(2, 16)).sum().backward()
    opt.step()
    torch.cuda.synchronize()


def test_a_rank_that_dies_does_not_leave_the_other_waiting() -> None:
    with pytest.raises(RankFailure, match="rank 1 died"):
        run_on_nccl(_one_dies, 2)
