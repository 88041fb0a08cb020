"""The part of the optimizer that shows its mode: plan, whole tensors, report, uneven inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from shardstep.comm.join import JoinContext
from shardstep.layouts.cost import tensor_nbytes
from shardstep.local.multi_class import optimizer_name
from shardstep.modes.base import Mode
from shardstep.modes.join import _ZeROJoinHook
from shardstep.params.dtensor import refuse_dtensors
from shardstep.plan import ShardPlan, shares
from shardstep.report import Report, headline, show_nbytes
from shardstep.state.state_dict import gather_whole
from shardstep.state.verify import verify
from shardstep.state.view import ShardView


class ModeFront(Optimizer, Joinable):
    """An optimizer whose parameters, state and gradients are those of a mode.

    Attributes:
        mode: the way in which the optimizer is used.
    """

    mode: Mode
    _join: JoinContext
    process_group: dist.ProcessGroup | None

    @property
    def optim(self) -> Optimizer:
        """The local optimizer, on this rank's pieces."""
        return self.mode.optim

    @property
    def plan(self) -> ShardPlan:
        """The placement: which rank owns which elements."""
        return self.mode.plan

    @property
    def shards(self) -> ShardView:
        """This rank's share of the state, as checkpoints see it."""
        return self.mode

    def full_grad(self, parameter: torch.Tensor | str) -> torch.Tensor | None:
        """Return the whole gradient of a parameter, or None. Called on every rank."""
        return self.mode.ready_gradients().full(self.mode.index_of(parameter))

    def full_state(self, parameter: torch.Tensor | str) -> dict[str, Any]:
        """Return the whole state of a parameter; empty if it has none. Called on every rank."""
        return dict(self._whole(parameter, self.mode.local.states()) or {})

    def full_master(self, parameter: torch.Tensor | str) -> torch.Tensor | None:
        """Return the whole master of a parameter, or None. Called on every rank."""
        master: torch.Tensor | None = self._whole(parameter, self.mode.masters())
        return master

    def _whole(self, parameter: torch.Tensor | str, held: Mapping[int, Any]) -> Any:
        index = self.mode.index_of(parameter)
        return gather_whole(self.mode.comm, self.plan, index, held, self.mode.params)

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        """Return the norm of every gradient, by name of its parameter. Called on every rank.

        Parameters without a gradient are left out. With `module`, it takes one collective.
        """
        names = [spec.name for spec in self.mode.plan.specs]
        norms = self.mode.ready_gradients().all_norms(float(norm_type))
        return {names[index]: norm for index, norm in norms.items()}

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp the elements of all gradients to at most `clip_value` in magnitude.

        Called on every rank. It is `torch.nn.utils.clip_grad_value_` for gradients that may be
        sharded across ranks.

        Raises:
            TypeError: if `clip_value` is not a number.
        """
        limit = clip_limit(clip_value, "clip_value", "clip_grad_value_")
        self.mode.check_change("clip_grad_value_()")
        self.mode.ready_gradients().clip_value(limit)

    def verify(self) -> None:
        """Raise if the parameters are not equal on all ranks. Called on every rank.

        Each rank computes a digest of every parameter and sends 8 bytes for it, so this is cheap
        enough for every hundred steps.

        Raises:
            RuntimeError: on every rank, naming the first parameter that differs.
        """
        verify(self.mode)

    def report(self) -> Report:
        """Return the bytes that this rank holds and sends, and each group's layout; print it."""
        mode, plan = self.mode, self.plan
        own = shares(plan, mode.precision)[mode.comm.group_rank]
        return Report(
            optimizer=optimizer_name(mode.optim),
            mode=mode.title,
            rank=mode.comm.group_rank,
            plan=plan,
            layouts=tuple(mode.planner.layouts.explain(mode.groups)),
            parameter_nbytes=sum(spec.nbytes for spec in plan.specs if spec.trainable),
            owned_nbytes=own.nbytes,
            gradient_nbytes=mode.pipeline.gradients.nbytes,
            master_nbytes=mode.pipeline.params.shard.wide.nbytes,
            state_nbytes=tensor_nbytes([*mode.optim.state.values()]),
            reduce_nbytes=own.reduce_nbytes_sent if mode.reduces_gradients else 0,
            gather_nbytes=own.gather_nbytes_sent,
        )

    def __repr__(self) -> str:
        if not self.__dict__.get("initialized"):
            return object.__repr__(self)
        head = headline(optimizer_name(self.optim), self.mode.title, self.plan)
        state = show_nbytes(tensor_nbytes([*self.optim.state.values()]))
        here = f"rank {self.mode.comm.group_rank} holds {state} of optimizer state"
        groups = super().__repr__().partition("\n")[2]
        return f"{type(self).__name__} (\n{head}\n{here}\n{groups}"

    # ------------------------------------------------------------------------------- uneven inputs

    @property
    def _join_config(self) -> Any:
        """The `Join` context, if any. Torch assigns it here, and asks for it."""
        return self._join.config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._join.enter(config)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook by which a rank without data shadows the others; takes no options.

        Use `Join([ddp_model, optimizer])`. With `module`, list the optimizer first.
        """
        refuse_dtensors(
            zip((spec.name for spec in self.plan.specs), self.mode.params, strict=True),
            "joined ranks cannot be sent gradients of its parts; give all ranks the same number of "
            "batches",
        )
        return _ZeROJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        return self.mode.params[0].device

    @property
    def join_process_group(self) -> Any:
        """The process group."""
        return self.process_group


def clip_limit(given: float, name: str, method: str) -> float:
    """Return the limit to clip to. Torch's functions take the parameters first, ours do not.

    Raises:
        TypeError: if it is not a number; a parameter is none, whatever its size.
    """
    try:
        if not isinstance(given, torch.nn.Parameter):
            return float(given)
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"{name} must be a number, not {type(given).__name__}; {method}(1.0) clips all "
        "parameters of this optimizer"
    )
