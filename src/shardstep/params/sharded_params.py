"""All parameters under one plan: their memory between steps, and this rank's pieces of them."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack
from typing_extensions import override

from shardstep.params.dtensor import is_dtensor, local_part
from shardstep.params.flat import flat
from shardstep.params.groups import describe_edit
from shardstep.params.inputs import parameters
from shardstep.params.step_tensors import Masters, StepCopies, StepTensors
from shardstep.params.stochastic_rounding import StochasticRounding
from shardstep.plan import Message, Piece, ShardPlan, messages_of

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets and sources."""

FreeMemory = Callable[[torch.Tensor, int], None]
"""Given a tensor and an address, moves the tensor's state away from that address."""


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory whose storage object holds nothing else.

    The memory lives as long as either. A device without DLPack keeps the storage of `tensor`.
    """
    try:
        return from_dlpack(tensor)
    except (BufferError, RuntimeError):
        return tensor


@dataclass(slots=True)
class GatherMessage:
    """One message of a gather.

    Attributes:
        bucket: the number of its bucket.
        cuts: the bounds of the ranks' parts in it.
        buffer: its elements, flat.
        own: copies that bring this rank's part up to date.
        others: copies of the other ranks' parts to where the parameters read them.
    """

    bucket: int
    cuts: Sequence[int]
    buffer: torch.Tensor
    own: Copies
    others: Copies

    def load(self) -> torch.Tensor:
        """Return the buffer, with this rank's part up to date."""
        if self.own[0]:
            torch._foreach_copy_(*self.own)
        return self.buffer

    def store(self) -> None:
        """Give the parameters the other ranks' parts."""
        if self.others[0]:
            torch._foreach_copy_(*self.others)


class ParamStorage(ABC):
    """The memory of the parameters between steps.

    Attributes:
        messages: the messages in which the training buckets travel, in order; `attach` makes them.
        depth: the number of messages that may be loaded and not yet stored; None for any number.
        nbytes: bytes held beyond the parameters themselves.
    """

    messages: list[GatherMessage]
    depth: int | None
    nbytes = 0

    def __init__(self, plan: ShardPlan, params: Sequence[torch.Tensor], group_rank: int) -> None:
        self._plan = plan
        self._params = params
        self._group_rank = group_rank
        self._has_dtensors = any(map(is_dtensor, params))
        self._attached: tuple[list[Any], ...] = ()

    def flat(self, param: int) -> torch.Tensor:
        """Return a parameter's elements in memory order. Autograd does not see writes to it."""
        # `.data`: a parameter that is written back unchanged must not look changed to autograd.
        return flat(local_part(self._params[param]).data)

    def attach(self) -> None:
        """Take the parameters in. May replace `param.data`, never the parameter itself."""
        self._allocate()
        self._attached = self._places()

    def intact(self) -> bool:
        """Return True if every parameter still has the memory that `attach` left it."""
        return self._attached == self._places()

    def _places(self) -> tuple[list[Any], ...]:
        # Asked several times a step: parameters are unwrapped only if there are DTensors.
        parts = [*map(local_part, self._params)] if self._has_dtensors else self._params
        place = (torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.numel)
        return tuple([*map(of, parts)] for of in place)

    @abstractmethod
    def _allocate(self) -> None:
        """Allocate buffers and connect them with the parameters."""

    @abstractmethod
    def detach(self, params: Iterable[int]) -> None:
        """Give these parameters separate storage, if they share a buffer."""


class OwnStorage(ParamStorage):
    """Parameters in the storage they came with. Buckets are packed into messages to be sent.

    Two buffers of the longest message's size are kept per device and used in turn: one is packed or
    unpacked while the other is in flight.
    """

    depth = 2

    @override
    def _allocate(self) -> None:
        self.messages = []
        self.nbytes = 0
        # One rank has everything already and sends nothing.
        buckets = self._plan.training_buckets if self._plan.world_size > 1 else ()
        for device in sorted({bucket.device for bucket in buckets}):
            on_device = [bucket for bucket in buckets if bucket.device == device]
            messages = [each for b in on_device for each in messages_of(b, b.dtype.itemsize)]
            nbytes = max(each.numel * each.bucket.dtype.itemsize for each in messages)
            place = self._params[on_device[0].slots[0].param].device
            pool = [
                torch.zeros(nbytes, dtype=torch.uint8, device=place) for _ in messages[: self.depth]
            ]
            self.nbytes += nbytes * len(pool)
            for number, message in enumerate(messages):
                self.messages.append(self._connected(message, pool[number % len(pool)]))
        self.messages.sort(key=lambda message: message.bucket)  # those of several devices, too

    def _connected(self, message: Message, pooled: torch.Tensor) -> GatherMessage:
        """Return a message with the copies between its buffer and the parameters."""
        dtype, slots = message.bucket.dtype, message.bucket.slots
        buffer = pooled[: message.numel * dtype.itemsize].view(dtype)
        own: Copies = ([], [])
        others: Copies = ([], [])
        for group_rank, number, elements, offset in message.parts():
            in_params, in_buffer = own if group_rank == self._group_rank else others
            in_params.append(self.flat(slots[number].param)[elements.slice])
            in_buffer.append(buffer[offset : offset + elements.numel])
        return GatherMessage(message.bucket.index, message.cuts, buffer, (own[1], own[0]), others)

    @override
    def detach(self, params: Iterable[int]) -> None:
        pass


