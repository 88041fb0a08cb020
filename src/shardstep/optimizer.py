"""`ZeroRedundancyOptimizer`: plan, buffers, communication and an ordinary optimizer, composed."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from shardstep.agree import agree
from shardstep.buffers import BucketViews, Home, OwnStorage
from shardstep.checkpoint.exchange import move_state
from shardstep.checkpoint.plain import load_share, pack_groups
from shardstep.comm import Comm, connect
from shardstep.describe import as_list, describe, describe_options, is_trainable, parameters
from shardstep.gather import gather_parameters
from shardstep.join import _ZeROJoinHook
from shardstep.plan import DEFAULT_BUCKET_BYTES, Interval, Layout, ShardPlan, share
from shardstep.probe import layout_for
from shardstep.shard import Shard

logger = logging.getLogger(__name__)

StateDict = dict[str, Any]
_PER_PARAMETER = {"params", "param_names"}


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Wraps an optimizer class so that N ranks keep one copy of its state between them.

    Each rank's local optimizer, an unmodified `optimizer_class`, updates about 1/N of the
    elements and keeps state for those alone; `step()` then gathers the updated parameters
    everywhere. Gradients are expected to be equal on all ranks when `step()` is called, as
    `DistributedDataParallel` makes them. The numbers are those of the unsharded optimizer.

    Without an initialised process group it runs as one rank.

    Args:
        params: parameters, `(name, parameter)` pairs or parameter groups, as for any optimizer.
            All ranks have to give the same, in the same order; if they do not, all ranks raise.
        optimizer_class: the class of the local optimizer.
        process_group: the ranks that share the state; the default group if None.
        parameters_as_bucket_view: if True, trainable parameters are moved into flat buckets
            (`param.data` becomes a view) and are gathered without being copied; if False, they
            stay where they are, and two bucket-sized buffers are used to send them.
        overlap_with_ddp: reserved for stepping inside DDP's communication hooks.
        layout: `"sliced"` cuts parameters anywhere, `"whole"` never cuts one; `"auto"` takes
            `"sliced"` where the class is known to be element-wise and `"whole"` otherwise.
        bucket_bytes: a bucket is closed once it holds this much.
        **defaults: options for `optimizer_class`.

    Attributes:
        optim: the local optimizer, on this rank's pieces.
        process_group: the process group, or None when it runs as one rank without one.
        rank: this rank within the process group.
        global_rank: this rank within the default group.
        world_size: number of ranks in the process group.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> opt.step()
        >>> opt.zero_grad()
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        layout: str = "auto",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        **defaults: Any,
    ) -> None:
        self.initialized = False
        self._comm: Comm = connect(process_group)
        self.process_group = getattr(self._comm, "group", None)
        self.world_size = self._comm.world_size
        self.rank = self._comm.group_rank
        self.global_rank = dist.get_rank() if self.process_group is not None else 0
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._overlap_with_ddp = overlap_with_ddp
        self._bucket_bytes = bucket_bytes
        self._consolidated: StateDict | None = None

        def make() -> tuple[ShardPlan, list[str]]:
            if overlap_with_ddp:
                raise ValueError(
                    "overlap_with_ddp=True is not available; leave it out and call step()"
                )
            # The local optimizer knows the class's defaults, in the class's order; they are taken
            # over from it below.
            Optimizer.__init__(self, as_list(params), {})
            self._layout = _choose(layout, optimizer_class)
            plan, lines = self._plan_now()
            self._shard = Shard(plan, parameters(self.param_groups), self.rank)
            self.optim = optimizer_class(self._local_groups(self._shard), **defaults)
            if not isinstance(self.optim, Optimizer):
                raise ValueError(
                    f"optimizer_class has to make a torch.optim.Optimizer, but it made a "
                    f"{type(self.optim).__name__}"
                )
            head = [f"optimizer class {type(self.optim).__qualname__}"]
            return plan, head + describe_options(self.optim.param_groups) + lines

        plan = agree(self._comm, "constructing ZeroRedundancyOptimizer", make)
        Joinable.__init__(self)
        # Schedulers look in `defaults` for what the optimizer knows, such as "betas".
        self.defaults = self.optim.defaults
        self._adopt(plan, self._shard)
        self._publish_options()
        self.initialized = True

    # ---------------------------------------------------------------- the plan and its changes

    @property
    def plan(self) -> ShardPlan:
        """Which rank owns which elements."""
        return self._plan

    def _plan_now(self) -> tuple[ShardPlan, list[str]]:
        """A plan for the parameters as they are now, and the words in which ranks compare it."""
        specs = describe(self.param_groups)
        plan = ShardPlan.make(specs, self.world_size, self._layout, self._bucket_bytes)
        return plan, [*map(str, specs), f"plan {plan.fingerprint}"]

    def _local_groups(self, shard: Shard) -> list[dict[str, Any]]:
        """The pieces of `shard` in the groups of their parameters, with those groups' options.

        A group of which this rank owns nothing stays, empty: groups are matched by position.
        """
        local = []
        start = 0
        for group in self.param_groups:
            held = shard.in_group(range(start, start + len(group["params"])))
            mine = {**group, "params": [tensor for _, tensor in held]}
            if "param_names" in group:
                mine["param_names"] = [group["param_names"][index - start] for index, _ in held]
            local.append(mine)
            start += len(group["params"])
        return local

    def _adopt(self, plan: ShardPlan, shard: Shard) -> None:
        """Make `plan` the one in force."""
        self._plan = plan
        self._shard = shard
        self._params = parameters(self.param_groups)
        self._trainable = [spec.trainable for spec in plan.specs]
        home = BucketViews if self.parameters_as_bucket_view else OwnStorage
        self._home: Home = home(plan, self._params, self.rank)
        self._settle_in()
        if dist.is_available() and get_debug_level() != DebugLevel.OFF:
            own = share(plan, self.rank)
            logger.info(
                "rank %s owns %s of %s trainable elements in %s buckets (layout %s)",
                self.global_rank,
                own.numel,
                sum(spec.numel for spec in plan.specs if spec.trainable),
                len(plan.training_buckets),
                plan.layout,
            )

    def _settle_in(self) -> None:
        """Take the parameters in where they are now."""
        self._home.attach()
        self._shard.repoint()

    def _follow(self) -> None:
        """Notice what was done to the parameters since the last step, and adapt to it.

        Data that only moved is this rank's own affair. Freezing, unfreezing, or a new dtype or
        device change the plan; like all else that concerns the model, they are done alike on every
        rank, and if they are not, all ranks that did them raise.
        """
        if self._home.intact() and self._trainable == list(map(is_trainable, self._params)):
            return
        if tuple(describe(self.param_groups)) == self._plan.specs:
            self._settle_in()
        else:
            self._replan("following a change of the parameters", self._plan_now)

    def _replan(self, what: str, make: Callable[[], tuple[ShardPlan, list[str]]]) -> None:
        """Adopt another plan and move the state to its new owners. Called on every rank."""
        plan = agree(self._comm, what, make)
        before = self._plan
        params = parameters(self.param_groups)
        states = move_state(
            self._comm,
            plan.specs,
            held=[before.intervals(rank) for rank in range(self.world_size)],
            wanted=[plan.intervals(rank) for rank in range(self.world_size)],
            states=self._states(),
            device=lambda index, leaf: torch.device("cpu") if leaf.on_cpu else params[index].device,
        )
        now_frozen = (
            index
            for index, (old, new) in enumerate(zip(before.specs, plan.specs, strict=False))
            if old.trainable and not new.trainable
        )
        self._home.detach(now_frozen)
        shard = Shard(plan, params, self.rank)
        self._adopt(plan, shard)
        kept = {key: v for key, v in self.optim.state.items() if not isinstance(key, torch.Tensor)}
        self.optim.state = defaultdict(dict, kept)
        for piece, tensor in shard:
            if piece.param in states:
                self.optim.state[tensor] = states[piece.param]
        for number, group in enumerate(self._local_groups(shard)):
            if number < len(self.optim.param_groups):
                for key in _PER_PARAMETER & group.keys():
                    self.optim.param_groups[number][key] = group[key]
            else:
                self.optim.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as for any optimizer, and place them.

        Called on every rank, with the same group.

        Args:
            param_group: the parameters under `"params"`, and options of their own.
        """
        if not self.initialized:
            super().add_param_group(param_group)
            return
        groups = list(self.param_groups)

        def make() -> tuple[ShardPlan, list[str]]:
            super(ZeroRedundancyOptimizer, self).add_param_group(param_group)
            plan, lines = self._plan_now()
            return plan, describe_options(self.param_groups[-1:]) + lines

        try:
            self._replan("add_param_group", make)
        except Exception:
            self.param_groups[:] = groups
            raise
        self._publish_options()

    # ------------------------------------------------------------------------------- the step

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, **kwargs: Any
    ) -> float | None:
        """Update this rank's share of the parameters, and gather the rest.

        Called on every rank.

        Args:
            closure: computes the loss anew and returns it; passed on if given.
            **kwargs: passed on to the local optimizer's `step`.

        Returns:
            What the local optimizer's `step` returns.
        """
        Join.notify_join_context(self)
        return self._step(closure, **kwargs)

    def _step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        self._follow()
        loss = self._local_step(closure, **kwargs)
        self._sync_params()
        return loss

    def _local_step(
        self, closure: Callable[[], float] | None = None, **kwargs: Any
    ) -> float | None:
        """Update this rank's pieces, and nothing else."""
        self._push_options()
        shard = self._shard
        shard.lend_gradients()
        if closure is not None:
            given = closure

            def evaluate() -> float:
                loss = given()
                shard.lend_gradients()
                return loss

            kwargs["closure"] = evaluate
        loss: float | None = self.optim.step(**kwargs)
        shard.return_gradients()
        if shard.settle():
            self._settle_in()
        self._publish_options()
        return loss

    def _sync_params(self) -> None:
        """Gather what the other ranks updated. Called on every rank."""
        gather_parameters(self._comm, self._plan, self._home)
        # A backward pass through a graph that was built on the old values has to fail, as it does
        # after any optimizer's step: autograd has to see that the parameters were written to.
        torch.autograd.graph.increment_version([p for p in self._params if p.grad is not None])

    def _push_options(self) -> None:
        """Let what schedulers and users wrote to `param_groups` reach the local optimizer."""
        for exposed, local in zip(self.param_groups, self.optim.param_groups, strict=True):
            for key, value in exposed.items():
                if key not in _PER_PARAMETER:
                    local[key] = value

    def _publish_options(self) -> None:
        """Let what the local optimizer keeps in its groups be seen, in the order it keeps it."""
        for exposed, local in zip(self.param_groups, self.optim.param_groups, strict=True):
            own = {key: exposed[key] for key in _PER_PARAMETER & exposed.keys()}
            merged = {key: own.get(key, value) for key, value in local.items()}
            exposed.clear()
            exposed.update(merged)

    # ------------------------------------------------------------------------------ the state

    @property  # type: ignore[override]
    def state(self) -> Mapping[torch.Tensor, Any]:
        """This rank's part of the state, by parameter; read-only."""
        return _LocalState(self._params, self._shard, self.optim)

    @state.setter
    def state(self, value: object) -> None:
        """The base class's own mapping is not used: the state is the local optimizer's."""

    def _states(self) -> dict[int, Any]:
        """This rank's part of the state, by number of the parameter."""
        return {
            piece.param: self.optim.state[tensor]
            for piece, tensor in self._shard
            if tensor in self.optim.state
        }

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Put the whole state together on one rank, in its CPU memory.

        Called on every rank. Afterwards `state_dict()` may be called on rank `to`.

        Args:
            to: the rank, within the process group, that receives the state.
        """

        def make() -> tuple[int, list[str]]:
            if not 0 <= to < self.world_size:
                raise ValueError(f"to={to} is not a rank of this group of {self.world_size} ranks")
            return to, [f"to={to}"]

        agree(self._comm, "consolidate_state_dict", make)
        specs = self._plan.specs
        everything = {index: Interval(0, spec.numel) for index, spec in enumerate(specs)}
        states = move_state(
            self._comm,
            specs,
            held=[self._plan.intervals(rank) for rank in range(self.world_size)],
            wanted=[everything if rank == to else {} for rank in range(self.world_size)],
            states=self._states(),
            device=lambda index, leaf: torch.device("cpu"),
        )
        loose = {key: v for key, v in self.optim.state.items() if not isinstance(key, torch.Tensor)}
        self._consolidated = None
        if self.rank == to:
            self._push_options()
            self._publish_options()
            self._consolidated = {
                "state": {**dict(sorted(states.items())), **loose},
                "param_groups": pack_groups(self.param_groups),
            }

    def state_dict(self) -> StateDict:
        """The state as `consolidate_state_dict` last put it together on this rank.

        It is what the unsharded optimizer's `state_dict()` would be, with tensors on the CPU, and
        loads into a plain `torch.optim` optimizer.

        Raises:
            RuntimeError: if the state was not consolidated on this rank.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        if self.world_size == 1:
            self.consolidate_state_dict()
        if self._consolidated is None:
            raise RuntimeError(
                f"rank {self.rank} holds only its share of the optimizer state; to get all of it "
                f"here, call consolidate_state_dict(to={self.rank}) on all {self.world_size} ranks "
                f"of the process group first, and then state_dict() on rank {self.rank}"
            )
        state_dict: StateDict = {
            "state": dict(self._consolidated["state"]),
            "param_groups": [dict(group) for group in self._consolidated["param_groups"]],
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take this rank's share out of a full state dict.

        The dict may come from here, at any world size and layout, or from the plain
        `torch.optim` class. It is not changed, and nothing keeps hold of its tensors.

        Args:
            state_dict: what `state_dict()` returned.

        Raises:
            ValueError: if it does not fit this optimizer's parameters; nothing is loaded then.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        load_share(
            state_dict,
            groups=self.param_groups,
            plan=self._plan,
            group_rank=self.rank,
            local=self.optim,
        )
        self._publish_options()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # ------------------------------------------------------------------------- uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank that ran out of data does while the others step; takes no options.

        Gradients have to be there when it runs: list the joinable that synchronises them first,
        as in `Join([ddp_model, optimizer])`.
        """
        return _ZeROJoinHook(self._step)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self._params[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group."""
        return self.process_group


class _LocalState(Mapping[torch.Tensor, Any]):
    """The state that this rank keeps, under the parameters that the user knows."""

    def __init__(self, params: list[torch.Tensor], shard: Shard, optim: Optimizer) -> None:
        self._held = {
            params[piece.param]: optim.state[tensor]
            for piece, tensor in shard
            if tensor in optim.state
        }

    def __getitem__(self, param: torch.Tensor) -> Any:
        return self._held.get(param, {})

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def _choose(layout: str, optimizer_class: Any) -> Layout:
    needed = layout_for(optimizer_class)
    if layout == "auto":
        return needed
    if layout not in ("sliced", "whole"):
        raise ValueError(f"layout has to be 'auto', 'sliced' or 'whole', not {layout!r}")
    return layout  # type: ignore[return-value]
