"""Train with Hugging Face's Trainer: a mixin before `Trainer` replaces DDP with ZeRO-2.

    torchrun --standalone --nproc-per-node=2 examples/with_trainer.py

Files are the Trainer's own: a run without sharding resumes from them, and the other way round.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from shardstep.integrations.trainer import ShardstepTrainerMixin


class ShardedTrainer(ShardstepTrainerMixin, Trainer):
    """A Trainer whose optimizer is sharded."""


def main() -> None:
    """Train up to step 20, then resume from the checkpoint of step 10 with a new Trainer."""
    torch.manual_seed(0)
    starts = torch.randint(64, (256, 1))
    rows = (starts + torch.arange(16)) % 64  # count upwards
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(
        output_dir="runs/trainer",
        use_cpu=not torch.cuda.is_available(),  # or each rank would train alone
        max_steps=20,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        save_steps=10,
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
    )

    def trainer() -> ShardedTrainer:
        config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
        return ShardedTrainer(GPT2LMHeadModel(config), args, train_dataset=data)

    first = trainer().train()
    again = trainer().train(resume_from_checkpoint="runs/trainer/checkpoint-10")
    assert first.global_step == again.global_step == 20
    if torch.distributed.is_initialized():  # Trainer leaves this to the program
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
