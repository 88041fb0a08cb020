"""Optimizer state as text and tensors: the structure is JSON, so nothing is ever unpickled."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardstep.buffers import fills_memory, flat, is_dense
from shardstep.checkpoint.limits import MAX_DEPTH, is_counts, is_sizes

Node = list[Any]
"""A value in JSON: `["value", x]`, `["dict", [[key, node], ...]]`, `["list", [node, ...]]`,
`["tuple", [node, ...]]`, `["deque", [node, ...], maxlen]` or
`["tensor", dtype, shape, stride, on_cpu, data or null]`."""

INLINE_NBYTES = 64
"""Tensors up to this size travel in the text: step counters, not moments."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    # Not quantised ones nor parts of bytes, which ordinary functions do not copy.
    if isinstance(dtype, torch.dtype) and not re.match(r"torch\.(?:q|u?int[1-7]$)", str(dtype))
}


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

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        """A tensor of this form, filled already if the data is here."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.data is not None and tensor.numel():
            raw = torch.frombuffer(bytearray.fromhex(self.data), dtype=torch.uint8)
            flat(tensor).copy_(raw.view(self.dtype))
        return tensor


def name_of(dtype: torch.dtype) -> str:
    """The name by which `dtype_named` knows it.

    Raises:
        TypeError: if it knows none.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"tensors of dtype {name} cannot be sent or saved")
    return name


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of this name.

    Raises:
        ValueError: if there is none.
    """
    # A table of our own: looking a name up in torch may import what is called so.
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"there is no dtype {name!r}")
    return _DTYPES[name]


def encode(value: Any, path: str = "", depth: int = 0) -> tuple[Node, list[torch.Tensor]]:
    """Describe `value`, and list its tensors, dense and in the order of the description.

    Raises:
        TypeError: if there is something in it that text cannot hold.
    """
    if depth > MAX_DEPTH:
        raise TypeError(f"state {path[:80]!r} has dicts and lists more than {MAX_DEPTH} deep")
    if isinstance(value, torch.Tensor):
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
        on_cpu = tensor.device.type == "cpu"
        shape, stride = list(tensor.shape), list(tensor.stride())
        return ["tensor", name_of(tensor.dtype), shape, stride, on_cpu, data], [tensor]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value], []
    if isinstance(value, Mapping):
        items, tensors = [], []
        for key, item in value.items():
            if not isinstance(key, (str, int, float)):
                raise TypeError(f"state {path!r} has a key of type {type(key).__name__}")
            node, found = encode(item, f"{path}.{key}" if path else str(key), depth + 1)
            items.append([key, node])
            tensors += found
        return ["dict", items], tensors
    if type(value) in (list, tuple, deque):
        nodes, tensors = [], []
        for position, item in enumerate(value):
            inner = f"{path}.{position}" if path else str(position)
            node, found = encode(item, inner, depth + 1)
            nodes.append(node)
            tensors += found
        if isinstance(value, deque):
            return ["deque", nodes, value.maxlen], tensors
        return [type(value).__name__, nodes], tensors
    raise TypeError(f"state {path!r} is a {type(value).__name__}, which cannot be sent or saved")


def decode(node: Node, leaf: Callable[[Leaf], torch.Tensor], path: str = "", depth: int = 0) -> Any:
    """The value that `node` describes, with its tensors made by `leaf`, in order.

    Raises:
        ValueError: if it describes none, or something else like it.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"{path[:80]!r} has dicts and lists more than {MAX_DEPTH} deep")
    kind = node[0]
    if kind == "tensor":
        return leaf(_leaf(path, *node[1:]))
    if kind == "value":
        if not (node[1] is None or isinstance(node[1], (bool, int, float, str))):
            raise ValueError(f"{path!r} is said to be a number or text, and is neither")
        return node[1]
    if kind == "dict":
        found = {}
        for key, item in node[1]:
            if not isinstance(key, (str, int, float)) or key in found:
                raise ValueError(f"{path!r} has a key twice, or one that is no key")
            found[key] = decode(item, leaf, f"{path}.{key}" if path else str(key), depth + 1)
        return found
    if kind not in ("list", "tuple", "deque"):
        raise ValueError(f"{path!r} is described as a {kind!r}, which is nothing")
    items = [
        decode(item, leaf, f"{path}.{position}" if path else str(position), depth + 1)
        for position, item in enumerate(node[1])
    ]
    if kind == "deque":
        return deque(items, node[2])
    return items if kind == "list" else tuple(items)


def _leaf(path: str, dtype: Any, shape: Any, stride: Any, on_cpu: Any, data: Any) -> Leaf:
    """A tensor as described, if there can be one.

    Raises:
        ValueError: if there cannot: texts come from other ranks, and from files.
    """
    if not (is_sizes(shape) and is_counts(stride) and fills_memory(shape, stride)):
        raise ValueError(f"tensor {path!r} cannot have the shape and stride that are said of it")
    leaf = Leaf(path, dtype_named(dtype), tuple(shape), tuple(stride), bool(on_cpu), data)
    if data is not None and (
        leaf.nbytes > INLINE_NBYTES or len(bytes.fromhex(data)) != leaf.nbytes
    ):
        raise ValueError(f"tensor {path!r} does not have the bytes that its shape needs")
    return leaf


def leaves(node: Node) -> list[Leaf]:
    """The tensors that `node` describes, in order."""
    found: list[Leaf] = []

    def note(leaf: Leaf) -> torch.Tensor:
        found.append(leaf)
        return torch.empty(0)

    decode(node, note)
    return found


def with_leaves(node: Node, leaf: Callable[[int, Node], Node]) -> Node:
    """The same structure with its tensors described anew, given each one's number and old form."""
    number = -1

    def walk(node: Node) -> Node:
        nonlocal number
        if node[0] == "tensor":
            number += 1
            return leaf(number, node)
        if node[0] == "dict":
            return ["dict", [[key, walk(item)] for key, item in node[1]]]
        if node[0] in ("list", "tuple", "deque"):
            return [node[0], [walk(item) for item in node[1]], *node[2:]]
        return node

    return walk(node)
