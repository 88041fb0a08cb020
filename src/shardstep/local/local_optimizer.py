"""The ordinary optimizer on this rank's pieces, in sync with the groups that the user sees."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from shardstep.local.empty_groups import empty_param, fill_empty_groups
from shardstep.local.multi_class import (
    CLASS_KEY,
    NO_OPTIONS,
    PER_PARAMETER,
    MultiClass,
    global_state,
    optimizer_name,
    parts_of,
)
from shardstep.local.sandbox import GLOBAL_HOOKS, sandbox
from shardstep.local.step_graphs import steps_of
from shardstep.local.train_eval import set_mode, start_training
from shardstep.params.groups import group_ranges
from shardstep.params.inputs import check_optimizer
from shardstep.params.same_bits import is_plain
from shardstep.params.sharded_params import ShardedParams

Groups = list[dict[str, Any]]

Held = Mapping[int, torch.Tensor]
"""Tensors of one group, by number of the parameter."""


class LocalOptimizer:
    """An unmodified optimizer class, `optim`, on the pieces of one rank.

    The groups that the user sees, those of `params`, are kept and written to. `groups_to_fill`
    returns the groups that get a placeholder where they are empty.
    """

    def __init__(
        self,
        params: ShardedParams,
        make: Callable[[Groups], Optimizer],
        groups_to_fill: Callable[[], Sequence[int]],
    ) -> None:
        self._exposed = params.groups
        self._params, self._shard = params, params.shard
        self._make = make
        self._groups_to_fill = groups_to_fill
        self.optim = make(self._groups(self._held()))
        check_optimizer(self.optim, len(self._exposed))
        self._steps = steps_of(self.optim)
        self._stepped = False
        # True until a step was taken or state was loaded: the state is the constructor's.
        self.fresh = True
        # The groups of the state dict that was given out before the first step, if one was.
        self.groups_given: list[dict[str, Any]] | None = None
        # Counts the changes of the state.
        self.version = 0

    @property
    def stepped(self) -> bool:
        """True once a step was taken, here or before the loaded state was saved."""
        return self._stepped

    @stepped.setter
    def stepped(self, value: bool) -> None:
        self._stepped = value
        self.mark_changed(value)

    def mark_changed(self, value: bool = True) -> None:
        """Count a change of the state; pass False if it was cleared."""
        self.fresh = self.fresh and not value
        self.version += 1

    def begins_with_state(self) -> bool:
        """Return True on every rank if the class makes state when it is constructed."""
        if self._shard.pieces:
            return bool(self.optim.state)
        return bool(self._twin(self._small_tensors()).state)

    @functools.cached_property
    def clears_to_none(self) -> bool | None:
        """The way in which the class itself clears gradients in its step.

        True for None, False for zero, None if it leaves them. It reaches only this rank's pieces
        of the gradients. A step on small tensors tells, with the same result on every rank.
        """
        if all(type(part).__module__.startswith("torch.optim.") for part in parts_of(self.optim)):
            return None
        held = self._small_tensors(1.0)
        params = [param for own in held for param in own.values()]
        for param in params:
            param.grad = torch.ones_like(param)
        if self._step_error(held) is not None:
            return None
        left = [param.grad for param in params]
        if all(grad is None for grad in left):
            return True
        return False if all(grad is not None and not grad.any() for grad in left) else None

    def _held(self) -> list[Held]:
        """Return this rank's pieces of each group."""
        return [dict(self._shard.in_group(indices)) for indices in group_ranges(self._exposed)]

    def _groups(self, held: Sequence[Held]) -> Groups:
        """Return the exposed groups with the tensors `held` in place of their parameters.

        Groups are matched by position, so a group stays where this rank owns nothing of it.
        """
        groups = []
        ranges = group_ranges(self._exposed)
        for group, indices, own in zip(self._exposed, ranges, held, strict=True):
            made = {**group, "params": list(own.values())}
            if "param_names" in group:
                made["param_names"] = [group["param_names"][i - indices.start] for i in own]
            groups.append(made)
        return groups

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> Any:
        """Take a step of the optimizer, with a closure only if there is one."""
        if closure is not None:
            kwargs["closure"] = closure
        with self.exposed_options():
            try:
                filled = self._no_empty_groups(self.optim, gradients_follow=closure is not None)
                with filled, _without_global_hooks():
                    result = self._steps.step(**kwargs)
                self._stepped = True
                return result
            finally:
                self.mark_changed()

    def set_mode(self, mode: str, /, *args: Any, **kwargs: Any) -> None:
        """Call the optimizer's `train` or `eval`."""
        with self._no_empty_groups(self.optim):
            set_mode(self.optim, mode, *args, **kwargs)

    def _no_empty_groups(
        self, optim: Optimizer, gradients_follow: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Fill empty groups of `optim` with placeholders, where its class needs that."""
        if all(group["params"] for group in optim.param_groups):
            return contextlib.nullcontext()
        placeholders = {}
        ranges = group_ranges(self._exposed)
        for number in self._groups_to_fill():
            params = self._exposed[number]["params"]
            if not params or optim.param_groups[number]["params"]:
                continue
            with torch._C.DisableTorchFunctionSubclass():  # do not wait for parameters in flight
                # A frozen parameter may have any dtype.
                position = next((n for n, param in enumerate(params) if param.requires_grad), 0)
                like = params[position]
                has_gradient = (gradients_follow and like.requires_grad) or any(
                    param.grad is not None for param in params
                )
                dtype = self._params.step_dtypes.get(ranges[number][position], like.dtype)
                placeholders[number] = empty_param(like, dtype, has_gradient)
        return fill_empty_groups(optim, placeholders)

    def let_go(self, tensor: torch.Tensor, address: int) -> None:
        """Clone the state of `tensor` at `address`, before that memory is reused.

        A class that swaps `p.data` with a tensor of its state leaves the state there.
        """

        def moved(value: Any) -> Any:
            plain = isinstance(value, torch.Tensor) and is_plain(value)
            return value.clone() if plain and value.data_ptr() == address else value

        state = self.optim.state.get(tensor)
        if isinstance(state, dict):
            for key, value in state.items():  # mostly tensors, which need no walk through a tree
                tensors = isinstance(value, torch.Tensor)
                state[key] = moved(value) if tensors else tree_map(moved, value)

    def let_go_of_gradients(self) -> None:
        """Clone state that is a gradient itself, whose memory DDP lends until the next backward."""
        for _, tensor in self._shard:
            if tensor.grad is not None:
                self.let_go(tensor, tensor.grad.data_ptr())

    def refuse_hand_edit(self) -> None:
        """Raise a `ValueError` if the user has changed which parameters the groups have."""
        if (edit := self._params.hand_edit()) is not None:
            raise ValueError(edit)

    @contextlib.contextmanager
    def exposed_options(self) -> Iterator[None]:
        """Take the exposed options over, and publish in the end those that have changed."""
        self.push_options()
        try:
            yield
        finally:
            self.publish_options()

    def push_options(self) -> None:
        """Replace the optimizer's options by the exposed ones, which schedulers write.

        Raises:
            ValueError: if the exposed groups have other parameters than this optimizer.
        """
        self.refuse_hand_edit()
        # After `add_param_group` there may be more groups here than there.
        for exposed, local in zip(self._exposed, self.optim.param_groups, strict=False):
            for key in local.keys() - exposed.keys() - NO_OPTIONS:
                del local[key]
            local.update({key: exposed[key] for key in exposed if key not in NO_OPTIONS})

    def publish_options(self) -> None:
        """Copy options from the optimizer to the exposed groups, in the optimizer's order."""
        for exposed, local in zip(self._exposed, self.optim.param_groups, strict=True):
            kept = {key: exposed[key] for key in PER_PARAMETER & exposed.keys()}
            merged = {key: kept.get(key, value) for key, value in local.items()}
            exposed.clear()
            exposed.update(merged)

    def states(self) -> dict[int, Any]:
        """Return the state of each piece that has some, by number of the parameter."""
        return {
            piece.param: self.optim.state[tensor]
            for piece, tensor in self._shard
            if tensor in self.optim.state
        }

    def _set_states(self, states: Mapping[int, Any]) -> None:
        for piece, tensor in self._shard:
            if piece.param in states:
                self.optim.state[tensor] = states[piece.param]

    def global_state(self) -> dict[Any, Any]:
        """Return the state that belongs to no parameter."""
        return global_state(self.optim)

    def adopt(self, params: ShardedParams, states: Mapping[int, Any]) -> None:
        """Step on other pieces from now on, with their state and with groups that were added."""
        self._params, self._shard = params, params.shard
        self.push_options()
        self.version += 1
        self._steps = steps_of(self.optim)  # without what it knows of other pieces
        self.optim.state = defaultdict(dict, self.global_state())
        self._set_states(states)
        for number, group in enumerate(self._groups(self._held())):
            if number < len(self.optim.param_groups):
                for key in PER_PARAMETER & group.keys():
                    self.optim.param_groups[number][key] = group[key]
            else:
                self.optim.add_param_group(group)
        self.publish_options()

    # ------------------------------------------------------- twins: other optimizers, on copies

    def rehearse(
        self, params: Collection[int], step: bool = True
    ) -> tuple[dict[int, Any], dict[Any, Any]]:
        """Return the state that a first step would make for these parameters, and global state.

        A twin of the optimizer takes one step with zero gradients on copies of the pieces. The
        form of its state is right, the values are not. Nothing else changes, and no hook runs.
        Without `step`, it is the state that the class makes when it is constructed.
        """
        copies = [{i: _copy(t) for i, t in own.items() if i in params} for own in self._held()]
        twin = self._twin(copies, step)
        states = {i: twin.state.get(copy) for own in copies for i, copy in own.items()}
        return {i: state for i, state in states.items() if state}, global_state(twin)

    def begin(self, params: Collection[int]) -> None:
        """Give these parameters the state that the class makes when it is constructed."""
        self._set_states(self.rehearse(params, step=False)[0])

    def try_group(self, group: Mapping[str, Any]) -> None:
        """Construct a twin with this group: the class may refuse it before anything changes."""
        # The shapes of the parameters, without their memory.
        params = [
            torch.nn.Parameter(param.detach().new_zeros(()).expand(param.shape))
            for param in group["params"]
        ]
        with self._sandbox(params):
            self._make([{**group, "params": params}])

    def try_idle(self) -> None:
        """Raise if a twin cannot step without parameters, before other ranks wait for this one."""
        error = self._step_error([{} for _ in self._exposed])
        # A class that raises anyway needs something else, such as a closure.
        if error is not None and self._step_error(self._small_tensors()) is None:
            raise ValueError(
                f"this rank owns no parameters, and {optimizer_name(self.optim)} cannot step "
                f"without any ({type(error).__name__}: {error}); use fewer ranks, or change the "
                "class to skip empty groups"
            ) from error

    def _step_error(self, held: Sequence[Held]) -> Exception | None:
        """Return the exception of a twin's first step on these tensors."""
        try:
            self._twin(held, step=True)
        except Exception as error:
            return error
        return None

    def _small_tensors(self, value: float = 0.0) -> list[Held]:
        """Return a small matrix for each group that has parameters, equal on every rank."""
        matrix = torch.nn.Parameter(torch.full((2, 2), value, device="cpu"))
        ranges = group_ranges(self._exposed)
        return [{indices.start: _copy(matrix)} if indices else {} for indices in ranges]

    def _twin(self, held: Sequence[Held], step: bool = False) -> Optimizer:
        """Construct an optimizer with the same options on `held`, one mapping per group.

        With `step`, it takes a first step.
        """
        groups = [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
            for group in self._groups(held)
        ]
        if isinstance(self.optim, MultiClass):
            # The groups have only the names of their classes.
            for group, kind in zip(groups, self.optim.classes, strict=False):
                group[CLASS_KEY] = kind
        with self._sandbox([tensor for own in held for tensor in own.values()]):
            twin = self._make(groups)
            if step:
                with self._no_empty_groups(twin):
                    start_training(twin)
                    twin.step()
        return twin

    @contextlib.contextmanager
    def _sandbox(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Isolate uses of the optimizer's classes on `tensors`."""
        devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
        with contextlib.ExitStack() as stack:
            for part in parts_of(self.optim):
                for device in sorted(devices, key=str):
                    # Keep the user's default device: a class may make a counter on the CPU.
                    stack.enter_context(sandbox(type(part), device, set_default_device=False))
            yield


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Run no hook on the steps of all optimizers: the user's call of `step()` runs them."""
    kept = [(hooks, hooks.copy()) for hooks in GLOBAL_HOOKS]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)  # another thread may have put its own back


def _copy(tensor: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter with the same values, and a gradient of zeros."""
    copy = torch.nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
    copy.grad = torch.zeros_like(copy)
    return copy


class LocalState(dict[torch.Tensor, Any]):
    """The state that this rank keeps, under the user's parameters. It can only be cleared."""

    def __init__(self, params: Sequence[torch.Tensor], local: LocalOptimizer) -> None:
        super().__init__({params[index]: state for index, state in local.states().items()})
        self._local = local

    def __missing__(self, param: torch.Tensor) -> Mapping[Any, Any]:
        # As in any optimizer, a parameter without state has an empty one. This one is read-only.
        return MappingProxyType({})

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("the state is sharded across ranks; set it with load_state_dict()")

    __setitem__ = __delitem__ = __ior__ = pop = popitem = setdefault = update = _refuse

    def __bool__(self) -> bool:
        # The same on every rank, also on one that owns nothing: torch's state dict functions take a
        # step on the ranks that find no state.
        return self._local.stepped

    def clear(self) -> None:
        """Drop this rank's state."""
        super().clear()
        self._local.optim.state.clear()
        self._local.stepped = False
