"""Named spans of time for profilers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NO_SPAN = nullcontext()


def span(name: str, bucket: int | None = None) -> AbstractContextManager[object]:
    """Return a context that shows as `shardstep::name` in a profiler that is running."""
    # torch's own function looks for observers at each call, which takes longer.
    if not profiler._is_profiler_enabled:
        return _NO_SPAN
    number = "" if bucket is None else f" bucket {bucket}"
    return profiler.record_function(f"shardstep::{name}{number}")
