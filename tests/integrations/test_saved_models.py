"""Other packages write every weight of a model whose parameters live in buckets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from scenarios import sharded
from torch import Tensor, nn

Model = Callable[[], nn.Module]


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def _tied() -> nn.Module:
    model: Any = _mlp()
    model[2].weight = model[0].weight
    return model


def _with_safetensors(model: nn.Module, folder: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file, save_model

    save_model(model, f"{folder}/model.safetensors")
    return load_file(f"{folder}/model.safetensors")


def _with_accelerate(model: nn.Module, folder: str) -> dict[str, Tensor]:
    from accelerate import Accelerator
    from safetensors.torch import load_file

    Accelerator(cpu=True).save_model(model, folder)
    return load_file(f"{folder}/model.safetensors")


def _save(make: Model, mode: str, folder: str, how: str) -> tuple[set[str], set[str], bool]:
    """Return the names in the file, those of the model, and whether the tensors are equal."""
    model = make()
    setup = sharded(mode, model)
    setup.model(torch.ones(2, 8)).square().mean().backward()
    setup.opt.step()
    own = folder + f"/{torch.distributed.get_rank()}"
    Path(own).mkdir()
    read = {"safetensors": _with_safetensors, "accelerate": _with_accelerate}[how](model, own)
    expected = {name: param.detach() for name, param in model.named_parameters()}
    same = all(torch.equal(expected[name], tensor) for name, tensor in read.items())
    return set(read), set(expected), same


@pytest.mark.parametrize("mode", ["module", "drop-in views", "register"])
@pytest.mark.parametrize("how", ["safetensors", "accelerate"])
def test_every_weight_is_written_right_after_a_step(mode: str, how: str, tmp_path: Path) -> None:
    pytest.importorskip(how)
    for make in (_mlp, _tied):
        folder = tmp_path / make.__name__
        folder.mkdir()
        for written, expected, same in run_ranks(_save, 2, make, mode, str(folder), how):
            assert (written, same) == (expected, True), make.__name__
