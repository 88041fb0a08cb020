"""The command as a whole: help, and Ctrl-C at any moment."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardstep.cli.app import app

COMMANDS = ["", "plan", "checkpoint", *(f"checkpoint {verb}" for verb in ("inspect", "verify"))]
COMMANDS += [f"checkpoint {verb}" for verb in ("reshard", "export", "import")]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_flags_without_a_type_and_every_command_can_print_json(command: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"]).stdout
    assert "--help" in shown
    assert "<bool>" not in shown
    assert ("--json" in shown) is (command not in ("", "checkpoint"))


# Says when the command has taken the signal over: a busy machine may be slow to get there.
TELLING = """
import signal
import shardstep_command

take_over = signal.signal

def tell(number, handler):
    before = take_over(number, handler)
    print("up", flush=True)
    return before

signal.signal = tell
shardstep_command.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.2, 0.5, 1.0, 4.0])
def test_ctrl_c_is_clean(after_s: float) -> None:
    ranks = ",".join(map(str, range(2, 4000)))
    command = [sys.executable, "-c", TELLING, "plan", "--model", "mixtral-8x7b", "--ranks", ranks]
    pipe = subprocess.PIPE
    # A job in the background ignores the signal, and so would the child.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        time.sleep(after_s)
        child.send_signal(signal.SIGINT)
        try:
            out, err = child.communicate(timeout=60)
        finally:
            child.kill()
    assert "Traceback" not in out + err
    assert child.returncode == 130


def test_the_benchmark_refuses_an_unknown_contestant_before_it_starts() -> None:
    code = "import shardstep_command as c; c.main()"
    command = [sys.executable, "-c", code, "bench", "--local", "--contestants", "ddp,mine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no contestant is named mine; there are ddp" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_benchmark_runs_on_local_ranks(tmp_path: Path) -> None:
    code = "import shardstep_command as c; c.main()"
    options = "bench --local --json --rounds 1 --steps 1 --contestants ddp,zero2 --seq-len 8"
    command = [sys.executable, "-c", code, *options.split(), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "round 1/1" in done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "out.json").read_text())
    assert result["contestants"]["zero2"]["loss_distance_to_ddp"] == 0
    assert (tmp_path / "out.png").exists()
