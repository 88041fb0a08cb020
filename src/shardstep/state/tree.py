"""Encode optimizer state as JSON and tensors, so that nothing is ever unpickled."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardstep.params.flat import fills_memory, flat, is_dense

Node = list[Any]
"""A value in JSON: `["value", x]`, `["dict", [[key, node], ...]]`, `["list", [node, ...]]`,
`["tuple", [node, ...]]`, `["deque", [node, ...], maxlen]`, `["dtype", name]`, `["size", [n, ...]]`,
`["tensor", dtype, shape, stride, on_cpu, data or null]`, and, for a wrapper subclass of tensors,
`["wrapper", class, [[name, node], ...], context node, shape, stride]`."""

INLINE_NBYTES = 64
"""Tensors up to this size are part of the JSON: step counters, not moments."""

# Limits for descriptions of tensors from files and other ranks, checked before any allocation.

MAX_DIMS = 64
"""The limit of torch's own functions."""

MAX_DEPTH = 64
"""The limit for nested containers, far below Python's recursion limit."""

MAX_NUMEL = 2**58

STATE_NBYTES = 64 * 2**20
STATE_RATIO = 64
"""The limits for one tensor of state that is not per element: bytes, and times the bytes of all
parameters. A vector of history or a square factor fits; gigabytes for a scalar do not."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    # Not quantised or sub-byte dtypes: ordinary functions do not copy these.
    if isinstance(dtype, torch.dtype) and not re.match(r"torch\.(?:q|u?int[1-7]$)", str(dtype))
}


@dataclass(frozen=True, slots=True)
class Form:
    """Dtype and shape of a tensor that is somewhere else."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Leaf(Form):
    """A dense tensor in the state of one parameter, at a path such as `"factors.0"`.

    `on_cpu` is True if it is on the CPU whatever its parameter's device is. `data` has the bytes of
    a small tensor in hexadecimal.
    """

    path: str
    stride: tuple[int, ...]
    on_cpu: bool
    data: str | None

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return a tensor of this form, filled if the data is part of the description."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if self.data is not None and tensor.numel():
            raw = torch.frombuffer(bytearray.fromhex(self.data), dtype=torch.uint8)
            flat(tensor).copy_(raw.view(self.dtype))
        return tensor


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, for `dtype_named`."""
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"tensors of dtype {name} cannot be sent or saved")
    return name


def dtype_named(name: Any) -> torch.dtype:
    """Return the dtype of this name, or raise a ValueError."""
    # Not by getattr(torch, name): that may import a submodule.
    if not isinstance(name, str) or name not in _DTYPES:
        raise ValueError(f"there is no dtype {name!r}")
    return _DTYPES[name]


def encode(value: Any, path: str = "", depth: int = 0) -> tuple[Node, list[torch.Tensor]]:
    """Return a description of `value` and its tensors, dense and in the same order."""
    if depth > MAX_DEPTH:
        raise TypeError(f"state {path[:80]!r} has dicts and lists more than {MAX_DEPTH} deep")
    if isinstance(value, torch.Tensor):
        wrapper = is_traceable_wrapper_subclass(value)
        return _encode_wrapper(value, path) if wrapper else _encode_tensor(value, path)
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value], []
    if isinstance(value, torch.dtype):
        return ["dtype", name_of(value)], []
    if isinstance(value, torch.Size):
        return ["size", list(value)], []
    if not isinstance(value, Mapping) and type(value) not in (list, tuple, deque):
        kind = type(value).__name__
        article = "an" if kind[0] in "aeiouAEIOU" else "a"
        remedy = "; pass its state_dict()" if hasattr(value, "state_dict") else ""
        raise TypeError(
            f"state {path!r} is {article} {kind}, which cannot be sent or saved{remedy}"
        )
    items, tensors = [], []
    for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        if not isinstance(key, (str, int, float)):
            raise TypeError(f"state {path!r} has a key of type {type(key).__name__}")
        node, found = encode(item, _join(path, key), depth + 1)
        items.append([key, node])
        tensors += found
    if isinstance(value, Mapping):
        return ["dict", items], tensors
    length = [value.maxlen] if isinstance(value, deque) else []
    return [type(value).__name__, [node for _, node in items], *length], tensors


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _encode_tensor(value: torch.Tensor, path: str) -> tuple[Node, list[torch.Tensor]]:
    tensor = value.detach()
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not plain or tensor.is_quantized or tensor.is_meta:
        raise TypeError(
            f"state {path!r} is a {type(value).__name__} ({value.layout}, {value.dtype}, on "
            f"{value.device}), which cannot be sent or saved"
        )
    tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.is_contiguous() and not is_dense(tensor):
        tensor = tensor.contiguous()
    data = None
    if tensor.nbytes <= INLINE_NBYTES:
        raw = flat(tensor).cpu().view(torch.uint8).tolist() if tensor.numel() else ()
        data = bytes(raw).hex()
    # Paged memory, as bitsandbytes allocates it, belongs to the device too.
    on_cpu = tensor.device.type == "cpu" and not getattr(value, "is_paged", False)
    shape, stride = list(tensor.shape), list(tensor.stride())
    return ["tensor", name_of(tensor.dtype), shape, stride, on_cpu, data], [tensor]


def _encode_wrapper(value: Any, path: str) -> tuple[Node, list[torch.Tensor]]:
    """Describe a wrapper subclass, such as quantised state: codes and scales."""
    names, context = value.__tensor_flatten__()
    (_, items), tensors = encode({name: getattr(value, name) for name in names}, path)
    context, found = encode(context, f"{path}.context")
    if found:
        raise TypeError(
            f"state {path!r} is a {type(value).__name__} with tensors in its context, which cannot "
            "be sent or saved"
        )
    kind = f"{type(value).__module__}:{type(value).__qualname__}"
    return ["wrapper", kind, items, context, list(value.shape), list(value.stride())], tensors


def wrap(kind: str, inner: Mapping[str, Any], context: Any, shape: Any, stride: Any) -> Any:
    """Return a tensor of the wrapper subclass `kind`.

    Nothing is imported by name: a rank that receives such state already uses the class.
    """
    module, _, name = kind.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    wraps = isinstance(found, type) and issubclass(found, torch.Tensor)
    if not wraps or not hasattr(found, "__tensor_unflatten__"):
        raise TypeError(
            f"state is of class {kind}, which is not a tensor class in this process; import "
            f"{module} first"
        )
    return found.__tensor_unflatten__(inner, context, torch.Size(shape), tuple(stride))


def unwrap(kind: str, inner: Mapping[str, Any], *described: Any) -> Any:
    """Return the tensors inside a wrapper subclass, in place of `wrap`."""
    return inner


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy; the copy of a wrapper subclass has copies of its tensors."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.detach().clone()
    # Not by clone(): the class may lack it, or it may drop attributes.
    names, context = tensor.__tensor_flatten__()
    inner = {name: own_copy(getattr(tensor, name)) for name in names}
    kind: Any = type(tensor)
    made: torch.Tensor = kind.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    return made


def decode(
    node: Node,
    leaf: Callable[[Leaf], object],
    path: str = "",
    depth: int = 0,
    wrap: Callable[..., Any] = wrap,
) -> Any:
    """Return the value that `node` describes, with its tensors made by `leaf`, in order.

    `wrap` makes tensors of wrapper subclasses. A description that is invalid raises a ValueError.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"{path[:80]!r} has dicts and lists more than {MAX_DEPTH} deep")
    kind = node[0]
    if kind == "tensor":
        return leaf(_leaf(path, *node[1:]))
    if kind == "value":
        if not (node[1] is None or isinstance(node[1], (bool, int, float, str))):
            raise ValueError(f"{path!r} is described as a number or text, but is neither")
        return node[1]
    if kind == "dtype":
        return dtype_named(node[1])
    if kind == "size":
        if not is_sizes(node[1]):
            raise ValueError(f"{path!r} is described as a shape, but cannot be one")
        return torch.Size(node[1])
    if kind == "wrapper":
        inner = decode(["dict", node[2]], leaf, path, depth, wrap)
        context = decode(node[3], leaf, path, depth + 1, wrap)
        if not (is_sizes(node[4]) and is_counts(node[5]) and isinstance(node[1], str)):
            raise ValueError(f"{path!r} has an impossible class, shape or stride")
        return wrap(node[1], inner, context, node[4], node[5])
    if kind == "dict":
        found = {}
        for key, item in node[1]:
            if not isinstance(key, (str, int, float)) or key in found:
                raise ValueError(f"{path!r} has a key twice, or an invalid key")
            found[key] = decode(item, leaf, _join(path, key), depth + 1, wrap)
        return found
    if kind not in ("list", "tuple", "deque"):
        raise ValueError(f"{path!r} is described as a {kind!r}, which is unknown")
    items = [
        decode(item, leaf, _join(path, position), depth + 1, wrap)
        for position, item in enumerate(node[1])
    ]
    if kind == "deque":
        return deque(items, node[2])
    return items if kind == "list" else tuple(items)


