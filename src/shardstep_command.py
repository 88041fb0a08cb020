"""The entry point of `shardstep`: importing torch takes seconds, and Ctrl-C may come then."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Run the command line. Ctrl-C at any moment ends it with status 130, without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        # No exception: compiled modules that are being imported may swallow one.
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from shardstep.cli import main

    signal.signal(signal.SIGINT, before)
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
