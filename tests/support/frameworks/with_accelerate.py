"""A training loop with Hugging Face Accelerate."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils.data import DataLoader

from frameworks.cells import Trial, on_cpu
from frameworks.parts import BATCH, Net, data, optimizer_for
from shardstep.integrations.accelerate import prepare


def run(trial: Trial) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=on_cpu(),
        mixed_precision="bf16" if trial.bf16 else "no",
        gradient_accumulation_steps=trial.accumulate,
    )
    model = Net()
    opt = optimizer_for(trial.kind, model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    loader = DataLoader(data(4, dist.get_world_size(), trial.accumulate), batch_size=BATCH)
    objects = (model, opt, loader, schedule)
    if trial.kind == "plain":
        model, opt, loader, schedule = accelerator.prepare(*objects)
    else:
        model, opt, loader, schedule = prepare(accelerator, *objects)
    start, losses, norms, saved = 0, [], [], {}
    if trial.resume is not None:
        accelerator.load_state(str(trial.resume / "state"))
        start = 2
    batches = itertools.islice(enumerate(loader, 1), start * trial.accumulate, None)
    for number, (inputs, labels) in batches:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if trial.clip and accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), trial.clip))
            opt.step()
            schedule.step()
            opt.zero_grad()
        losses.append(loss.detach())
        if number == 2 * trial.accumulate and start == 0:
            accelerator.save_state(str(trial.folder / "state"))
            accelerator.save_model(model, str(trial.folder / "model"))
            accelerator.wait_for_everyone()
            state = torch.load(trial.folder / "state" / "optimizer.bin", weights_only=True)
            saved = {
                "model": load_file(trial.folder / "model" / "model.safetensors"),
                "resumable": load_file(trial.folder / "state" / "model.safetensors"),
                "optimizer": state["state"],
                "lr": [group["lr"] for group in state["param_groups"]],
            }
    model.eval()
    with torch.no_grad():
        scores = [F.cross_entropy(model(inputs), labels) for inputs, labels in loader]
    evaluated = accelerator.gather_for_metrics(torch.stack(scores))
    weights = accelerator.get_state_dict(model)
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    return {
        "weights": weights,
        "losses": losses,
        "norms": norms,
        "evaluated": evaluated,
        "saved": saved,
    }
