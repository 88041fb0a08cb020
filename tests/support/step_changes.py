"""What users do to an optimizer between two steps, and whether a replayed step would notice.

A loop with these acts is run with the plain class, and with a sharded optimizer whose steps are
replayed: by graphs on a GPU, by doubles on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from problems import assert_alike, copies
from recorded import capturable, graphs_counted, steps_recorded
from torch import nn

from shardstep import ZeroRedundancyOptimizer

AdamW = torch.optim.AdamW
SHAPES = [(5, 7), (3,), (4, 4), (4, 4), ()]

Act = Callable[[Any, list[nn.Parameter]], object]
"""What a loop does to an optimizer and its parameters before a step."""


def new_params(device: str = "cpu") -> list[nn.Parameter]:
    """Return parameters with gradients."""
    random = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=random).to(device)) for shape in SHAPES]
    for param in params:
        param.grad = torch.zeros_like(param)
    return params


def _fill(params: list[nn.Parameter], step: int) -> None:
    """Write gradients in place, as a loop with `set_to_none=False` does."""
    random = torch.Generator().manual_seed(step)
    for param in params:
        if param.grad is not None:
            param.grad.copy_(torch.randn(param.shape, generator=random))


def run(opt: Any, params: list[nn.Parameter], acts: dict[int, Act], steps: int) -> list[Any]:
    """Take steps, with an act before some of them; return parameters and state."""
    for step in range(steps):
        _fill(params, step)
        acts.get(step, lambda opt, params: None)(opt, params)
        opt.step()
    state = opt.full_state if isinstance(opt, ZeroRedundancyOptimizer) else opt.state.__getitem__
    return [copies(params), [copy.deepcopy(dict(state(param))) for param in params]]


def compare(acts: dict[int, Act], steps: int = 9, device: str = "cpu", **options: Any) -> list[int]:
    """Compare with the plain class; return how often each recorded step was replayed."""
    options = {**capturable(device)[1], **options}
    params = new_params(device)
    expected = run(AdamW(params, **copy.deepcopy(options)), params, acts, steps)
    params = new_params(device)
    with steps_recorded() if device == "cpu" else graphs_counted() as made:
        got = run(ZeroRedundancyOptimizer(params, AdamW, **options), params, acts, steps)
    assert_alike(expected, got)
    return [each.replays for each in made]


def set_rate(opt: Any, _: Any) -> None:
    """As a scheduler does if the learning rate is a number."""
    for group in opt.param_groups:
        group["lr"] = 0.5 * group["lr"]


def set_rate_in_place(opt: Any, _: Any) -> None:
    """As a scheduler does if the learning rate is a tensor."""
    opt.param_groups[0]["lr"].mul_(0.5)


def new_gradients(_: Any, params: list[nn.Parameter]) -> None:
    """Give every gradient other memory."""
    for param in params:
        param.grad = param.grad.clone()


def _swap_gradients(_: Any, params: list[nn.Parameter]) -> None:
    params[2].grad, params[3].grad = params[3].grad, params[2].grad


def _without_one(_: Any, params: list[nn.Parameter]) -> None:
    params[1].grad = None


def _freeze(_: Any, params: list[nn.Parameter]) -> None:
    params[3].requires_grad_(False)
    params[3].grad = None


def _new_memory(_: Any, params: list[nn.Parameter]) -> None:
    params[0].data = params[0].data.clone()


def _option(opt: Any, _: Any) -> None:
    opt.param_groups[0]["weight_decay"] = 0.3


def _maximize(opt: Any, _: Any) -> None:
    opt.param_groups[0]["maximize"] = True


def _reload(opt: Any, _: Any) -> None:
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def _clear(opt: Any, _: Any) -> None:
    opt.state.clear()


def local_of(opt: Any) -> Any:
    return opt.optim if isinstance(opt, ZeroRedundancyOptimizer) else opt


def _new_state(opt: Any, _: Any) -> None:
    for state in local_of(opt).state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


def _move_state(opt: Any, _: Any) -> None:
    """As loops that keep the state in host memory between two phases do."""
    for state in local_of(opt).state.values():
        for value in state.values():
            value.data = value.data.clone() * 2


def _swap_state(opt: Any, _: Any) -> None:
    state = local_of(opt).state
    first, second = [param for param in state if param.shape == (4, 4)]
    state[first], state[second] = state[second], state[first]


def _rename_state(opt: Any, _: Any) -> None:
    for param, state in local_of(opt).state.items():
        step, first, second = state["step"], state["exp_avg"], state["exp_avg_sq"]
        swapped = {"step": step, "exp_avg_sq": first.abs_(), "exp_avg": second}
        local_of(opt).state[param] = swapped


def _same_rate(opt: Any, _: Any) -> None:
    opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"].detach()


def _scale(opt: Any, params: list[nn.Parameter]) -> None:
    """As a scaler that leaves the scale to the optimizer does."""
    local_of(opt).grad_scale = torch.full((), 4.0, device=params[0].device)
    local_of(opt).found_inf = torch.zeros((), device=params[0].device)


def _scale_and_freeze(opt: Any, params: list[nn.Parameter]) -> None:
    """What a scaler has left is not taken for a part of the class after a change of the plan."""
    _scale(opt, params)
    _freeze(opt, params)


def _mutable_option(opt: Any, _: Any) -> None:
    opt.param_groups[0]["betas"] = [0.5, 0.9]


AGAIN, NEW, NEVER = [8], [4, 3], [4]
"""The graph of the steps before is replayed, one of the steps after it, or none."""

CHANGES: dict[str, tuple[Act, list[int]]] = {
    "the learning rate is replaced": (set_rate, NEW),
    "the learning rate is written in place": (set_rate_in_place, AGAIN),
    "the learning rate is another tensor on the same memory": (_same_rate, AGAIN),
    "gradients have other memory": (new_gradients, NEW),
    "two gradients change places": (_swap_gradients, NEW),
    "a parameter has no gradient": (_without_one, NEW),
    "a parameter is frozen": (_freeze, NEW),
    "a parameter has other memory": (_new_memory, NEW),
    "an option changes": (_option, NEW),
    "an option can change in place": (_mutable_option, NEVER),
    "the direction changes": (_maximize, NEW),
    "a state dict is loaded": (_reload, NEW),
    "the state is cleared": (_clear, NEW),
    "state is replaced": (_new_state, NEW),
    "state has other memory": (_move_state, NEW),
    "state has other names": (_rename_state, NEW),
    "the states of two parameters change places": (_swap_state, NEW),
    "gradients are scaled": (_scale, NEVER),
    "gradients are scaled, and a parameter is frozen": (_scale_and_freeze, NEVER),
}
"""Acts before the sixth of nine steps, and how often graphs are replayed."""
