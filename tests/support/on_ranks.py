"""Tests whose body runs on every rank.

@on_ranks(2)
def test_total() -> None:
    value = torch.tensor(dist.get_rank())
    dist.all_reduce(value)
    assert value == 1
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from ranks import raises_on_every_rank, run_ranks


def on_ranks(
    *world_sizes: Any, raises: Any = None, match: str | None = None, **options: Any
) -> Callable[[Callable[..., list[Any] | None]], Callable[..., None]]:
    """Run a test on rank processes. It passes if no rank raises or returns anything but [].

    Args:
        *world_sizes: Numbers of ranks, or `pytest.param`s of them. With several, each is a test.
        raises: The error that every rank has to raise by itself, if it is to raise one.
        match: A pattern for the message of that error.
        **options: ``timeout`` and ``fresh`` of `run_ranks`.
    """

    def decorate(body: Callable[..., list[Any] | None]) -> Callable[..., None]:
        signature = inspect.signature(body)
        several = len(world_sizes) > 1

        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> Any:
            if dist.is_initialized():
                return body(*args, **kwargs)
            world_size = kwargs.pop("world_size") if several else world_sizes[0]
            args = signature.bind(*args, **kwargs).args
            if raises is not None:
                raises_on_every_rank(test, world_size, raises, *args, match=match, **options)
                return None
            for found in run_ranks(test, world_size, *args, **options):
                assert found is None or found == []
            return None

        if several:
            size = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
            params = [*signature.parameters.values(), size]
            vars(test)["__signature__"] = signature.replace(parameters=params)
            return pytest.mark.parametrize("world_size", world_sizes)(test)
        return test

    return decorate
