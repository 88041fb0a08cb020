"""The command `shardstep plan`: models from three sources, table, JSON, picture, errors."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardstep.checkpoint import safetensors
from shardstep.cli.app import app

FORM = ("--ranks", "1,8", "--json")


def run(*args: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, args)])


def planned(*args: object) -> Any:
    result = run(*args, *FORM)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def tiny() -> nn.Module:
    assert torch.get_default_device().type == "meta"
    layers = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
    layers[1].bias.requires_grad_(False)
    return layers


def test_a_model_comes_from_a_factory_or_from_weights(tmp_path: Path) -> None:
    made = planned("--import", "test_plan_cli:tiny")
    assert made["num_parameters"] == 64 * 512 * 2 + 512 + 64
    assert made["plans"][0]["ddp"]["state"] == 2 * 4 * (64 * 512 * 2 + 512) + 3 * 4
    file = tmp_path / "model.safetensors"
    safetensors.write(file, {"w": torch.zeros(64, 512), "n": torch.zeros(3, dtype=torch.int64)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": file.name, "n": file.name}}))
    for path in (file, tmp_path, index):
        assert planned("--safetensors", path)["num_parameters"] == 64 * 512


def odd() -> nn.Module:
    print("a factory may print")
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.complex64)])
    model.packed = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    model.tied = model[0].weight
    return model


@pytest.mark.parametrize("precision", ["own", "bf16"])
def test_only_real_floating_point_parameters_change_their_dtype(precision: str) -> None:
    result = run("--import", "test_plan_cli:odd", "--ranks", 2, "--json", "--precision", precision)
    made = json.loads(result.stdout)
    real = 4 if precision == "own" else 2
    assert made["num_parameters"] == 2 * (64 * 64 + 64) + 64 * 64
    assert made["parameter_bytes"] == (real + 8) * (64 * 64 + 64) + 64 * 64
    assert "a factory may print" in result.stderr


def test_a_model_without_parameters_that_train_needs_no_state() -> None:
    made = planned("--import", "test_plan_cli:frozen")
    assert made["precision"] == "nothing trains"
    assert made["plans"][1]["module"]["state"] == 0


def frozen() -> nn.Module:
    return nn.Linear(64, 64).requires_grad_(False)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_narrow_terminal_cuts_no_number(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stdout for a terminal
    shown = re.sub(r"\x1b\[[\d;]*m", "", run("--import", "test_plan_cli:zero", "--ranks", 2).stdout)
    assert "test_plan_cli:zero: 64 parameters" in shown, "not an emoji"
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= max(80, columns)


def zero() -> nn.Module:
    return nn.Linear(64, 1, bias=False)


def broken() -> nn.Module:
    raise KeyError("vocab")


@pytest.mark.parametrize(
    ("precision", "per_element"),
    [("fp32", 0), ("bf16", 4), ("bf16-only", 0), ("bf16-stochastic", 4)],
)
def test_precision_and_options_change_the_plan(precision: str, per_element: int) -> None:
    args = ("--model", "resnet50", "--optimizer", "SGD", "--precision", precision)
    one = planned(*args, "--option", "momentum=0.9")["plans"][0]["ddp"]
    assert one["parameters"] == (4 if precision == "fp32" else 2) * 25_557_032
    assert one["masters"] == pytest.approx(per_element * 25_557_032, rel=0.001)
    assert one["state"] == (2 if precision == "bf16-only" else 4) * 25_557_032
    assert planned(*args)["plans"][0]["ddp"]["state"] == 0


def test_default_buckets_are_those_of_the_backend() -> None:
    small = ("--model", "resnet50")
    over_nccl, over_gloo = planned(*small), planned(*small, "--backend", "gloo")
    assert (over_nccl["backend"], over_nccl["bucket_bytes"]) == ("nccl", 8 * 2**20)
    assert over_gloo["bucket_bytes"] == 4 * 25_557_032 // 16
    buffers = [each["plans"][1]["module"]["buffers"] for each in (over_nccl, over_gloo)]
    assert buffers[0] > buffers[1]
    own = planned(*small, "--bucket-bytes", "25MiB")
    assert own["plans"] == planned(*small, "--bucket-bytes", "25MiB", "--backend", "gloo")["plans"]
    assert "buckets of 8 MiB, over nccl" in run(*small).stdout


def test_the_table_compares_methods_and_the_picture_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    args = ("--model", "gpt2-124m", "--optimizer", "Muon+AdamW", "--ranks", "2,64")
    result = run(*args, "--memory", "1.5GB", "--picture", picture)
    assert result.exit_code == 0, result.output
    for text in ("DDP", "torch ZeRO", "FSDP2", "module=", "Muon needs 2-D", "none up to 16,384"):
        assert text in result.stdout
    assert picture.stat().st_size > 10_000


def test_two_classes_are_suggested_only_for_a_model_that_takes_them() -> None:
    result = run("--model", "resnet50", "--optimizer", "Muon")
    assert result.exit_code == 1
    assert "Muon+AdamW" not in result.stderr


def test_a_large_model_is_planned_in_five_seconds_and_long_times_are_in_seconds() -> None:
    start = time.process_time()
    result = run("--model", "llama3-70b", "--ranks", "16,64,512,4096")
    assert time.process_time() - start < 5
    assert "21.2 s" in result.stdout
    assert "0.3 ms" in run("--import", "test_plan_cli:medium", "--ranks", 8).stdout


def test_a_small_model_is_not_rounded_to_zero() -> None:
    shown = run("--import", "test_plan_cli:tiny", "--ranks", 2, "--memory", "2MB").stdout
    assert "a peak of at most 2.0 MB:" in shown
    assert re.search(r"[1-9]\.\d µs", shown)


def medium() -> nn.Module:
    return nn.Linear(1000, 500)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "expected exactly one of --model, --import"),
        (("--model", "gpt5"), "unknown model 'gpt5'"),
        (("--model", "gpt2-124m", "--ranks", "0"), "numbers from 1 to 16,384"),
        (("--model", "gpt2-124m", "--link", "fast"), "such as 100gbit"),
        (("--model", "gpt2-124m", "--memory", "80"), "with its unit, such as 80GB, not '80'"),
        (("--model", "gpt2-124m", "--optimizer", "Lion"), "no such class. Name any other class"),
        (("--model", "gpt2-124m", "--optimizer", "Adamw"), "no such class. Did you mean AdamW?"),
        (
            ("--model", "resnet50", "--optimizer", "torch.nn.Linear"),
            "expected a torch.optim.Optimizer, got <class 'torch.nn",
        ),
        (("--model", "gpt2-124m", "--optimizer", "Muon"), "try --optimizer Muon+AdamW"),
        (("--model", "resnet50", "--option", "lr=abc"), "--optimizer AdamW --option lr=abc: "),
        (("--model", "resnet50", "--option", "lr=abc"), "; read as text: lr"),
        (
            ("--model", "resnet50", "--optimizer", "Muon+AdamW"),
            "no matrix in a numbered block",
        ),
        (("--model", "gpt2-124m", "--option", "lr"), "expected name=value"),
        (("--import", "no.such:thing"), "No module named 'no'"),
        (
            ("--import", "test_plan_cli:broken"),
            "test_plan_cli:broken failed on the meta device (KeyError: 'vocab')",
        ),
        (("--import", "torch.nn:Linear"), "torch.nn:Linear failed on the meta device (TypeError"),
        (("--import", "torch.nn:Flatten"), "no floating-point parameters"),
        (("--safetensors", "nowhere"), "nowhere"),
        (("--model", "gpt2-124m", "--picture", "no/plan.png"), "cannot write no/plan.png"),
        (("--model", "gpt2-124m", "--picture", "plan.svg"), "expected a name that ends with .png"),
    ],
)
def test_a_bad_request_is_explained(args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit), "a traceback"
    assert message in " ".join(result.stderr.replace("│", " ").split())
