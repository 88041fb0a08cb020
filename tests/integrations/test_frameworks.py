"""The frameworks' own calls give DDP's numbers and DDP's files, with the installed packages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks.cells import COLUMNS, KINDS, LAST_BIT
from frameworks.table import FRAMEWORKS, rows_of
from problems import assert_same
from ranks import raises_on_every_rank, run_ranks

from shardstep import ZeroRedundancyOptimizer


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_cell_is_equal(name: str, tmp_path: Path) -> None:
    pytest.importorskip(FRAMEWORKS[name])
    table = rows_of(name, tmp_path)
    # Gradients that are sharded are summed in another order, so a norm may differ in its last bit.
    if table["module"]["clip"] == LAST_BIT:
        table["module"]["clip"] = "equal"
    assert table == dict.fromkeys(KINDS, dict.fromkeys(COLUMNS, "equal"))


def _frameworks() -> set[str]:
    assert "shardstep" in sys.modules
    return sys.modules.keys() & {"accelerate", "lightning", "peft", "transformers"}


def test_importing_the_package_imports_no_framework() -> None:
    assert run_ranks(_frameworks, 1, fresh=True) == [set()]


def _known_to_accelerate_as_one_rank() -> None:
    from accelerate import Accelerator

    from shardstep.integrations.accelerate import prepare

    model = torch.nn.Linear(4, 4)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, module=model, lr=0.1)
    prepare(Accelerator(), model, opt)


def test_an_accelerator_that_knows_of_one_rank_only_is_refused() -> None:
    # Without cpu=True it gives every rank all batches, and lets every rank write.
    pytest.importorskip("accelerate")
    match = "sees 1 process, but"
    raises_on_every_rank(_known_to_accelerate_as_one_rank, 2, ValueError, match=match)


def _fit(sharded: bool, way: str, folder: Path) -> list[torch.Tensor]:
    import lightning

    from shardstep.integrations.lightning import ShardstepStrategy

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            opt: Any = torch.optim.AdamW(self.parameters(), lr=0.01)
            if sharded:
                kind = torch.optim.AdamW
                opt = ZeroRedundancyOptimizer(self.parameters(), kind, module=self, lr=0.01)
            return [opt], [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)]

    class Freeze(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if way == "freeze for one batch":
                trainer.optimizers[0].zero_grad()
            module.net[0].requires_grad_(number != 2)

    def new_trainer() -> Any:
        plain = "ddp_find_unused_parameters_true" if "freeze" in way else "ddp"
        return lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=ShardstepStrategy() if sharded else plain,
            max_epochs=1,
            callbacks=[Freeze()] if "freeze" in way else [],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=folder,
        )

    model, trainer = Model(), new_trainer()
    batches = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=4))
        if way == "with another trainer":
            if sharded:
                trainer.optimizers[0].detach()
            first, trainer = trainer, new_trainer()
            assert first.optimizers  # it is still there
    return [param.detach() for param in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["twice", "with another trainer", "freeze for one batch"])
def test_lightning_s_trainer_fits_as_with_ddp(way: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    expected, got = (run_ranks(_fit, 2, sharded, way, tmp_path)[0] for sharded in (False, True))
    assert_same(expected, got)


@pytest.mark.slow
def test_a_callback_that_unfreezes_must_clear_gradients_first(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    match = r"lose gradients.*zero_grad\(set_to_none=True\)"
    way = "freeze for one batch without clearing"
    raises_on_every_rank(_fit, 2, RuntimeError, True, way, tmp_path, match=match)
