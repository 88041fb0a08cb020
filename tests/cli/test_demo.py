"""The demo: its text, its model, its runs, and the command that shows them."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import end_idle_processes
from rich.console import Console
from torch.multiprocessing.spawn import ProcessException
from typer.testing import CliRunner

import shardstep
from demo.command import demo_progress, demo_table, verdict_lines
from demo.gpt import GPT, GPT_17M, GPTConfig
from demo.record import EQUAL, DemoConfig, DemoRecord, RankRecord
from demo.run import (
    DROP_IN,
    MODULE,
    RUNS,
    UNSHARDED,
    RoundDone,
    rounds,
    run_demo,
    set_up_device,
)
from demo.text import make_batch, stdlib_source
from shardstep.cli import main
from shardstep.cli.app import app

TINY = GPTConfig(n_layer=1, n_embd=16, block_size=16)


def test_the_text_is_the_same_every_time_and_no_longer_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert torch.equal(stdlib_source(100_000), stdlib_source(100_000))
    assert stdlib_source(100_000).numel() == 100_000
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(RuntimeError, match=tmp_path.name):  # without source files
        stdlib_source()


def test_a_batch_depends_on_seed_step_and_rank_alone() -> None:
    def batch(**where: int) -> tuple[torch.Tensor, torch.Tensor]:
        return make_batch(
            stdlib_source(100_000), 4, 32, **{"seed": 0, "step": 5, "rank": 0, **where}
        )

    inputs, targets = batch()
    assert torch.equal(inputs, batch()[0])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for other in ({"step": 6}, {"rank": 1}, {"seed": 1}):
        assert not torch.equal(inputs, batch(**other)[0])


def test_no_position_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    idx = torch.randint(256, (1, 16))
    changed = idx.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, loss = model(idx)
    after, _ = model(changed)
    assert loss is None
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_the_head_is_the_embedding_exactly_when_tied() -> None:
    for tied in (True, False):
        model = GPT(dataclasses.replace(TINY, tied=tied))
        assert (model.head.weight is model.tok.weight) == tied


def test_the_benchmark_model_has_17_4_million_parameters() -> None:
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in GPT(GPT_17M).parameters())
    assert round(num_parameters / 1e6, 1) == 17.4


@pytest.mark.slow
def test_the_demo_ends_with_equal_numbers_and_a_complete_record(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    size = ["--steps", "3", "--layers", "1", "--width", "32", "--batch", "2"]
    where = ["--json", "--out", str(path), "--picture", str(tmp_path / "demo.png")]
    result = CliRunner().invoke(app, ["demo", "--device", "cpu", *size, *where])
    assert result.exit_code == 0, result.output

    assert (tmp_path / "demo.png").stat().st_size > 10_000
    record = json.loads(path.read_text())
    assert json.loads(result.stdout) == record
    assert record["verdicts"] == dict.fromkeys(RUNS, EQUAL)
    assert record["config"]["steps"] == 3
    assert record["config"]["model"]["n_embd"] == 32
    sent = {}
    for name, ranks in record["runs"].items():
        assert len(ranks) == 2
        for rank in ranks:
            assert [ms > 0 for ms in rank["ms_per_step"]] == [True], "one round after the warm-up"
            assert rank["gradient_nbytes"] >= 4 * record["num_parameters"] / 2
            assert len(rank["losses"]) == 3
            assert len(rank["digest"]) == 64
            if sys.platform == "linux":
                # At 2 ranks an all-reduce sends one copy of the gradients.
                assert rank["sent_nbytes_per_step"] >= 4 * record["num_parameters"]
        # AdamW keeps two numbers per parameter and a step counter per tensor.
        state = [rank["state_nbytes"] for rank in ranks]
        if name == UNSHARDED:
            assert min(state) >= 8 * record["num_parameters"]
        else:
            assert sum(state) >= 8 * record["num_parameters"]
            assert max(state) < 0.6 * 9 * record["num_parameters"]
        sent[name] = sum(rank["sent_nbytes_per_step"] or 0 for rank in ranks)
    if sys.platform == "linux":
        assert sent[DROP_IN] > 1.4 * sent[UNSHARDED], "an all-reduce and a gather"
        assert sent[MODULE] < 1.1 * sent[UNSHARDED], "as much as the all-reduce alone"


@pytest.fixture
def no_other_children() -> None:
    """Leave this process without children: the ranks of other tests may be waiting for a call."""
    end_idle_processes()


@pytest.mark.slow
@pytest.mark.usefixtures("no_other_children")
def test_a_failing_rank_shows_its_traceback_and_ends_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Only AdamW, in the child process, refuses this.
    def config(**given: object) -> DemoConfig:
        return DemoConfig(model=TINY, ranks=1, learning_rate=-1.0)

    monkeypatch.setattr("demo.command.DemoConfig", config)
    monkeypatch.setattr(sys, "argv", ["shardstep", "demo"])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 1
    error = capsys.readouterr().err
    assert "rank 0 failed" in error
    assert "Traceback" in error
    assert "Invalid learning rate: -1.0" in error
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.usefixtures("no_other_children")
@pytest.mark.parametrize("how", ["interrupt", "kill"])
def test_no_rank_is_left_behind_after_an_interrupt_or_a_death(how: str) -> None:
    def act(done: RoundDone) -> None:
        if how == "interrupt":
            raise KeyboardInterrupt
        for process in multiprocessing.active_children():
            process.kill()

    expected = KeyboardInterrupt if how == "interrupt" else ProcessException
    with pytest.raises(expected, match=None if how == "interrupt" else "process 0.*SIGKILL"):
        run_demo(DemoConfig(model=TINY, ranks=1), on_round=act)
    assert not multiprocessing.active_children()


def rank_record(losses: tuple[float, ...] = (3.0, 2.0, 1.0), digest: str = "a") -> RankRecord:
    return RankRecord(losses, digest, 800, 400, sent_nbytes_per_step=None, ms_per_step=(2.0, 1.0))


def demo_record(**drop_in: Any) -> DemoRecord:
    runs = {run: [rank_record(), rank_record()] for run in RUNS}
    runs[DROP_IN][1] = rank_record(**drop_in)
    return DemoRecord(DemoConfig(model=TINY, steps=3), 100, "2.13.0", runs)


@pytest.mark.parametrize(
    ("drop_in", "verdict"),
    [
        ({}, EQUAL),
        ({"losses": (3.0, 2.5, 1.0)}, "different from step 2 on"),
        ({"losses": (3.0, 2.0, 1.5)}, "different from step 3 on"),
        ({"digest": "b"}, "equal losses, but different final parameters"),
    ],
)
def test_the_verdict_names_the_first_difference(drop_in: dict[str, Any], verdict: str) -> None:
    record = demo_record(**drop_in)
    assert record.verdict(DROP_IN) == verdict
    assert record.verdict(MODULE) == EQUAL


def test_times_are_compared_round_by_round() -> None:
    record = demo_record()
    record.runs[MODULE][0] = dataclasses.replace(rank_record(), ms_per_step=(1.0, 3.0))
    assert record.ms_per_step(MODULE) == (2.5, 2.0, 3.0)  # the slower rank of each round
    assert record.time_ratio(MODULE) == (2.0, 1.0, 3.0)
    assert [len(each) for each in rounds(42)] == [2, 5, 5, 5, 5, 5, 5, 5, 5]
    assert [len(each) for each in rounds(3)] == [2, 1]


def test_a_table_fits_80_columns_and_says_what_is_unknown() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80)
    record = demo_record(losses=(3.0, 2.5, 1.0))
    console.print(demo_table(record))
    for line in verdict_lines(record):
        console.print(line)
    assert "unknown" in out.getvalue()
    assert "different from step 2 on" in out.getvalue()
    assert "gradients include messages in flight" in " ".join(out.getvalue().split())
    assert "…" not in out.getvalue(), "nothing is cut off"
    assert "Do not judge speed by this demo" in out.getvalue()


def test_every_run_has_a_bar() -> None:
    out = io.StringIO()
    with demo_progress(Console(file=out, force_terminal=True, width=100), 3) as show:
        for run in RUNS:
            show(RoundDone(run, 3, loss=1.25))
    assert "━" in out.getvalue()
    assert "loss 1.250" in out.getvalue()


def test_an_installation_without_the_demo_names_the_missing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shardstep, "__file__", str(tmp_path / "src" / "shardstep" / "__init__.py"))
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert str(tmp_path / "src" / "shardstep" / "examples" / "demo") in result.stderr


def test_help_and_version_read_well() -> None:
    runner = CliRunner()
    assert "demo" in runner.invoke(app, ["--help"]).output
    assert "Train a small GPT with DDP" in runner.invoke(app, ["demo", "--help"]).output
    version = runner.invoke(app, ["--version"])
    assert version.exit_code == 0
    assert version.output == f"shardstep {shardstep.__version__}\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--device", "cuda", "--ranks", "1000"], "--device cpu"),
        (["--width", "30"], "multiple"),
        (["--layers", "0"], "equal to 1"),
        (["--ranks", "0"], "equal to 1"),
        (["--batch", "0"], "equal to 1"),
        (["--steps", "2"], "equal to 3"),
        (["--seed", str(10**30)], "equal to 4294967296"),
        (["--json", "record.json"], "write a file with --out"),
        (["--out", "missing/record.json"], "cannot write"),
        (["--out", "."], "cannot write"),
        (["--picture", "missing/demo.png"], "cannot write"),
        (["--picture", "demo.svg"], "ends with .png"),
    ],
)
def test_a_bad_option_is_explained_before_the_demo_runs(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["demo", *options])
    assert result.exit_code == 2
    assert options[0] in result.output
    assert said in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("num_gpus", "options", "placed"),
    [
        (0, "", ("cpu", 2)),
        (1, "", ("cuda", 1)),
        (4, "", ("cuda", 4)),
        (4, "--ranks 3", ("cuda", 3)),
        (4, "--device cpu", ("cpu", 2)),
        (1, "--device cuda", ("cuda", 1)),
        (0, "--device cuda", "each rank needs a GPU, and there are 0"),
        (2, "--ranks 3", "each rank needs a GPU, and there are 2; try --device cpu"),
    ],
)
def test_the_demo_has_one_rank_per_gpu_or_two_on_the_cpu(
    num_gpus: int, options: str, placed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def run(config: DemoConfig, on_round: object) -> DemoRecord:
        given.append((config.device, config.ranks))
        return demo_record()

    monkeypatch.setattr("demo.command.run_demo", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setenv("COLUMNS", "40")
    result = CliRunner().invoke(app, ["demo", *options.split()])
    assert "…" not in result.output, "nothing is cut off, however narrow the terminal"
    if isinstance(placed, str):
        assert result.exit_code == 2
        assert placed in " ".join(result.output.replace("│", " ").split())
    else:
        assert (result.exit_code, given) == (0, [placed]), result.output


def test_a_full_disk_does_not_cost_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.command.run_demo", lambda *_, **__: demo_record())
    result = CliRunner().invoke(app, ["demo", "--device", "cpu", "--out", "/dev/full"])
    assert result.exit_code == 1
    assert MODULE in result.stdout
    assert result.stderr == "error: cannot write /dev/full (No space left on device)\n"


def test_a_rank_takes_its_gpu_after_it_has_asked_for_the_same_bits_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    cuda = torch.backends.cuda
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch, "use_deterministic_algorithms", done.append)
    monkeypatch.setattr(cuda, "enable_flash_sdp", done.append)
    monkeypatch.setattr(cuda, "enable_mem_efficient_sdp", done.append)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    assert set_up_device("cuda", 1) == torch.device("cuda", 1)
    assert done == [True, False, False, torch.device("cuda", 1)]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_says_how_to_get_it(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == missing or name.startswith("shardstep.cli."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert 'pip install "shardstep[cli]"' in capsys.readouterr().err
