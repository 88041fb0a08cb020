"""Training with the Trainer of Hugging Face Transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from frameworks.cells import Trial, on_cpu
from shardstep import ZeroRedundancyOptimizer
from shardstep.integrations.trainer import ConsolidateOnSave, ShardstepTrainerMixin

CONFIG = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)


class ShardedTrainer(ShardstepTrainerMixin, Trainer):
    pass


class Text(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, 64, (count, 16), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def run(trial: Trial) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    args = TrainingArguments(
        output_dir=str(trial.folder),
        max_steps=4,
        save_steps=2,
        eval_steps=2,
        eval_strategy="steps",
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        gradient_accumulation_steps=trial.accumulate,
        max_grad_norm=trial.clip,
        bf16=trial.bf16,
        use_cpu=on_cpu(),
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    model = GPT2LMHeadModel(CONFIG)
    more: dict[str, Any] = {}
    if trial.kind == "drop-in":
        options = {"optimizer_class": torch.optim.AdamW, "lr": args.learning_rate, "fused": True}
        more = {
            "optimizer_cls_and_kwargs": (ZeroRedundancyOptimizer, options),
            "callbacks": [ConsolidateOnSave()],
        }
    kind = ShardedTrainer if trial.kind == "module" else Trainer
    count = 2 * 4 * dist.get_world_size() * trial.accumulate
    trainer = kind(model, args, train_dataset=Text(count), eval_dataset=Text(8), **more)
    start = None if trial.resume is None else str(trial.resume / "checkpoint-2")
    trainer.train(resume_from_checkpoint=start)
    logs = trainer.state.log_history[:-1]
    losses = [[entry.get(key) for key in ("loss", "eval_loss")] for entry in logs]
    norms = [entry["grad_norm"] for entry in logs if "grad_norm" in entry]
    dist.barrier()
    saved = {}
    if trial.resume is None:
        folder = trial.folder / "checkpoint-2"
        state = torch.load(folder / "optimizer.pt", weights_only=True)
        saved = {
            "model": load_file(folder / "model.safetensors"),
            "optimizer": state["state"],
            "lr": [group["lr"] for group in state["param_groups"]],
        }
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluated = trainer.evaluate()["eval_loss"]
    return {
        "weights": weights,
        "losses": losses,
        "norms": norms if trial.clip else [],
        "evaluated": evaluated,
        "saved": saved,
    }
