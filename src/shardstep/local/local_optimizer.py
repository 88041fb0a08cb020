"""The ordinary optimizer on this rank's pieces, kept in step with the groups the user sees."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from shardstep.local.empty_groups import filled, stand_in
from shardstep.local.multi_class import CLASS_KEY, MultiClass, parts_of
from shardstep.local.sandbox import sandbox
from shardstep.local.train_eval import start_training, turn
from shardstep.params.inputs import check_optimizer
from shardstep.params.same_bits import is_plain
from shardstep.params.shard import Shard

_PER_PARAMETER = {"params", "param_names"}

Groups = list[dict[str, Any]]


class LocalOptimizer:
    """An unmodified optimizer class on the pieces of one rank.

    Args:
        exposed: the groups that the user sees, with all parameters; kept and written to.
        shard: this rank's pieces.
        make: constructs the optimizer from groups.
        to_fill: says which groups are to be filled if there is nothing of them here.
        dtype: says in which dtype the parameter of a number, and of a dtype, is stepped on.

    Attributes:
        optim: the optimizer.
    """

    def __init__(
        self,
        exposed: Groups,
        shard: Shard,
        make: Callable[[Groups], Optimizer],
        to_fill: Callable[[], Sequence[int]],
        dtype: Callable[[int, torch.dtype], torch.dtype],
    ) -> None:
        self._exposed = exposed
        self._shard = shard
        self._make = make
        self._to_fill = to_fill
        self._dtype = dtype
        self.optim = make(self._groups(shard))
        check_optimizer(self.optim, len(exposed))

    def _groups(self, shard: Shard) -> Groups:
        """The pieces of `shard` in the groups of their parameters, with those groups' options.

        A group of which this rank owns nothing stays, empty: groups are matched by position.
        """
        local = []
        start = 0
        for group in self._exposed:
            held = shard.in_group(range(start, start + len(group["params"])))
            mine = {**group, "params": [tensor for _, tensor in held]}
            if "param_names" in group:
                mine["param_names"] = [group["param_names"][index - start] for index, _ in held]
            local.append(mine)
            start += len(group["params"])
        return local

    def step(self, **kwargs: Any) -> Any:
        """Take a step.

        Args:
            **kwargs: passed on to the optimizer's `step`.
        """
        evaluates = kwargs.get("closure") is not None
        with filled(self.optim, self._missing(self.optim, gradients_come=evaluates)):
            return self.optim.step(**kwargs)

    def turn(self, mode: str, /, *args: Any, **kwargs: Any) -> None:
        """Go over to a mode.

        Args:
            mode: its name.
            *args: passed on to the optimizer's method of that name.
            **kwargs: passed on to it.
        """
        with filled(self.optim, self._missing(self.optim)):
            turn(self.optim, mode, *args, **kwargs)

    def _missing(
        self, optim: Optimizer, gradients_come: bool = True
    ) -> dict[int, torch.nn.Parameter]:
        """The groups of `optim` that are to be filled, as `filled` takes them."""
        missing = {}
        for number in self._to_fill():
            params = self._exposed[number]["params"]
            if not params or optim.param_groups[number]["params"]:
                continue
            with torch._C.DisableTorchFunctionSubclass():  # parameters in flight stay there
                # One that has no part in training may be of any dtype.
                place = next((i for i, param in enumerate(params) if param.requires_grad), 0)
                like = params[place]
                has_gradient = any(param.grad is not None for param in params)
                has_gradient = has_gradient or (gradients_come and like.requires_grad)
                index = sum(len(group["params"]) for group in self._exposed[:number]) + place
                missing[number] = stand_in(like, self._dtype(index, like.dtype), has_gradient)
        return missing

    def let_go(self, tensor: torch.Tensor, address: int) -> None:
        """Let the state of `tensor` not lie at `address`, in memory that is about to be used again.

        A class that exchanges `p.data` for a tensor of its state leaves it there.
        """

        def own(value: Any) -> Any:
            plain = isinstance(value, torch.Tensor) and is_plain(value)
            return value.clone() if plain and value.data_ptr() == address else value

        state = self.optim.state.get(tensor)
        if isinstance(state, dict):
            state.update(tree_map(own, dict(state)))

    def push_options(self) -> None:
        """Let what schedulers and users wrote to the exposed groups reach the optimizer."""
        for exposed, local in zip(self._exposed, self.optim.param_groups, strict=True):
            for key, value in exposed.items():
                if key not in _PER_PARAMETER and key != CLASS_KEY:
                    local[key] = value

    def publish_options(self) -> None:
        """Let what the optimizer keeps in its groups be seen, in the order it keeps it."""
        for exposed, local in zip(self._exposed, self.optim.param_groups, strict=True):
            own = {key: exposed[key] for key in _PER_PARAMETER & exposed.keys()}
            merged = {key: own.get(key, value) for key, value in local.items()}
            exposed.clear()
            exposed.update(merged)

    def states(self) -> dict[int, Any]:
        """The state of each piece that has some, by number of the parameter."""
        return {
            piece.param: self.optim.state[tensor]
            for piece, tensor in self._shard
            if tensor in self.optim.state
        }

    def rehearse(self, params: Collection[int]) -> tuple[dict[int, Any], dict[Any, Any]]:
        """The state that a first step would make for these parameters, and for none of them.

        Another optimizer of the same class takes one step with zero gradients, on copies of this
        rank's pieces of them. What it makes tells the form of the state, not its values.
        Parameters, state, options and random numbers are as before, and nobody's hooks are called.
        """

        def use(twin: Optimizer) -> None:
            with filled(twin, self._missing(twin)):
                start_training(twin)
                twin.step()

        return self._twin(params, use)

    def begin(self, params: Collection[int]) -> None:
        """Give these parameters the state that the class gives to new ones, if it gives any."""
        states, _ = self._twin(params, lambda twin: None)
        for piece, tensor in self._shard:
            if piece.param in states:
                self.optim.state[tensor] = states[piece.param]

    def _twin(
        self, params: Collection[int], use: Callable[[Optimizer], object]
    ) -> tuple[dict[int, Any], dict[Any, Any]]:
        """The state of another optimizer of the same class, on copies, after it has been used."""
        groups: Groups = []
        copies: dict[int, torch.Tensor] = {}
        start = 0
        classes = self.optim.classes if isinstance(self.optim, MultiClass) else None
        for number, group in enumerate(self._exposed):
            held = self._shard.in_group(range(start, start + len(group["params"])))
            own = {index: _copy(tensor) for index, tensor in held if index in params}
            options = {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key not in _PER_PARAMETER
            }
            if "param_names" in group:
                options["param_names"] = [group["param_names"][index - start] for index in own]
            if classes is not None:
                # The group has the name of its class, of which no optimizer can be made.
                options[CLASS_KEY] = classes[number]
            groups.append({**options, "params": list(own.values())})
            copies.update(own)
            start += len(group["params"])
        with self._sandbox(list(copies.values())):
            twin = self._make(groups)
            use(twin)
        states = {index: twin.state[copy] for index, copy in copies.items() if twin.state.get(copy)}
        return states, _global_state(twin)

    def try_group(self, group: Mapping[str, Any]) -> None:
        """Find out whether an optimizer can have a group like this, before it is given one.

        Raises:
            Exception: what the class raises if not.
        """
        # Of the parameters' form, but without their memory.
        params = [
            torch.nn.Parameter(param.detach().new_zeros(()).expand(param.shape))
            for param in group["params"]
        ]
        with self._sandbox(params):
            self._make([{**group, "params": params}])

    def try_idle(self) -> None:
        """Find out whether an optimizer can take a step without parameters, before ranks wait for
        this one, which has none.

        Raises:
            ValueError: if it cannot, and can with some.
        """
        error = self._failure_of_step([[] for _ in self._exposed])
        if error is None:
            return
        some = [[torch.nn.Parameter(torch.zeros(2, 2, device="cpu"))] for _ in self._exposed]
        for [param] in some:
            param.grad = torch.zeros_like(param)
        # What raises anyway is waiting for something else, such as a closure.
        if self._failure_of_step(some) is None:
            raise ValueError(
                f"this rank has nothing to update, and {type(self.optim).__name__} cannot take a "
                f"step without parameters ({type(error).__name__}: {error}); use fewer ranks, or "
                "have it skip groups that are empty"
            ) from error

    def _failure_of_step(self, params: list[list[torch.nn.Parameter]]) -> Exception | None:
        """What another optimizer with these options raises in its first step."""
        classes = self.optim.classes if isinstance(self.optim, MultiClass) else None
        groups = []
        for number, (group, own) in enumerate(zip(self._exposed, params, strict=True)):
            options = {k: v for k, v in group.items() if k not in _PER_PARAMETER}
            if classes is not None and number < len(classes):
                options[CLASS_KEY] = classes[number]
            groups.append({**options, "params": own})
        with self._sandbox([]):
            try:
                twin = self._make(groups)
                with filled(twin, self._missing(twin)):
                    start_training(twin)
                    twin.step()
            except Exception as error:
                return error
        return None

    @contextlib.contextmanager
    def _sandbox(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """While this lasts, what is done with the optimizer's classes leaves no trace."""
        devices = {tensor.device for tensor in tensors} or {torch.device("cpu")}
        with contextlib.ExitStack() as stack:
            for part in parts_of(self.optim):
                for device in sorted(devices, key=str):
                    # A counter that lies on the CPU is to be told from one on the device.
                    stack.enter_context(sandbox(type(part), device, by_default=False))
            yield

    def global_state(self) -> dict[Any, Any]:
        """State that belongs to no parameter."""
        return _global_state(self.optim)

    def adopt(self, shard: Shard, states: Mapping[int, Any]) -> None:
        """Step on other pieces from now on, with the state given for them.

        The exposed groups may have grown; the optimizer's grow along.
        """
        self._shard = shard
        self.optim.state = defaultdict(dict, self.global_state())
        for piece, tensor in shard:
            if piece.param in states:
                self.optim.state[tensor] = states[piece.param]
        for number, group in enumerate(self._groups(shard)):
            if number < len(self.optim.param_groups):
                for key in _PER_PARAMETER & group.keys():
                    self.optim.param_groups[number][key] = group[key]
            else:
                self.optim.add_param_group(group)
        self.push_options()
        self.publish_options()


