"""Train a model with ZeRO-2: the script to copy. Replace the model and the data with yours.

    torchrun --standalone --nproc-per-node=2 examples/train.py

It uses one GPU per rank over NCCL, or the CPU over Gloo. Without torchrun it runs as one rank.
If it is interrupted, run it again: it resumes after the last saved epoch, on any number of ranks.
With torchrun's --max-restarts=3 it also resumes by itself after a rank has failed.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardstep import ZeroRedundancyOptimizer, checkpoint, elastic


def make_model() -> nn.Module:
    """Return the model to train."""
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))


def make_data() -> TensorDataset:
    """Return points, labelled with the largest of their first ten coordinates."""
    inputs = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :10].argmax(dim=1))


def main() -> None:
    """Train, and save a checkpoint after every epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", default="runs/train", help="on a disk that all ranks share")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # started by torchrun
        elastic.init_process_group("nccl" if device.type == "cuda" else "gloo")

    model = make_model().to(device)  # rank 0's weights go to all ranks: no seed is needed
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, module=model, lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs)
    data = make_data()
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(data, opt.world_size, opt.rank)
    loader = DataLoader(data, batch_size=64 // opt.world_size, sampler=sampler)

    first_epoch = 0
    if loaded := checkpoint.resume(args.folder, opt, model):  # the newest intact one, if any
        schedule.load_state_dict(loaded.extra["schedule"])
        first_epoch = loaded.extra["epoch"] + 1
        if opt.rank == 0:
            print(f"resumed {loaded.path}: {first_epoch} of {args.epochs} epochs done", flush=True)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs.to(device)), labels.to(device))
            loss.backward()
            opt.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
        schedule.step()
        extra = {"epoch": epoch, "schedule": schedule.state_dict()}
        checkpoint.save(f"{args.folder}/epoch-{epoch}", opt, model, extra, keep_last=2)
        if opt.rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f} (ranks: {opt.world_size})", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
