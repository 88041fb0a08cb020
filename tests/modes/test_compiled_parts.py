"""Compiled parts of a module wait for their own parameters; what else is compiled, for all."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import SGD, ConvNet, noise, with_zero
from on_ranks import on_ranks
from problems import assert_same, copies, differing
from torch import Tensor, nn
from torch._dynamo.utils import counters

from shardstep import ZeroRedundancyOptimizer

WIDTH = 160
"""Enough for a bucket per layer."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.inner(x))
        return y if weight is None else y @ weight


class _Reaching(_Block):
    """Reads a parameter of another part."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self._other = [other]

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return super().forward(x, self._other[0].weight)


class _Blocks(nn.Module):
    """Notes before each block whether the head, which is read last, is in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seen: list[list[bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append([])
        for block in self.blocks:
            self.seen[-1].append(_in_flight(self.head.weight))
            x = block(x)
        return self.head(self.blocks[0](x, self.head.weight))


def _in_flight(param: nn.Parameter) -> bool:
    return type(param) is not nn.Parameter


def _train(module: Any, opt: Any, steps: range) -> list[Tensor]:
    for step in steps:
        module(noise(step, 4, WIDTH)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return copies(module.parameters())


def _setup(backend: str | None = None) -> tuple[_Blocks, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    module = _Blocks()
    for block in module.blocks if backend else ():
        block.compile(backend=backend)
    return module, with_zero(module, SGD).opt


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@on_ranks(2, timeout=110)
def test_compiled_blocks_keep_the_overlap(backend: str) -> None:
    plain, opt = _setup()
    _train(plain, opt, range(2))
    expected = _train(plain, opt, range(2, 4))
    assert plain.seen == [[False] * 3, [True] * 3] * 2  # to copy parameters is to wait for them
    opt.detach()

    module, opt = _setup(backend)
    _train(module, opt, range(2))
    graphs = counters["stats"]["unique_graphs"]
    assert_same(expected, _train(module, opt, range(2, 4)), "compiled")
    assert module.seen == plain.seen
    assert counters["stats"]["unique_graphs"] == graphs  # no class of a parameter was new
    module.blocks[0].inner.bias.requires_grad_(False)
    _train(module, opt, range(4, 7))
    assert module.seen[-1] == [True] * 3  # also with another plan

    module.blocks[1].compile(backend=backend)  # nobody waits before its calls now
    _train(module, opt, range(7, 9))
    assert module.seen[-1] == [False] * 3


@on_ranks(2, timeout=110)
def test_what_else_is_compiled_ends_the_overlap() -> None:
    plain, opt = _setup()
    expected = _train(plain, opt, range(6))
    opt.detach()

    module, opt = _setup("eager")
    _train(module, opt, range(3))
    assert module.seen[-1] == [True] * 3
    whole = torch.compile(module, backend="eager")
    found = []
    for step in range(3, 6):
        whole(noise(step, 4, WIDTH)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        found.append(any(map(_in_flight, module.parameters())))
    assert found == [False] * 3
    assert_same(expected, copies(module.parameters()), "compiled as a whole")


@on_ranks(2, timeout=110)
def test_parts_that_read_parameters_of_others_are_not_compiled_in_every_pass() -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = _Blocks()
        module.blocks = nn.ModuleList(_Reaching(module.head) for _ in range(2))
        for block in module.blocks if compiled else ():
            block.compile(backend="eager", fullgraph=True)
        opt = with_zero(module, SGD).opt
        results.append(_train(module, opt, range(12)))
        opt.detach()
    assert_same(results[0], results[1], "compiled")


@pytest.mark.parametrize(
    ("hold_back", "dtype"),
    [
        (False, torch.bfloat16),
        pytest.param(False, torch.float32, marks=pytest.mark.slow),
        pytest.param(True, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(True, torch.float32, marks=pytest.mark.slow),
    ],
)
@on_ranks(2, timeout=110, fresh=True)
def test_a_model_may_be_compiled_while_gradients_are_sharded(
    hold_back: bool, dtype: torch.dtype
) -> None:
    """A batch of another size is compiled again. Torch looks at `param.grad` then."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = _Block().to(dtype)
        kind, options = SGD
        opt = ZeroRedundancyOptimizer(module.parameters(), kind, module=module, **options)
        call = torch.compile(module, backend="aot_eager") if compiled else module
        for step in range(3):
            with opt.no_sync() if hold_back else nullcontext():
                call(noise(step, 4 + step, WIDTH).to(dtype)).square().mean().backward()
            call(noise(step, 9 + 2 * step, WIDTH).to(dtype)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        results.append(copies(module.parameters()))
        opt.detach()
    assert counters["stats"]["unique_graphs"] == 2  # the second one for batches of any size
    assert_same(results[0], results[1], "compiled")


def _exported(module: nn.Module) -> Tensor:
    batch = noise(0, 4, 3, 6, 6)
    return torch.export.export(module, (batch,)).module()(batch)


def _traced(module: nn.Module) -> Tensor:
    batch = noise(0, 4, 3, 6, 6)
    return torch.jit.trace(module, (batch,), check_trace=False)(batch)


@pytest.mark.parametrize("record", [_exported, _traced])
@on_ranks(2, timeout=110)
def test_a_rank_may_export_the_model_between_steps(record: Any) -> None:
    """Also while it trains, and has buffers that a forward pass would send to the other ranks."""
    results = []
    for exports in (False, True):
        torch.manual_seed(0)
        module = ConvNet()
        opt = with_zero(module, SGD).opt
        for step in range(4):
            module(noise(step, 4, 3, 6, 6)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            module(noise(step + 10, 4, 3, 6, 6))  # changes buffers
            if exports and step < 2 and opt.rank == step:
                before = copies(module.buffers())
                assert record(module).isfinite().all()
                module.load_state_dict(
                    {n: b for (n, _), b in zip(module.named_buffers(), before, strict=True)},
                    strict=False,
                )
        results.append(copies([*module.parameters(), *module.buffers()]))
        opt.detach()
    assert_same(results[0], results[1], record)


@on_ranks(1)
def test_a_model_is_compiled_without_graph_breaks_by_its_method() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    opt = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, module=module)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="UncopiedHook"):
        torch.compile(module, backend="eager", fullgraph=True)(torch.ones(2, 4))
    before = copies(module.parameters())
    module.compile(backend="eager", fullgraph=True)
    module(torch.ones(2, 4)).sum().backward()
    opt.step()
    assert differing(before, copies(module.parameters())) == [0, 1]


@on_ranks(1)
def test_scripting_a_module_names_the_way_out() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    opt = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, module=module)
    copied = copy.deepcopy(module)
    assert torch.equal(copied(torch.ones(2, 4)), module(torch.ones(2, 4)))
    for hooked in (module, copied, copy.deepcopy(copied)):
        with pytest.raises(AttributeError, match=r"torch.jit.trace, or the optimizer's detach\(\)"):
            torch.jit.script(hooked)
    opt.detach()
    assert torch.equal(torch.jit.script(module)(torch.ones(2, 4)), module(torch.ones(2, 4)))
