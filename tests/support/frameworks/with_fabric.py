"""A training loop with Lightning Fabric."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.nn import functional as F
from torch.utils.data import DataLoader

from frameworks.cells import Trial, lightning_devices
from frameworks.parts import BATCH, Net, data, optimizer_for
from shardstep.integrations.lightning import ShardstepFabricStrategy


def run(trial: Trial) -> dict[str, Any]:
    fabric = Fabric(
        **lightning_devices(),
        strategy=ShardstepFabricStrategy() if trial.kind == "module" else DDPStrategy(),
        precision="bf16-mixed" if trial.bf16 else "32-true",
    )
    fabric.launch()
    net = Net()
    model = fabric.setup_module(net)
    if fabric.device.type == "cuda":
        # DDP broadcasts initial values on a stream of Fabric's, which nothing waits for: they could
        # arrive after those that are loaded.
        torch.cuda.synchronize()
    opt = fabric.setup_optimizers(optimizer_for(trial.kind, net))
    loader = fabric.setup_dataloaders(
        DataLoader(data(4, dist.get_world_size(), trial.accumulate), batch_size=BATCH)
    )
    state = {"model": model, "optimizer": opt}
    start, losses, norms, saved = 0, [], [], {}
    if trial.resume is not None:
        fabric.load(trial.resume / "state.ckpt", state)
        start = 2
    batches = itertools.islice(enumerate(loader, 1), start * trial.accumulate, None)
    for number, (inputs, labels) in batches:
        last = number % trial.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last):
            loss = F.cross_entropy(model(inputs), labels)
            fabric.backward(loss / trial.accumulate)
        losses.append(loss.detach())
        if last:
            if trial.clip:
                norms.append(fabric.clip_gradients(model, opt, max_norm=trial.clip))
            opt.step()
            opt.zero_grad()
        if number == 2 * trial.accumulate and start == 0:
            fabric.save(trial.folder / "state.ckpt", state)
            fabric.barrier()
            loaded = torch.load(trial.folder / "state.ckpt", weights_only=True)
            saved = {"model": loaded["model"], "optimizer": loaded["optimizer"]["state"]}
    model.eval()
    with torch.no_grad():
        scores = torch.stack([F.cross_entropy(model(x), labels) for x, labels in loader])
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    return {
        "weights": weights,
        "losses": losses,
        "norms": norms,
        "evaluated": scores,
        "saved": saved,
    }
