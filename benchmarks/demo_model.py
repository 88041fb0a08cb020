"""The model and the text of the demo, which is in `examples/demo`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from demo.gpt import GPT, GPT_17M, GPTConfig
from demo.record import DemoConfig
from demo.text import make_batch, stdlib_source

__all__ = ["GPT", "GPT_17M", "DemoConfig", "GPTConfig", "make_batch", "stdlib_source"]
