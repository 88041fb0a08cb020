"""The report agrees with the bytes that ranks hold and send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import PROBLEMS
from muon_and_adamw import ADAMW, groups_of
from ranks import run_ranks
from torch import nn, optim

from shardstep import ZeroRedundancyOptimizer


def _report(module_given: bool) -> dict[str, Any]:
    problem = PROBLEMS["gpt"]
    module = problem.fresh()
    extra = {"module": module} if module_given else {}
    opt = ZeroRedundancyOptimizer(groups_of(module), optim.AdamW, **extra, **ADAMW)
    before = opt.report()
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
    after = opt.report()
    states = [v for state in opt.optim.state.values() for v in state.values()]
    held = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
    return {
        "text": str(after),
        "state before": before.state_nbytes,
        "state": (after.state_nbytes, held),
        "sent": (after.sent_nbytes, sent),
        "gradients": after.gradient_nbytes,
        "owned": after.owned_nbytes,
        "parameters": (after.parameter_nbytes, sum(p.nbytes for p in module.parameters())),
    }


@pytest.mark.parametrize("module_given", [False, True])
def test_a_report_agrees_with_what_was_allocated_and_sent(module_given: bool) -> None:
    reports = run_ranks(_report, 3, module_given)
    for report in reports:
        assert report["state before"] == 0
        assert report["state"][0] == report["state"][1] > 0
        assert (report["gradients"] > 0) is module_given
        assert report["parameters"][0] == report["parameters"][1]
        assert "group 0: whole tensors: Muon needs 2-D parameters" in report["text"]
        assert "group 1: sliced tensors: AdamW updates each element on its own" in report["text"]
        assert "optimizer state" in report["text"]
        # Which parameters had a gradient travels along, and is not in it.
        assert report["sent"][0] <= report["sent"][1] <= report["sent"][0] + 4096
    assert sum(report["owned"] for report in reports) == reports[0]["parameters"][0]


class Coupled(optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        torch._foreach_div_(grads, torch.nn.utils.get_total_norm(grads))
        return super().step(closure)


def test_one_rank_is_told_what_several_would_do() -> None:
    def said(cls: Any, **options: Any) -> str:
        return str(ZeroRedundancyOptimizer([nn.Parameter(torch.ones(3))], cls, **options).report())

    assert "on several ranks whole tensors: Adafactor updates each tensor" in said(optim.Adafactor)
    assert "on several ranks sliced tensors: AdamW updates each element" in said(optim.AdamW)
    assert "not for several ranks: Coupled couples all parameters" in said(Coupled, lr=0.1)
    head = said(Coupled, lr=0.1).splitlines()[0]
    assert head == "Coupled on 1 rank, drop-in (ZeRO-1), layout whole, 3 trainable elements"


def _printed() -> tuple[str, str]:
    model = nn.Linear(64, 64)
    opt = ZeroRedundancyOptimizer(groups_of(model), optim.AdamW, module=model, **ADAMW)
    model(torch.ones(1, 64)).sum().backward()
    opt.step()
    return repr(opt), repr(opt.optim)


def test_a_printed_optimizer_says_class_ranks_mode_layout_and_bytes() -> None:
    for rank, (text, local) in enumerate(run_ranks(_printed, 2)):
        name, head, held, *groups = text.splitlines()
        assert name == "ZeroRedundancyOptimizer ("
        assert head.startswith("Muon and AdamW on 2 ranks, module= (ZeRO-2)")
        assert "layout mixed, 4,160 trainable elements" in head
        assert held.startswith(f"rank {rank} holds ")
        assert held.endswith("B of optimizer state")
        assert groups[0] == "Parameter Group 0"
        assert "MultiClass" not in text + local