def _leaf(path: str, dtype: Any, shape: Any, stride: Any, on_cpu: Any, data: Any) -> Leaf:
    """Return the description of a tensor, checked: it comes from other ranks or from files."""
    if not (is_sizes(shape) and is_counts(stride) and fills_memory(shape, stride)):
        raise ValueError(f"tensor {path!r} has an impossible shape or stride")
    leaf = Leaf(dtype_named(dtype), tuple(shape), path, tuple(stride), bool(on_cpu), data)
    if data is not None and (
        leaf.nbytes > INLINE_NBYTES or len(bytes.fromhex(data)) != leaf.nbytes
    ):
        raise ValueError(f"tensor {path!r} has another number of bytes than its shape needs")
    return leaf


def leaves(node: Node) -> list[Leaf]:
    """Return the tensors that `node` describes, in order."""
    found: list[Leaf] = []
    decode(node, found.append, wrap=lambda *described: None)
    return found


def wrappers(node: Node) -> list[str]:
    """Return the classes of the wrapper subclasses in `node`."""
    found: list[str] = []
    decode(node, lambda leaf: None, wrap=lambda kind, *described: found.append(kind))
    return found


def with_leaves(node: Node, leaf: Callable[[int, Node], Node]) -> Node:
    """Return `node` with each tensor's description replaced by `leaf(number, description)`."""
    numbers = count()

    def walk(node: Node) -> Node:
        # Text in a value or a key may be "tensor" too, in a list of another length.
        if node[:1] == ["tensor"] and len(node) == 6:
            return leaf(next(numbers), node)
        return [walk(part) if isinstance(part, list) else part for part in node]

    return walk(node)


def is_counts(value: Any) -> bool:
    """Return whether this is a short list of numbers that can be sizes or offsets."""
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMS
        and all(type(each) is int and 0 <= each <= MAX_NUMEL for each in value)
    )


def is_sizes(value: Any) -> bool:
    """Return whether this is a list of numbers that can be the sizes of one tensor."""
    return is_counts(value) and math.prod(max(1, each) for each in value) <= MAX_NUMEL


def memory_nbytes() -> int:
    """Return the memory of this machine, or the limit of its container."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError):
        # The container's limit, with control groups version 2.
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found)
