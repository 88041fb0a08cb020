"""The entry point of `shardstep`: importing torch takes seconds, and Ctrl-C may come then."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exit_on_ctrl_c() -> Iterator[None]:
    """End the process at once on Ctrl-C, with status 130. For code that leaves nothing to undo.

    There is no exception: compiled modules that are being imported may swallow one.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """Run the command line. Ctrl-C at any moment ends it with status 130, without a traceback."""
    # Torch says this where NumPy, which this command does not use, is not installed.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    sys.warnoptions.append("ignore:Failed to initialize NumPy:UserWarning")  # of spawned ranks
    with exit_on_ctrl_c():
        from shardstep.cli import main
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:  # stdout may be a file on a full disk
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
