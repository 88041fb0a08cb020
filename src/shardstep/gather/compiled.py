"""Waits for gathers before compiled parts of a module, which read parameters without Python.

A part that `Module.compile()` compiled before the optimizer was constructed waits for all of its
parameters before it is called; gathers of later parts go on meanwhile. Whatever else is compiled
may read any parameter at any time: from then on, every gather is over when the step returns. The
compiler's callback distinguishes the two: for such a part, it comes within the part's call.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shardstep.gather.overlapped import Flights

CALL = "_compiled_call_impl"
"""The attribute of a module that `Module.compile()` sets to its compiled call."""


class _Calls(threading.local):
    """The number of compiled parts that are being called in this thread."""

    number = 0


_calls = _Calls()
_compiled_elsewhere = False


class CompiledPart:
    """Takes the place of a compiled module's call: waits for the module's buckets first."""

    def __init__(self, module: torch.nn.Module, flights: Flights, buckets: Sequence[int]) -> None:
        self._module, self._flights, self._buckets = module, flights, buckets
        self._compiled = getattr(module, CALL)
        setattr(module, CALL, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the parameters of the module and those among its arguments, and call it."""
        for number in self._buckets:
            self._flights.wait_for(number)
        self._flights.wait_in((args, kwargs))
        _calls.number += 1
        try:
            return self._compiled(*args, **kwargs)
        finally:
            _calls.number -= 1

    @property
    def in_place(self) -> bool:
        """True unless the module has been compiled again: calls of it come here."""
        return getattr(self._module, CALL) is self

    def put_back(self) -> None:
        """Leave the module as it was."""
        if self.in_place:
            setattr(self._module, CALL, self._compiled)


class Handle:
    """Removes a compiled part, and does not keep its module alive."""

    def __init__(self, part: CompiledPart) -> None:
        self._part = weakref.ref(part)

    def remove(self) -> None:
        """Leave the module as it was."""
        part = self._part()
        if part is not None:
            part.put_back()


def parts_that_read(
    root: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, bool, list[torch.nn.Parameter]]]:
    """Yield each part, whether it is compiled, and the parameters it reads.

    A compiled part is yielded with all parameters below it, in place of the parts there.
    """
    seen: set[torch.nn.Module] = set()
    waiting = [root]
    while waiting:
        part = waiting.pop()
        if part not in seen:
            seen.add(part)
            compiled = part is not root and getattr(part, CALL, None) is not None
            yield part, compiled, list(part.parameters(recurse=compiled))
            waiting += () if compiled else part.children()


def runs_outside_python(module: torch.nn.Module) -> bool:
    """Return whether scripted or compiled code may read the parameters of `module` at any time."""
    scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
    return scripted or _compiled_elsewhere


@functools.cache
def watch_compiler(listener: Callable[[bool], None]) -> None:
    """From now on, call `listener` when torch.compile starts, with True if in a compiled part."""
    global _compiled_elsewhere
    from torch._dynamo.callback import CallbackTrigger, callback_handler
    from torch._dynamo.utils import counters

    _compiled_elsewhere = bool(counters["frames"])

    def compilation_starts(args: Any) -> None:
        global _compiled_elsewhere
        # Other triggers belong to graphs that were compiled before, such as their backward.
        if args.callback_trigger is CallbackTrigger.DYNAMO:
            within = _calls.number > 0
            _compiled_elsewhere = _compiled_elsewhere or not within
            listener(within)

    callback_handler.register_start_callback(compilation_starts)
