"""Train bf16 parameters with fp32 masters, over several backward passes per step.

    torchrun --standalone --nproc-per-node=2 examples/bf16_accumulation.py

Each rank keeps 2 bytes per parameter, and its share of masters, moments and gradients in fp32.
"""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardstep import MixedPrecision, ZeroRedundancyOptimizer

ACCUMULATE = 4
STEPS = 60


def main() -> None:
    """Train, and compare a parameter with its master."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 10)).to(device).bfloat16()
    opt = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        module=model,
        # bf16 parameters get masters anyway. This also sums gradients in fp32, for twice the bytes.
        precision=MixedPrecision(reduce_dtype=torch.float32),
        lr=3e-3,
    )

    torch.manual_seed(opt.rank)  # a different batch on each rank
    for step in range(STEPS):
        for number in range(ACCUMULATE):
            inputs = torch.randn(32, 32, device=device)
            labels = inputs[:, :10].argmax(dim=1)
            last = number == ACCUMULATE - 1
            # Inside no_sync() gradients add up on this rank. The last pass sends their sum.
            with contextlib.nullcontext() if last else opt.no_sync():
                loss = F.cross_entropy(model(inputs.bfloat16()).float(), labels) / ACCUMULATE
                loss.backward()
        norm = opt.clip_grad_norm_(1.0)  # equal on all ranks
        opt.step()
        opt.zero_grad()
        if opt.rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item() * ACCUMULATE:.3f}, norm {norm.item():.2f}")

    weight = model.get_parameter("0.weight")
    master = opt.full_master(weight)  # on every rank
    assert master is not None
    assert torch.equal(master.bfloat16(), weight), "the parameter is its rounded master"
    if opt.rank == 0:
        print(opt.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
