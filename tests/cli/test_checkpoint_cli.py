"""The commands `shardstep checkpoint ...`: what they print and write, and say when it is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import flip
from problems import difference
from rich.console import Console
from torch import optim
from typer.testing import CliRunner

from shardstep import ZeroRedundancyOptimizer
from shardstep import checkpoint as ckpt
from shardstep.cli.app import app
from shardstep.cli.reporting import byte_progress, printable


def shardstep(*args: object) -> Any:
    return CliRunner().invoke(app, ["checkpoint", *map(str, args)])


def succeeds(*args: object) -> str:
    result = shardstep(*args)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(*args: object) -> str:
    """Return the one line on stderr; nothing is on stdout."""
    result = shardstep(*args)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), "a traceback"
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def save(path: Path, **extra: Any) -> Path:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
    opt = ZeroRedundancyOptimizer(
        [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.5}],
        optim.AdamW,
        lr=torch.tensor(0.25),
    )
    for param in (net[0].weight, net[0].bias, net[1].weight):
        param.grad = torch.randn_like(param)
    opt.step()
    return ckpt.save(path, opt, net, {"step": 1, "seen": torch.arange(100), **extra})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path / "step-1")


# ------------------------------------------------------------------------------------- inspect


SHOWN = [
    "torch.optim.adamw.AdamW",
    "4 (4 trainable, 1,850 elements)",
    "1.bias",  # has never had a gradient
    "lr=0.25",
    "lr=0.5",
    "weight_decay=0.01",
    f"torch {torch.__version__}",
    "for 1 rank",
    "tensor, int64 [100]",
    "optimizer.safetensors",
]


def test_inspect_shows_what_is_in_a_checkpoint(path: Path) -> None:
    shown = succeeds("inspect", path)
    nbytes = f"{(path / 'optimizer.safetensors').stat().st_size:,}"
    assert [said for said in [*SHOWN, nbytes] if said not in shown] == []
    assert "exp_avg_sq" not in shown
    assert "'exp_avg_sq' of '0.weight'" in succeeds("inspect", path, "--tensors")


def test_inspect_leaves_no_bar_in_a_terminal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stdout and stderr for a terminal
    monkeypatch.setenv("COLUMNS", "200")
    before, found, _ = shardstep("inspect", path).output.partition(str(path))
    erased = before.rpartition("\x1b[2K")[2]
    assert found
    assert re.sub(r"\x1b\[[\d;]*m", "", erased) == ""


def test_inspect_says_which_file_is_missing(path: Path) -> None:
    (path / "optimizer.safetensors").unlink()
    result = shardstep("inspect", path)
    assert result.exit_code == 1
    assert "missing" in next(line for line in result.stdout.splitlines() if "optimizer.saf" in line)
    assert result.stderr.strip() == f"error: {path}: optimizer.safetensors is missing"
    os.truncate(path / "model.safetensors", 10)
    assert "model.safetensors has another length; opt" in shardstep("inspect", path).stderr


def test_inspect_says_the_same_in_json(path: Path) -> None:
    said = json.loads(succeeds("inspect", path, "--json", "--tensors"))
    optimizer = said["optimizer"]
    assert said["format"] == "shardstep checkpoint"
    assert said["made_by"]["world_size"] == 1
    assert optimizer["class"] == "torch.optim.adamw.AdamW"
    assert (optimizer["parameters"], optimizer["elements"]) == (4, 1850)
    assert optimizer["without_state"] == ["1.bias"]
    assert [group["options"]["lr"] for group in optimizer["groups"]] == [0.25, 0.5]
    # Two moments per element of what has had a gradient, and three counters.
    assert optimizer["state_nbytes"] == (1850 - 20) * 8 + 3 * 4
    assert said["model"]["nbytes"] == 1850 * 4
    assert said["extra"] == {
        "nbytes": 800,
        "value": {"step": 1, "seen": "tensor, int64 [100]"},
    }
    files = {file.name: file.stat().st_size for file in path.iterdir()}
    files.pop("checkpoint.json")
    assert said["files"] == files
    names = [each["name"] for each in said["tensors"]]
    assert "model tensor '0.weight'" in names
    chunk = said["tensors"][0]["chunks"][0]
    assert chunk["file"] == "optimizer.safetensors"
    assert chunk["offsets"] == [0, 0]


def test_inspect_lists_a_folder_of_checkpoints(path: Path, tmp_path: Path) -> None:
    save(tmp_path / "before-step-2")
    said = json.loads(succeeds("inspect", tmp_path, "--json"))
    assert [Path(each["path"]).name for each in said["checkpoints"]] == ["step-1", "before-step-2"]
    assert [each["newest"] for each in said["checkpoints"]] == [False, True]
    rows = [line.split() for line in succeeds("inspect", tmp_path).splitlines() if line.strip()]
    assert [row[0] for row in rows if row[-1] == "newest"] == ["before-step-2"]
    save(tmp_path / "cut-short")
    os.truncate(tmp_path / "cut-short" / "model.safetensors", 10)
    save(tmp_path / "changed")
    flip(tmp_path / "changed" / "contents.json")
    left = tmp_path / ".step-3.saving"
    left.mkdir()
    os.utime(left, (0, 0))
    (tmp_path / "notes").mkdir()
    shown = succeeds("inspect", tmp_path)
    lines = shown.splitlines()
    (first,) = [n for n, line in enumerate(lines) if line.split()[:1] == ["step-1"]]
    assert lines[first + 1].split()[0] == "before-step-2"
    assert "cut-short: not complete: model.safetensors has another length" in lines
    assert any("changed: not complete" in line for line in lines)
    assert any(".step-3.saving: left by a save that did not finish" in line for line in lines)
    assert "notes" not in shown
    assert "newest" not in lines[first]
    said = json.loads(succeeds("inspect", tmp_path, "--json"))
    assert [Path(each["path"]).name for each in said["checkpoints"]] == ["step-1", "before-step-2"]
    assert said["unfinished"] == [{"path": str(left), "under_way": False}]


def test_a_checkpoint_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07[red]\n"
    path = ckpt.import_state_dict(
        tmp_path / "evil", model={f"w{evil}": torch.ones(40)}, extra={f"k{evil}": f"v{evil}"}
    )
    shown = succeeds("inspect", path, "--tensors")
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[red]" in shown
    assert printable("a\x1b[0m\u202eé") == "a\\x1b[0m\\u202eé"


# -------------------------------------------------------------------------------------- verify


FILES = ["checkpoint.json", "contents.json"] + [
    f"{kind}.safetensors" for kind in ("model", "optimizer", "extra")
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_verify_says_ok_or_names_the_file_that_is_damaged(
    path: Path, name: str, damage: str
) -> None:
    assert succeeds("verify", path).startswith(f"OK: {path} is complete")
    if damage == "changed":
        flip(path / name)
    elif damage == "cut":
        os.truncate(path / name, (path / name).stat().st_size - 1)
    else:
        (path / name).unlink()
    assert name in fails("verify", path)


@pytest.mark.parametrize("command", ["inspect", "verify", "reshard", "export", "import"])
@pytest.mark.parametrize("what", ["nothing", "file", "folder"])
def test_what_is_no_checkpoint_is_one_line_and_leaves_nothing(
    tmp_path: Path, command: str, what: str
) -> None:
    source = tmp_path / what
    if what == "file":
        source.write_text("text")
    elif what == "folder":
        source.mkdir()
    before = sorted(os.listdir(tmp_path))
    out = [] if command in ("inspect", "verify") else [tmp_path / "out"]
    ranks = ["--ranks", 2] if command == "reshard" else []
    line = fails(command, source, *out, *ranks)
    assert what in line
    assert what != "nothing" or line == f"error: {source} does not exist"
    assert sorted(os.listdir(tmp_path)) == before


# ------------------------------------------------------------------- reshard, export and import


def test_reshard_writes_a_checkpoint_for_so_many_ranks(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert str(out) in succeeds("reshard", path, out, "--ranks", 3, "--layout", "whole")
    assert json.loads(succeeds("inspect", out, "--json"))["made_by"]["world_size"] == 3
    assert len(list(out.glob("optimizer-*-of-00003.safetensors"))) == 3
    assert difference(ckpt.state_dict(out), ckpt.state_dict(path)) is None
    assert "exists already" in fails("reshard", path, out, "--ranks", 2)
    said = succeeds("reshard", path, tmp_path / "again", "--ranks", 1, "--json")
    assert json.loads(said) == {"path": str(tmp_path / "again")}


def test_damage_is_noticed_unless_it_is_not_looked_for(path: Path, tmp_path: Path) -> None:
    flip(path / "optimizer.safetensors")
    assert "optimizer.safetensors" in fails("export", path, tmp_path / "out")
    assert "optimizer.safetensors" in fails("reshard", path, tmp_path / "out", "--ranks", 2)
    assert os.listdir(tmp_path) == [path.name], "damage was not given a new digest"
    succeeds("reshard", path, tmp_path / "out", "--ranks", 2, "--no-verify")


def test_export_and_import_are_each_other_s_way_back(path: Path, tmp_path: Path) -> None:
    for form in ("torch", "torch-named"):
        back = tmp_path / form
        made = json.loads(succeeds("export", path, tmp_path / f"{form}.pt", "--to", form, "--json"))
        imported = succeeds("import", made["path"], back, "--optimizer-class", "AdamW", "--json")
        assert json.loads(imported) == {"path": str(back)}
        assert json.loads(succeeds("verify", back, "--json"))["complete"] is True
        assert difference(ckpt.weights(back), ckpt.weights(path)) is None
        assert difference(ckpt.state_dict(back)["state"], ckpt.state_dict(path)["state"]) is None
        assert difference(ckpt.load(back).extra, ckpt.load(path).extra) is None
        assert ckpt.summary(back)["optimizer"] == ckpt.summary(path)["optimizer"]


def test_parts_and_sizes_can_be_chosen(path: Path, tmp_path: Path) -> None:
    for option, expected in (
        ("--model-only", ckpt.weights(path)),
        ("--optimizer-only", ckpt.state_dict(path)),
    ):
        succeeds("export", path, tmp_path / option, option)
        assert difference(torch.load(tmp_path / option, weights_only=True), expected) is None
    succeeds("export", path, tmp_path / "hf", "--to", "safetensors", "--max-shard-size", "5kB")
    assert len(list((tmp_path / "hf").glob("model-*-of-00002.safetensors"))) == 2


@pytest.mark.parametrize(
    "options",
    [
        ["--model-only", "--optimizer-only"],
        *(["--max-shard-size", size] for size in ("many", "0", "nanGB", "1.2.3", "9" * 400)),
        ["--to", "pickle"],
    ],
)
def test_options_that_make_no_sense_are_explained(
    path: Path, tmp_path: Path, options: list[str]
) -> None:
    result = shardstep("export", path, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert "Invalid value" in result.stderr


def test_names_are_read_from_a_file(path: Path, tmp_path: Path) -> None:
    plain = ckpt.state_dict(path)
    names = [name for group in plain["param_groups"] for name in group.pop("param_names")]
    torch.save({"net": ckpt.weights(path), "opt": plain, "what": Path}, tmp_path / "no.pt")
    assert "could run any code" in fails("import", tmp_path / "no.pt", tmp_path / "made")
    torch.save({"net": ckpt.weights(path), "opt": plain}, tmp_path / "file.pt")
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n")
    keys = ("--model-key", "net", "--optimizer-key", "opt")
    assert "cannot be told" in fails("import", tmp_path / "file.pt", tmp_path / "made", *keys)
    nowhere = fails("import", tmp_path / "file.pt", tmp_path / "made", "--names", "nowhere")
    assert nowhere == "error: nowhere: No such file or directory"
    succeeds(
        "import", tmp_path / "file.pt", tmp_path / "made", *keys, "--names", tmp_path / "names.txt"
    )
    assert difference(ckpt.state_dict(tmp_path / "made")["state"], plain["state"]) is None
    assert ckpt.summary(tmp_path / "made")["optimizer"]["without_state"] == ["1.bias"]


def test_what_is_left_out_of_an_import_is_said(path: Path, tmp_path: Path) -> None:
    torch.save({"model": ckpt.weights(path), "odd": {1, 2}, "epoch": 3}, tmp_path / "file.pt")
    result = shardstep("import", tmp_path / "file.pt", tmp_path / "made")
    assert result.exit_code == 0
    assert "note: " in result.stderr
    assert "'odd' is left out" in result.stderr
    assert ckpt.load(tmp_path / "made").extra == {"epoch": 3}


def test_an_optimizer_is_recognised_under_any_key_if_it_is_the_only_one(
    path: Path, tmp_path: Path
) -> None:
    state, model, file = ckpt.state_dict(path), ckpt.weights(path), tmp_path / "file.pt"
    torch.save({"model": model, "opt": state, "epoch": 3}, file)
    said = succeeds("import", file, tmp_path / "one")
    assert said.strip() == f"wrote {tmp_path / 'one'}: model, optimizer, extra ('epoch')"
    assert difference(ckpt.state_dict(tmp_path / "one")["state"], state["state"]) is None
    torch.save({"model": model, "opt_g": state, "opt_d": state}, file)
    said = succeeds("import", file, tmp_path / "two")
    assert said.strip() == f"wrote {tmp_path / 'two'}: model, extra ('opt_g', 'opt_d')"


def test_stages_are_bars_in_a_terminal() -> None:
    text = io.StringIO()
    with byte_progress(Console(file=text, force_terminal=True, width=100), "reading") as stages:
        advance = stages("checking", 2000)
        advance(1500)
        advance(500)
        stages("writing", 0)
    for shown in ("checking", "━", "2.0/2.0 kB", "writing"):
        assert shown in text.getvalue()


def test_long_stages_are_lines_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    with byte_progress(Console(file=text), "reading") as stages:
        stages("checking", 2000)(1500)
    assert text.getvalue() == "", "short work says nothing"
    monkeypatch.setattr("shardstep.cli.reporting.SECONDS_BETWEEN_LINES", 0.01)

    def until(shown: str) -> None:
        while shown not in text.getvalue():
            time.sleep(0.01)

    with byte_progress(Console(file=text), "reading") as stages:
        until("reading 0:00:0")
        advance = stages("checking", 2000)
        advance(1500)
        until("checking 1.5/2.0 kB")
        advance(500)
        stages("writing", 1000)
        until("writing 0.0/1.0 kB 0:00:0")
    assert "2.0/2.0" not in text.getvalue(), "what is done says nothing"


# ------------------------------------------------------------------------- wrong paths and classes


def test_a_folder_of_checkpoints_is_explained(path: Path) -> None:
    save(path.parent / "step-2")
    found = fails("verify", path.parent)
    assert found.endswith("is a folder of checkpoints; name one of them: step-1, step-2")


def test_our_own_checkpoint_is_not_imported(path: Path) -> None:
    out = path.parent / "out"
    assert "is a shardstep checkpoint already; load it as it is" in fails("import", path, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("SGD", "it has 'exp_avg', 'exp_avg_sq', 'step', but SGD keeps nothing"),
        ("no.such.Lion", "'no.such.Lion' cannot be imported (No module named 'no')"),
    ],
)
def test_a_wrong_class_is_noticed_on_import(path: Path, name: str, message: str) -> None:
    file, out = path.parent / "file.pt", path.parent / "out"
    succeeds("export", path, file)
    assert message in fails("import", file, out, "--optimizer-class", name)
    succeeds("import", file, out, "--optimizer-class", "torch.optim.AdamW")
    assert ckpt.summary(out)["optimizer"]["class"] == "torch.optim.adamw.AdamW"