class BucketViews(ParamStorage):
    """Parameters in the memory of the buckets. Nothing is packed to be sent.

    Each parameter has a separate storage object on that memory. Two tensors with one storage
    object are taken for tied weights: safetensors would write one of them.
    """

    depth = None

    def __init__(self, plan: ShardPlan, params: Sequence[torch.Tensor], group_rank: int) -> None:
        super().__init__(plan, params, group_rank)
        self.messages = []
        self._slices: dict[int, torch.Tensor] = {}

    @override
    def flat(self, param: int) -> torch.Tensor:
        # A slice of the bucket shares its storage with its neighbours, so masters can merge them.
        whole = super().flat(param)
        held = self._slices.get(param, whole)
        in_place = (held.data_ptr(), held.numel()) == (whole.data_ptr(), whole.numel())
        return held if in_place else whole

    @override
    def _allocate(self) -> None:
        for index in self._slices:
            param: Any = local_part(self._params[index])
            if param.device.type == "cpu" and param.is_shared():
                # Not an error: sending a model to another process shares its memory, too.
                warnings.warn(
                    f"parameter {self._plan.specs[index].name!r} was moved to shared memory, and "
                    "is moved back into its bucket: other processes do not see its next steps. "
                    "Send them a copy after each step, or construct the optimizer without module=, "
                    "overlap_with_ddp=True and parameters_as_bucket_view=True",
                    stacklevel=2,
                )
                break
        owners = {held.data_ptr(): index for index, held in self._slices.items() if held.numel()}
        if any(owners.get(local_part(self._params[i]).data_ptr(), i) != i for i in self._slices):
            # Parameters have changed places. What is there is still needed, here and in backward.
            self.messages = []
        for number, bucket in enumerate(self._plan.training_buckets):
            if number == len(self.messages):
                # Zeros, not garbage: padding is sent too, and must not differ from run to run.
                device = self._params[bucket.slots[0].param].device
                buffer = torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)
                nothing: Copies = ([], [])
                message = GatherMessage(bucket.index, bucket.cuts, buffer, nothing, nothing)
                self.messages.append(message)
            for slot in bucket.slots:
                param = local_part(self._params[slot.param])
                start, stop = slot.bucket_offset, slot.bucket_offset + slot.numel
                held = self._slices[slot.param] = self.messages[number].buffer[start:stop]
                if param.data_ptr() != held.data_ptr():
                    view = with_own_storage(held).as_strided(param.shape, param.stride())
                    param.data = view.copy_(param.detach())

    @override
    def detach(self, params: Iterable[int]) -> None:
        # Nothing must keep the buffers alive.
        for index in params:
            part = local_part(self._params[index])
            part.data = part.detach().clone()


