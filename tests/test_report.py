"""The report agrees with the bytes that ranks hold and send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixtures import ADAMW, MUON, mixed
from models import PROBLEMS
from on_ranks import on_ranks
from torch import nn, optim

from shardstep import ZeroRedundancyOptimizer


@pytest.mark.parametrize("module_given", [False, True])
@on_ranks(3)
def test_a_report_agrees_with_what_was_allocated_and_sent(module_given: bool) -> None:
    problem = PROBLEMS["gpt"]
    module = problem.fresh()
    extra = {"module": module} if module_given else {}
    opt = ZeroRedundancyOptimizer(mixed(module, **MUON), optim.AdamW, **extra, **ADAMW)
    assert opt.report().state_nbytes == 0
    comms = [opt.shards.comm, opt.mode.gather_comm] if module_given else [opt.shards.comm]

    def sent_so_far() -> int:
        kinds = ("reduce_scatter", "all_gather")
        return sum(comm.ledger.nbytes_sent[kind] for comm in comms for kind in kinds)

    start = sent_so_far()  # all ranks have been given rank 0's values
    problem.loss(module, 0).backward()
    for param in () if module_given else module.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
    opt.step()
    opt.shards.wait_for_params()
    sent = sent_so_far() - start
    report = opt.report()
    states = [v for state in opt.optim.state.values() for v in state.values()]
    held = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
    assert report.state_nbytes == held > 0
    assert (report.gradient_nbytes > 0) is module_given
    assert report.parameter_nbytes == sum(param.nbytes for param in module.parameters())
    assert "group 0: whole tensors: Muon needs 2-D parameters" in str(report)
    assert "group 1: sliced tensors: AdamW updates each element separately" in str(report)
    assert "optimizer state" in str(report)
    # Which parameters had a gradient travels along, and is not in it.
    assert report.sent_nbytes <= sent <= report.sent_nbytes + 4096
    owned = torch.tensor(report.owned_nbytes)
    dist.all_reduce(owned)
    assert owned == report.parameter_nbytes


class Coupled(optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        torch._foreach_div_(grads, torch.nn.utils.get_total_norm(grads))
        return super().step(closure)


def test_one_rank_is_told_what_several_would_do() -> None:
    def said(cls: Any, **options: Any) -> str:
        return str(ZeroRedundancyOptimizer([nn.Parameter(torch.ones(3))], cls, **options).report())

    assert "with more ranks, whole tensors: Adafactor updates each tensor" in said(optim.Adafactor)
    assert "with more ranks, sliced tensors: AdamW updates each element" in said(optim.AdamW)
    assert "more ranks are refused: Coupled couples all parameters" in said(Coupled, lr=0.1)
    head = said(Coupled, lr=0.1).splitlines()[0]
    assert head == "Coupled on 1 rank, drop-in (ZeRO-1), layout whole, 3 trainable elements"


@on_ranks(2)
def test_a_printed_optimizer_says_class_ranks_mode_layout_and_bytes() -> None:
    model = nn.Linear(64, 64)
    opt = ZeroRedundancyOptimizer(mixed(model, **MUON), optim.AdamW, module=model, **ADAMW)
    model(torch.ones(1, 64)).sum().backward()
    opt.step()
    name, head, held, *groups = repr(opt).splitlines()
    assert name == "ZeroRedundancyOptimizer ("
    assert head.startswith("Muon and AdamW on 2 ranks, module= (ZeRO-2)")
    assert "layout mixed, 4,160 trainable elements" in head
    assert held.startswith(f"rank {opt.rank} holds ")
    assert held.endswith("B of optimizer state")
    assert groups[0] == "Parameter Group 0"
    assert "MultiClass" not in repr(opt) + repr(opt.optim)
