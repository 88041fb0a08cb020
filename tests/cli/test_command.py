"""The command as a whole: help, and Ctrl-C at any moment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import summary
from typer.testing import CliRunner

from shardstep import checkpoint
from shardstep.cli.app import app

COMMANDS = ["", "demo", "plan", "bench", "checkpoint"]
COMMANDS += [f"checkpoint {verb}" for verb in ("inspect", "verify", "reshard", "export", "import")]
MAIN = [sys.executable, "-c", "import shardstep_command as c; c.main()"]


def run(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    given = {"capture_output": True, "text": True, "timeout": 200} | options
    return subprocess.run([*MAIN, *args], **given)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_flags_without_values_and_json_is_a_flag_everywhere(command: str) -> None:
    words = [*command.split(), "--help"]
    shown = run(*words) if command == "bench" else CliRunner().invoke(app, words)
    assert "--help" in shown.stdout
    assert "Usage" in shown.stdout or command == "bench"
    for odd in ("<bool>", "<int", "<str>", "False", "None"):
        assert odd not in shown.stdout
    if command not in ("", "checkpoint"):
        assert re.search(r"--json +[Pp]rint JSON", shown.stdout)


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


def interrupt(command: list[str], ready: Callable[[Any], None], **options: Any) -> tuple[str, str]:
    """Press Ctrl-C when the command is ready. Return what it has printed; it ends with 130."""
    pipe = subprocess.PIPE
    # A job in the background ignores the signal, and so would the child.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    # Ctrl-C reaches all processes of a terminal.
    options |= {"preexec_fn": heed, "start_new_session": True}
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options) as child:
        try:
            ready(child)
            os.killpg(child.pid, signal.SIGINT)
            out, err = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 130
    return out, err


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.2, 0.5, 1.0, 4.0])
def test_ctrl_c_is_clean(after_s: float) -> None:
    ranks = ",".join(map(str, range(2, 4000)))
    command = [sys.executable, "-c", TELLING, "plan", "--model", "mixtral-8x7b", "--ranks", ranks]

    def ready(child: Any) -> None:
        assert child.stdout.readline() == "up\n"
        time.sleep(after_s)

    assert "Traceback" not in "".join(interrupt(command, ready))


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.5, 1.0, 2.0, 4.0])
def test_ctrl_c_is_clean_while_ranks_start(after_s: float) -> None:
    ranks: list[str] = []

    def ready(child: Any) -> None:
        while not list_ranks(child.pid):
            time.sleep(0.05)
        time.sleep(after_s)
        ranks.extend(list_ranks(child.pid))

    out, err = interrupt([*MAIN, "demo"], ready)
    assert out == ""
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("after_s", [0.0, 3.0])
def test_a_demo_that_is_terminated_leaves_no_ranks_and_no_files(
    number: signal.Signals, after_s: float, tmp_path: Path
) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    # These tests may themselves run under nohup, which ignores SIGHUP.
    heeding = f"import signal; signal.signal({number:d}, signal.SIG_DFL); {MAIN[-1]}"
    command = [sys.executable, "-c", heeding, "demo"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as child:
        try:
            while not (ranks := list_ranks(child.pid)):
                time.sleep(0.01)
            time.sleep(after_s)
            child.send_signal(number)
            err = child.communicate(timeout=60)[1]
        finally:
            child.kill()
    assert child.returncode == 128 + number
    assert "leaked" not in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("shardstep-*"))
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["reshard --ranks 4", "export", "export --to safetensors"])
def test_ctrl_c_leaves_nothing_of_a_checkpoint_that_is_being_written(
    command: str, tmp_path: Path
) -> None:
    model = {f"w{number}": torch.ones(2**22) for number in range(16)}
    path = checkpoint.import_state_dict(tmp_path / "saved", model=model)
    verb, *options = command.split()
    args = [*MAIN, "checkpoint", verb, str(path), "out/new", *options, "--no-verify"]
    (tmp_path / "out").mkdir()

    def ready(child: Any) -> None:
        while child.poll() is None and not list((tmp_path / "out").iterdir()):
            time.sleep(0.005)

    assert interrupt(args, ready, cwd=tmp_path)[1] == ""
    assert not list((tmp_path / "out").iterdir())


def list_ranks(parent: int) -> list[str]:
    """Return the processes that a demo has started, its resource tracker left out."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--contestants ddp,mine", "no contestant is named mine; there are ddp"),
        ("--contestants ,", "expected at least one name"),
        ("--out no/out.json", "cannot write no/out.json"),
        ("--out out.json --picture no/out.png", "cannot write no/out.png"),
        ("--out out.json --picture out.svg", "ends with .png"),
        ("--out .", "expected a file, but . is a folder"),
        ("--hosts 0", "--hosts must be positive"),
        ("--hosts 251", "--hosts must be at most 250"),
    ],
)
def test_the_benchmark_explains_a_bad_option_before_it_starts(
    options: str, said: str, tmp_path: Path
) -> None:
    # Not through `shardstep bench`, which first imports torch.
    launcher = Path(__file__).parents[2] / "benchmarks/hosts.py"
    command = [sys.executable, launcher, "--local", *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_table_of_the_benchmark_fits_80_columns() -> None:
    recorded = Path(__file__).parents[2] / "benchmarks/results/hosts-2-1gbit.json"
    shown = summary.table(json.loads(recorded.read_text()))
    assert max(map(len, shown.splitlines())) <= 80
    assert re.search(r"^zero2 +664 +652–726 +0\.830 +1\.00 +69\.6 +[\d.]+ +0$", shown, re.MULTILINE)


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_is_no_error(tmp_path: Path) -> None:
    path = checkpoint.import_state_dict(tmp_path / "saved", model={"w": torch.ones(40)})
    local = "--local --rounds 1 --steps 1 --contestants ddp --seq-len 8"
    commands = [
        "plan --model gpt2-124m --ranks 2",
        f"checkpoint inspect {path} --json",
        f"bench {local}",
    ]
    for command in commands:
        reading, writing = os.pipe()
        os.close(reading)
        plumbing = {"capture_output": False, "stdout": writing, "stderr": subprocess.PIPE}
        done = run(*command.split(), cwd=tmp_path, **plumbing)
        os.close(writing)
        assert done.returncode != 0
        assert not re.search("error|Traceback|Errno", done.stderr)
    made = json.loads((tmp_path / "local-2-none.json").read_text())  # published ones stay
    assert "--out" not in made["command"]


@pytest.mark.parametrize("options", ["", "--json"])
def test_stdout_on_a_full_disk_is_one_line(options: str) -> None:
    with open("/dev/full", "w") as full:
        plumbing = {"capture_output": False, "stdout": full, "stderr": subprocess.PIPE}
        done = run(*f"plan --model gpt2-124m --ranks 2 {options}".split(), **plumbing)
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device\n"


@pytest.mark.slow
def test_the_demo_does_not_warn_of_numpy_which_it_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('No module named numpy')")
    places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    size = "demo --device cpu --steps 3 --layers 1 --width 16 --batch 1"
    done = run(*size.split(), env=os.environ | {"PYTHONPATH": places})
    assert done.returncode == 0, done.stderr
    assert "NumPy" not in done.stderr


@pytest.mark.slow
def test_the_benchmark_runs_on_local_ranks(tmp_path: Path) -> None:
    options = "bench --local --json --rounds 1 --steps 1 --contestants ddp,zero2 --seq-len 8"
    done = run(*options.split(), "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    assert "round 1/1" in done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "out.json").read_text())
    assert result["command"].startswith("shardstep bench --local")
    assert result["command"].endswith("--out out.json")
    assert result["contestants"]["zero2"]["loss_distance_to_ddp"] == 0
    assert (tmp_path / "out.png").exists()


@pytest.mark.slow
def test_a_full_disk_does_not_cost_the_table_of_the_benchmark(tmp_path: Path) -> None:
    options = "bench --local --hosts 1 --rounds 1 --steps 1 --contestants ddp --seq-len 8"
    done = run(*options.split(), "--out", "/dev/full", "--picture", "out.png", cwd=tmp_path)
    assert done.returncode == 1
    assert "ddp" in done.stdout
    assert done.stderr.endswith("error: cannot write /dev/full (No space left on device)\n")
    assert "Traceback" not in done.stderr
