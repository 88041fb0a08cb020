"""A rank does not grow, however often the plan changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_freezing_and_unfreezing_again_and_again_takes_no_memory() -> None:
    script = Path(__file__).with_name("soak.py")
    options = "--minutes=4 --cycles=120 --acts=freeze,iterate,clear_all --megabytes=0.3"
    command = [sys.executable, script, *options.split(), "--modes=module 32 bits"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
