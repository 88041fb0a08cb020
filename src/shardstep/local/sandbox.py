"""A sandbox to run an optimizer class without side effects on the process.

Afterwards, random states, warning filters, logging, printed text, the number of threads, global
optimizer hooks and attributes of the class are as before. All of these belong to the process, so a
lock admits one thread at a time: a second thread would save, and later restore, the settings of the
first.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import random
import sys
import threading
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from shardstep.params.inputs import unwrap_partial

_OWN = frozenset({object, Optimizer})

_CONTAINERS = (dict, defaultdict, OrderedDict, Counter, list, set, deque)

GLOBAL_HOOKS: tuple[dict[int, Any], dict[int, Any]] = (
    torch_optimizer._global_optimizer_pre_hooks,
    torch_optimizer._global_optimizer_post_hooks,
)
"""The hooks on the steps of all optimizers."""

_one_thread_at_a_time = threading.RLock()


@contextlib.contextmanager
def sandbox(
    optimizer_class: Any, device: torch.device, set_default_device: bool = True
) -> Iterator[None]:
    """Undo all side effects of using `optimizer_class` on `device` when the context ends.

    Attributes are restored for a class or a `functools.partial` of one, not for other callables.
    New tensors are made on `device`, or with `set_default_device=False` on the user's default
    device, as in the user's own steps.
    """
    with _one_thread_at_a_time, contextlib.ExitStack() as stack:
        devices = [device] if device.type != "cpu" else []
        kind = device.type if devices else "cuda"
        stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
        stack.callback(random.setstate, random.getstate())
        numpy: Any = sys.modules.get("numpy")
        if numpy:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        for restore in _class_restorers(optimizer_class):
            stack.callback(restore)
        for hooks in GLOBAL_HOOKS:
            stack.callback(_refill, hooks, hooks.copy())
            hooks.clear()
        stack.callback(torch.set_warn_always, torch.is_warn_always_enabled())
        # Otherwise warnings that torch gives once per process would be lost.
        torch.set_warn_always(True)
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        # The caller may be under no_grad or in inference mode.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # Only if needed: the context slows every operation.
        if set_default_device and torch.get_default_device() != device:
            stack.enter_context(torch.device(device))
        # Threads divide large tensors, and compute the ends of their parts with other instructions.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        # Compiling a step for a few small tensors would take seconds.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _class_restorers(optimizer_class: Any) -> list[Callable[[], object]]:
    """Return functions that restore the attributes of the class and its bases, at any depth.

    Classes keep counters and registries there.
    """
    optimizer_class = unwrap_partial(optimizer_class)
    bases = optimizer_class.__mro__ if isinstance(optimizer_class, type) else ()
    kept = [(base, dict(vars(base))) for base in bases if base not in _OWN]
    found: list[Callable[[], object]] = [
        functools.partial(_restore_attributes, base, before) for base, before in kept
    ]
    waiting, seen = [value for _, before in kept for value in before.values()], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in _CONTAINERS:
            found.append(functools.partial(_refill, value, value.copy()))
            waiting.extend(value.values() if isinstance(value, dict) else value)
        elif type(value) is torch.Tensor:
            found.append(functools.partial(value.detach().copy_, value.detach().clone()))
    return found


def _restore_attributes(base: type, before: dict[str, Any]) -> None:
    for name in vars(base).keys() | before.keys():
        # Attributes of the interpreter are read-only, and unchanged.
        with contextlib.suppress(AttributeError, TypeError):
            if name not in before:
                delattr(base, name)
            elif vars(base).get(name) is not before[name]:
                setattr(base, name, before[name])


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    add = container.extend if isinstance(container, (list, deque)) else container.update
    add(contents)