class Shard:
    """The tensors that one rank's optimizer steps on.

    A part of a parameter is a flat view of it. An entire parameter is itself, so that the optimizer
    finds `param.grad` and keys its state as the user expects. With `separate`, it is another tensor
    on the same memory, because `param.grad` is not the gradient to step on. A DTensor is
    represented by its local tensor, and a piece in `wide` by its wider step tensor.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        params: Sequence[torch.Tensor],
        separate: bool,
        wide: StepTensors,
    ) -> None:
        self._params = params
        self._separate = separate
        self.wide = wide
        self.pieces = pieces
        self._tensors = {piece.param: self._make(piece) for piece in pieces}
        self.views = [(piece, each) for piece, each in self if each is not params[piece.param]]
        # Step tensors that have other memory in the next step.
        self._moving = [] if wide.kept else [each for each in self if each[0].param in wide]
        self._point(())

    def _make(self, piece: Piece) -> torch.Tensor:
        param = self._params[piece.param]
        separate = self._separate or piece.param in self.wide or is_dtensor(param)
        if piece.entire and not separate:
            return param
        made = torch.nn.Parameter(self._view(piece), requires_grad=param.requires_grad)
        # A class may read options that the user has set as attributes of a parameter.
        vars(made).update(vars(param))
        return made

    def _view(self, piece: Piece) -> torch.Tensor:
        """Return the piece's memory: in its parameter, or in its wider step tensor."""
        if piece.param in self.wide:
            return self.wide.place(piece)
        param = local_part(self._params[piece.param])
        return param.detach() if piece.entire else flat(param)[piece.param_interval.slice]

    def __iter__(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield each piece with the tensor that is stepped on, by parameter number."""
        return ((piece, self._tensors[piece.param]) for piece in self.pieces)

    def in_group(self, params: range) -> list[tuple[int, torch.Tensor]]:
        """Return the tensors of these parameters, each with its parameter's number."""
        return [(index, self._tensors[index]) for index in params if index in self._tensors]

    def repoint(self) -> None:
        """Point at the memory that the parameters have now; the tensor objects stay."""
        self.wide.repoint()
        self._point(self.views)

    def _point(self, views: Iterable[tuple[Piece, torch.Tensor]]) -> None:
        """Point these tensors at their pieces, and remember the addresses of all."""
        for piece, tensor in views:
            tensor.data = self._view(piece)
        self._addresses = [tensor.data_ptr() for tensor in self._tensors.values()]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Give every step tensor its parameter's value; at the end free memory of the step."""
        self.wide.refresh()
        if self._moving:
            self._point(self._moving)
        try:
            yield
        finally:
            self.wide.release()
            if self._moving:
                self._point(self._moving)

    def write_back(self, free_memory: FreeMemory, among: Container[int] | None = None) -> bool:
        """Write back step tensors of these parameters. Return True if a parameter has moved.

        `free_memory` is called for each tensor that the optimizer pointed at other memory.
        """
        moved = self._copy_reassigned(free_memory)
        if self.wide.needed:
            self.wide.write_back(among)
        return moved

    def _copy_reassigned(self, free_memory: FreeMemory) -> bool:
        """Copy back views that the optimizer pointed at other memory by assigning `p.data`.

        Return True if `p` was a parameter, which has moved now.
        """
        if [*map(torch.Tensor.data_ptr, self._tensors.values())] == self._addresses:
            return False
        before = zip(self._tensors.items(), self._addresses, strict=True)
        moved = [(n, each, address) for (n, each), address in before if each.data_ptr() != address]
        for _, tensor, address in moved:
            free_memory(tensor, address)
        numbers = {number for number, _, _ in moved}
        for piece, tensor in self.views:
            if piece.param in numbers:
                self._view(piece).copy_(tensor.detach())
        self.repoint()
        return any(tensor is self._params[number] for number, tensor, _ in moved)


class ShardedParams:
    """The parameters of an optimizer under one plan, left alone until `attach` is called.

    `step_dtypes` has the parameters that are stepped on in a wider dtype, by number. With
    `rounding`, their wide copies are rounded stochastically and not kept as masters. With
    `separate`, entire parameters get a separate step tensor.
    """

    def __init__(
        self,
        plan: ShardPlan,
        groups: list[dict[str, Any]],
        group_rank: int,
        bucket_views: bool,
        separate: bool,
        step_dtypes: Mapping[int, torch.dtype],
        rounding: StochasticRounding | None,
    ) -> None:
        self.plan = plan
        self.groups = groups
        self._lengths = [len(group["params"]) for group in groups]
        self.params = params = parameters(groups)
        self.trainable = [spec.trainable for spec in plan.specs]
        self.trained = [index for index, trains in enumerate(self.trainable) if trains]
        self.frozen = [index for index, trains in enumerate(self.trainable) if not trains]
        self.step_dtypes = step_dtypes
        storage = BucketViews if bucket_views else OwnStorage
        self.storage: ParamStorage = storage(plan, params, group_rank)
        pieces = tuple(sorted(plan.pieces(group_rank), key=lambda piece: piece.param))
        narrow = [piece for piece in pieces if piece.param in step_dtypes]
        wide: StepTensors = (
            Masters(narrow, params, step_dtypes, self.storage.flat)
            if rounding is None
            else StepCopies(narrow, params, step_dtypes, self.storage.flat, rounding)
        )
        self.shard = Shard(pieces, params, separate, wide)

    def attach(self) -> None:
        """Take the parameters in, with the memory that they have now."""
        self.storage.attach()
        self.shard.repoint()

    def unchanged(self) -> bool:
        """Return True if no parameter was moved, frozen or unfrozen since `attach`."""
        with torch._C.DisableTorchFunctionSubclass():  # do not wait for parameters in flight
            # As `is_trainable`, written out: it is asked of every parameter three times a step.
            now = [param.requires_grad or param.grad is not None for param in self.params]
            return self.trainable == now and self.storage.intact()

    def hand_edit(self) -> str | None:
        """Return an error if the user has changed which parameters the groups have."""
        lists = [group.get("params", ()) for group in self.groups]
        same = all(map(is_, chain.from_iterable(lists), self.params))
        if same and [*map(len, lists)] == self._lengths:
            return None
        names = [spec.name for spec in self.plan.specs]
        return describe_edit(lists, self._lengths, self.params, names)
