"""Accelerate and Lightning read norms and clip under `module=` as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import MLP_PROBLEM, SGD, train, with_ddp, with_zero
from problems import differing
from ranks import run_ranks


def _clip_with_accelerate(setup: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).clip_grad_norm_(setup.module.parameters(), 0.01)


def _read_with_lightning(setup: Any) -> Any:
    from lightning.pytorch.utilities.grads import grad_norm

    return torch.stack([torch.as_tensor(norm) for norm in grad_norm(setup.module, 2).values()])


CALLS = {"accelerate": _clip_with_accelerate, "lightning": _read_with_lightning}


def _compare(package: str) -> list[str]:
    results = []
    setups = [
        with_zero(MLP_PROBLEM.fresh(), SGD, layout="whole"),
        with_ddp(MLP_PROBLEM.fresh(), SGD),
    ]
    for setup in setups:
        train(setup, MLP_PROBLEM, range(1))
        setup.backward(1)
        results.append(CALLS[package](setup))
        setup.finish()
    assert torch.equal(*results)
    return differing(setups[0].params, setups[1].params)


@pytest.mark.slow  # importing these packages takes seconds
@pytest.mark.parametrize("package", CALLS)
def test_norms_and_clipping_are_ddp_s(package: str) -> None:
    pytest.importorskip(package)
    assert run_ranks(_compare, 2, package) == [[], []]
