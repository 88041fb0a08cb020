"""A sandbox to run an optimizer class without side effects on the process.

Afterwards, random states, warning filters, logging, printed text, global optimizer hooks and
attributes of the class are as before. All of these belong to the process, so a lock admits one
thread at a time: a second thread would save, and later restore, the settings of the first.
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
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from shardstep.params.inputs import unwrap_partial

_OWN = frozenset({object, Optimizer})

_CONTAINERS = (dict, defaultdict, OrderedDict, Counter, list, set, deque)

_one_thread_at_a_time = threading.RLock()


@contextlib.contextmanager
def sandbox(
    optimizer_class: Any, device: torch.device, set_default_device: bool = True
) -> Iterator[None]:
    """Undo all side effects of using `optimizer_class` when the context ends.

    Args:
        optimizer_class: a class, or a `functools.partial` of one. The attributes of a class that
            another callable uses are unknown here, and not restored.
        device: the device in use. Its random state is restored too.
        set_default_device: whether new tensors are made on `device`. If not, they are made on the
            user's default device, as in the user's own steps.
    """
    with _one_thread_at_a_time, contextlib.ExitStack() as stack:
        stack.enter_context(_random_states(device))
        stack.enter_context(_class_attributes(optimizer_class))
        for hooks in (
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        ):
            stack.enter_context(_emptied(hooks))
        stack.enter_context(_silence())
        # The caller may be under no_grad or in inference mode.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # Only if needed: the context slows every operation.
        if set_default_device and torch.get_default_device() != device:
            stack.enter_context(torch.device(device))
        # Compiling a step for a few small tensors would take seconds.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def _random_states(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type != "cpu" else []
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(legacy)


@contextlib.contextmanager
def _emptied(mapping: MutableMapping[Any, Any]) -> Iterator[None]:
    kept = list(mapping.items())
    mapping.clear()
    try:
        yield
    finally:
        mapping.clear()
        mapping.update(kept)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    disabled, always = logging.root.manager.disable, torch.is_warn_always_enabled()
    try:
        # Otherwise warnings that torch gives once per process would be lost.
        torch.set_warn_always(True)
        logging.disable(logging.CRITICAL)
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        torch.set_warn_always(always)


@contextlib.contextmanager
def _class_attributes(optimizer_class: Any) -> Iterator[None]:
    """Restore attributes of the class and its bases, and the contents of tensors and containers.

    Classes keep counters and registries there.
    """
    optimizer_class = unwrap_partial(optimizer_class)
    bases = optimizer_class.__mro__ if isinstance(optimizer_class, type) else ()
    kept = [(base, _attributes(base)) for base in bases if base not in _OWN]
    contents = _contents([list(before.values()) for _, before in kept])
    try:
        yield
    finally:
        for base, before in kept:
            for name in [name for name in vars(base) if name not in before]:
                _try(delattr, base, name)
            for name, value in before.items():
                if vars(base).get(name) is not value:
                    _try(setattr, base, name, value)
        for restore in contents:
            restore()


def _attributes(base: type) -> dict[str, Any]:
    own = ("__dict__", "__weakref__", "__doc__")
    return {name: value for name, value in vars(base).items() if name not in own}


def _contents(values: list[Any]) -> list[Callable[[], object]]:
    """Return functions that restore the present contents of `values`, at any depth."""
    found: list[Callable[[], object]] = []
    waiting, seen = values, set()
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


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    add = container.extend if isinstance(container, (list, deque)) else container.update
    add(contents)


def _try(change: Callable[..., None], *args: Any) -> None:
    # Attributes of the interpreter are read-only, and unchanged.
    with contextlib.suppress(AttributeError, TypeError):
        change(*args)
