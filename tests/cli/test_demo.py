"""The demo: its text, its model, its runs, and the command that shows them."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import shardstep
from shardstep.cli import main
from shardstep.cli.app import app
from shardstep.cli.progress import DemoProgress
from shardstep.cli.table import demo_table, verdict_lines
from shardstep.demo.gpt import GPT, GPT_17M, GPTConfig
from shardstep.demo.record import DemoConfig, DemoRecord, RankRecord, RunRecord
from shardstep.demo.run import DROP_IN, MODULE, RUNS, UNSHARDED, RankFailed, StepDone, run_demo
from shardstep.demo.text import ByteBatches, stdlib_source

TINY = GPTConfig(n_layer=1, n_embd=16, block_size=16)


def batches(seed: int = 0, rank: int = 0) -> ByteBatches:
    return ByteBatches(stdlib_source(100_000), 4, 32, seed=seed, rank=rank)


def test_the_text_is_the_same_every_time_and_no_longer_than_asked() -> None:
    assert torch.equal(stdlib_source(100_000), stdlib_source(100_000))
    assert stdlib_source(100_000).numel() == 100_000


def test_a_python_without_source_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(RuntimeError, match=tmp_path.name):
        stdlib_source()


def test_a_batch_depends_on_seed_step_and_rank_alone() -> None:
    inputs, targets = batches().batch(step=5)
    again, _ = batches().batch(step=5)
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for other, _ in (batches().batch(6), batches(rank=1).batch(5), batches(seed=1).batch(5)):
        assert not torch.equal(inputs, other)


def test_a_text_too_short_for_one_window_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size=32"):
        ByteBatches(torch.zeros(32, dtype=torch.uint8), 4, 32, seed=0, rank=0)


def test_a_seed_determines_the_model_and_its_loss() -> None:
    inputs, targets = ByteBatches(stdlib_source(10_000), 2, 16, seed=0, rank=0).batch(0)
    losses = []
    for _ in range(2):
        torch.manual_seed(7)
        _, loss = GPT(TINY)(inputs, targets)
        losses.append(loss)
    assert torch.equal(losses[0], losses[1])


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


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_embedding_exactly_when_tied(tied: bool) -> None:
    model = GPT(dataclasses.replace(TINY, tied=tied))
    assert (model.head.weight is model.tok.weight) == tied


def test_the_benchmark_model_has_17_4_million_parameters() -> None:
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in GPT(GPT_17M).parameters())
    assert round(num_parameters / 1e6, 1) == 17.4


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="n_layer must be at least 1, got 0"):
        GPTConfig(n_layer=0)
    with pytest.raises(ValueError, match="multiple of n_head"):
        GPTConfig(n_embd=30, n_head=4)
    with pytest.raises(ValueError, match="block_size=16"):
        GPT(TINY)(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize("bad", [{"ranks": 0}, {"steps": 2}, {"batch_size": 0}])
def test_a_demo_with_nothing_to_measure_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        DemoConfig(**bad)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_demo_ends_with_equal_numbers_and_a_complete_record(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    size = ["--steps", "3", "--layers", "1", "--width", "32", "--batch", "2"]
    result = CliRunner().invoke(app, ["demo", *size, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "equal, bit for bit" in result.output
    assert result.output.count("3 steps, loss") == 3, "one line per run outside a terminal"

    record = json.loads(path.read_text())
    assert [run["name"] for run in record["sharded"]] == [DROP_IN, MODULE]
    for run in record["sharded"]:
        assert run["equal"]
        assert run["verdict"] == "equal, bit for bit"
        assert run["first_differing_step"] is None
    assert record["config"]["steps"] == 3
    assert record["config"]["model"]["n_embd"] == 32
    sent = []
    for run in (record["unsharded"], *record["sharded"]):
        assert run["ms_per_step"] > 0
        assert len(run["ranks"]) == 2
        for rank in run["ranks"]:
            assert len(rank["losses"]) == 3
            assert len(rank["digest"]) == 64
            if sys.platform == "linux":
                # At 2 ranks an all-reduce sends one copy of the gradients.
                assert rank["sent_nbytes_per_step"] >= 4 * record["num_parameters"]
        # AdamW keeps two numbers per parameter and a step counter per tensor.
        state = [rank["state_nbytes"] for rank in run["ranks"]]
        if run is record["unsharded"]:
            assert min(state) >= 8 * record["num_parameters"]
        else:
            assert sum(state) >= 8 * record["num_parameters"]
            assert max(state) < 0.6 * 9 * record["num_parameters"]
        sent.append(run["sent_nbytes_per_step"])
    if sys.platform == "linux":
        assert sent[1] > 1.4 * sent[0], "an all-reduce and a gather"
        assert sent[2] < 1.1 * sent[0], "as much as the all-reduce alone"


@pytest.mark.slow
def test_a_failing_rank_shows_its_traceback_and_ends_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Only AdamW, in the child process, refuses this.
    def config(**given: object) -> DemoConfig:
        return DemoConfig(model=TINY, ranks=1, learning_rate=-1.0)

    monkeypatch.setattr("shardstep.cli.demo.DemoConfig", config)
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
def test_an_interrupt_leaves_no_rank_behind() -> None:
    def interrupt(done: StepDone) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(DemoConfig(model=TINY, ranks=1), on_step=interrupt)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_rank_that_dies_silently_is_named() -> None:
    def kill(done: StepDone) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    with pytest.raises(RankFailed, match="rank 0 died with exit code -9"):
        run_demo(DemoConfig(model=TINY, ranks=1), on_step=kill)


def rank_record(losses: tuple[float, ...] = (3.0, 2.0, 1.0), digest: str = "a") -> RankRecord:
    return RankRecord(losses, digest, 800, sent_nbytes_per_step=None, ms_per_step=1.0)


def demo_record(sharded: RankRecord) -> DemoRecord:
    return DemoRecord(
        config=DemoConfig(model=TINY, steps=3),
        num_parameters=100,
        torch_version="2.13.0",
        unsharded=RunRecord(UNSHARDED, (rank_record(), rank_record())),
        sharded=(
            RunRecord(DROP_IN, (rank_record(), sharded)),
            RunRecord(MODULE, (rank_record(), rank_record())),
        ),
    )


def test_the_verdict_names_the_first_difference() -> None:
    def verdict(rank: RankRecord) -> str:
        record = demo_record(rank)
        assert record.verdict(record.sharded[1]) == "equal, bit for bit"
        said = record.verdict(record.sharded[0])
        assert record.equal(record.sharded[0]) == (said == "equal, bit for bit")
        return said

    assert verdict(rank_record()) == "equal, bit for bit"
    assert "from step 2" in verdict(rank_record(losses=(3.0, 2.5, 1.0)))
    assert "from step 3" in verdict(rank_record(losses=(3.0, 2.0, 1.5)))
    assert "different final parameters" in verdict(rank_record(digest="b"))


def test_a_table_fits_80_columns_and_says_what_is_unknown() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80)
    record = demo_record(rank_record(losses=(3.0, 2.5, 1.0)))
    console.print(demo_table(record))
    for line in verdict_lines(record):
        console.print(line)
    assert "unknown" in out.getvalue()
    assert "different from step 2 on" in out.getvalue()
    assert "…" not in out.getvalue(), "nothing is cut off"


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_are_drawn_in_a_terminal_only(terminal: bool) -> None:
    out = io.StringIO()
    with DemoProgress(Console(file=out, force_terminal=terminal, width=100), 3) as progress:
        for run in RUNS:
            for step in (1, 2, 3):
                progress.show(StepDone(run, step, loss=1.25))
    assert ("━" in out.getvalue()) == terminal
    assert "loss 1.250" in out.getvalue()
    if not terminal:
        assert len(out.getvalue().splitlines()) == 3


def test_help_and_version_read_well() -> None:
    runner = CliRunner()
    assert "demo" in runner.invoke(app, ["--help"]).output
    assert "Train a small GPT with DDP" in runner.invoke(app, ["demo", "--help"]).output
    version = runner.invoke(app, ["--version"])
    assert version.exit_code == 0
    assert version.output == f"shardstep {shardstep.__version__}\n"


def test_a_bad_option_is_explained_without_a_traceback() -> None:
    result = CliRunner().invoke(app, ["demo", "--width", "30"])
    assert result.exit_code == 2
    assert "--width" in result.output
    assert "multiple" in result.output
    result = CliRunner().invoke(app, ["demo", "--steps", "3", "--seed", str(10**30)])
    assert result.exit_code == 2
    assert "--seed" in result.output


def test_a_record_that_could_not_be_written_is_refused_before_the_demo_runs(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "record.json"
    result = CliRunner().invoke(app, ["demo", "--steps", "3", "--json", str(path)])
    assert result.exit_code == 2
    assert "--json" in result.output
    assert "there is no folder" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_says_how_to_get_it(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == missing or name.startswith(("shardstep.cli.", "shardstep.report")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 2
    assert 'pip install "shardstep[cli]"' in capsys.readouterr().err
