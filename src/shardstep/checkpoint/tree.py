"""Optimizer state as text and tensors: the structure is JSON, so nothing is ever unpickled."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardstep.buffers import flat, is_dense

Node = list[Any]
"""A value in JSON: `["value", x]`, `["dict", [[key, node], ...]]`, `["list", [node, ...]]`,
`["tuple", [node, ...]]`, `["deque", [node, ...], maxlen]` or
`["tensor", dtype, shape, stride, on_cpu, data or null]`; and, for a tensor that is made of others,
`["wrapper", class, [[name, node], ...], context node, shape, stride]`."""

INLINE_NBYTES = 64
"""Tensors up to this size travel in the text: step counters, not moments."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor in the state of one parameter.

    Attributes:
        path: how to get to it, such as `"exp_avg"` or `"factors.0"`.
        dtype, shape, stride: its form. The stride is that of a dense tensor.
        on_cpu: whether it lies on the CPU whatever its parameter's device is.
        data: its bytes in hexadecimal, if it is small.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    on_cpu: bool
    data: str | None

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of this form, filled already if the data is here."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.data is not None and tensor.numel():
            raw = torch.frombuffer(bytearray.fromhex(self.data), dtype=torch.uint8)
            flat(tensor).copy_(raw.view(self.dtype))
        return tensor


def encode(value: Any, path: str = "") -> tuple[Node, list[torch.Tensor]]:
    """Describe `value`, and list its tensors, dense and in the order of the description.

    Raises:
        TypeError: if there is something in it that text cannot hold.
    """
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            return _encode_wrapper(value, path)
        tensor = value.detach()
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not plain or tensor.is_quantized or tensor.is_meta:
            raise TypeError(
                f"state {path!r} is a {type(value).__name__} ({value.layout}, {value.dtype}, on "
                f"{value.device}), which cannot be sent or saved"
            )
        tensor = tensor.resolve_conj().resolve_neg()
        if not is_dense(tensor):
            tensor = tensor.contiguous()
        data = None
        if tensor.nbytes <= INLINE_NBYTES:
            raw = flat(tensor).cpu().view(torch.uint8) if tensor.numel() else ()
            data = bytes(int(byte) for byte in raw).hex()
        dtype = str(tensor.dtype).removeprefix("torch.")
        on_cpu = tensor.device.type == "cpu"
        shape, stride = list(tensor.shape), list(tensor.stride())
        return ["tensor", dtype, shape, stride, on_cpu, data], [tensor]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value], []
    if isinstance(value, Mapping):
        items, tensors = [], []
        for key, item in value.items():
            if not isinstance(key, (str, int, float)):
                raise TypeError(f"state {path!r} has a key of type {type(key).__name__}")
            node, found = encode(item, f"{path}.{key}" if path else str(key))
            items.append([key, node])
            tensors += found
        return ["dict", items], tensors
    if type(value) in (list, tuple, deque):
        nodes, tensors = [], []
        for position, item in enumerate(value):
            node, found = encode(item, f"{path}.{position}" if path else str(position))
            nodes.append(node)
            tensors += found
        if isinstance(value, deque):
            return ["deque", nodes, value.maxlen], tensors
        return [type(value).__name__, nodes], tensors
    raise TypeError(f"state {path!r} is a {type(value).__name__}, which cannot be sent or saved")


def _encode_wrapper(value: Any, path: str) -> tuple[Node, list[torch.Tensor]]:
    """A quantised state, say: codes and scales in a tensor subclass."""
    names, context = value.__tensor_flatten__()
    items, tensors = [], []
    for name in names:
        node, found = encode(getattr(value, name), f"{path}.{name}")
        items.append([name, node])
        tensors += found
    context, found = encode(_plain_sizes(context), f"{path}.context")
    if found:
        raise TypeError(f"state {path!r} is a {type(value).__name__} that hides tensors")
    kind = f"{type(value).__module__}:{type(value).__qualname__}"
    return ["wrapper", kind, items, context, list(value.shape), list(value.stride())], tensors


def _plain_sizes(context: Any) -> Any:
    """The context with shapes as tuples: text knows no `torch.Size`."""
    if isinstance(context, torch.Size):
        return tuple(context)
    if type(context) in (list, tuple):
        return type(context)(map(_plain_sizes, context))
    if isinstance(context, Mapping):
        return {key: _plain_sizes(item) for key, item in context.items()}
    return context


def _wrapper_class(kind: str) -> Any:
    """The class of that name, if this process has it and it is a tensor's.

    Nothing is imported by name: a rank that is sent such a state has the class in use itself.
    """
    module, _, name = kind.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    wraps = isinstance(found, type) and issubclass(found, torch.Tensor)
    if not wraps or not hasattr(found, "__tensor_unflatten__"):
        raise TypeError(f"state is of class {kind}, which is not a tensor class in this process")
    return found


def decode(node: Node, leaf: Callable[[Leaf], torch.Tensor], path: str = "") -> Any:
    """The value that `node` describes, with its tensors made by `leaf`, in order."""
    kind = node[0]
    if kind == "tensor":
        dtype = getattr(torch, node[1])
        assert isinstance(dtype, torch.dtype)
        return leaf(Leaf(path, dtype, tuple(node[2]), tuple(node[3]), node[4], node[5]))
    if kind == "value":
        return node[1]
    if kind == "wrapper":
        inner = {name: decode(item, leaf, f"{path}.{name}") for name, item in node[2]}
        context = decode(node[3], leaf, path)
        shape, stride = torch.Size(node[4]), tuple(node[5])
        return _wrapper_class(node[1]).__tensor_unflatten__(inner, context, shape, stride)
    if kind == "dict":
        return {
            key: decode(item, leaf, f"{path}.{key}" if path else str(key)) for key, item in node[1]
        }
    items = [
        decode(item, leaf, f"{path}.{position}" if path else str(position))
        for position, item in enumerate(node[1])
    ]
    if kind == "deque":
        return deque(items, node[2])
    return items if kind == "list" else tuple(items)


def leaves(node: Node) -> list[Leaf]:
    """The tensors that `node` describes, in order."""
    found: list[Leaf] = []

    def note(leaf: Leaf) -> torch.Tensor:
        found.append(leaf)
        # A tensor that is made of others may look at them.
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")

    decode(node, note)
    return found