def _global_state(optim: Optimizer) -> dict[Any, Any]:
    return {k: v for k, v in optim.state.items() if not isinstance(k, torch.Tensor)}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same values elsewhere, with a gradient of zeros."""
    copy = torch.nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
    copy.grad = torch.zeros_like(copy)
    return copy


class LocalState(Mapping[torch.Tensor, Any]):
    """The state that this rank keeps, under the parameters that the user knows.

    Args:
        params: all parameters, in order.
        local: the optimizer on this rank's pieces.
    """

    def __init__(self, params: Sequence[torch.Tensor], local: LocalOptimizer) -> None:
        self._optim = local.optim
        self._held = {params[index]: state for index, state in local.states().items()}

    def __getitem__(self, param: torch.Tensor) -> Any:
        # As for any optimizer, a parameter without state has an empty one; it cannot be written to.
        return self._held.get(param, MappingProxyType({}))

    def __setitem__(self, param: torch.Tensor, state: object) -> NoReturn:
        raise TypeError("the state is divided among ranks; set it with load_state_dict()")

    def __contains__(self, param: object) -> bool:
        return param in self._held

    def get(self, param: torch.Tensor, default: Any = None) -> Any:
        """The state of `param`, or `default` if this rank has none of it."""
        return self._held.get(param, default)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def clear(self) -> None:
        """Forget this rank's part of the state."""
        self._held.clear()
        self._optim.state.clear()
