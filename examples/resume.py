"""Save in the background, and resume on a different number of ranks.

    torchrun --standalone --nproc-per-node=2 examples/resume.py --until 40
    torchrun --standalone --nproc-per-node=3 examples/resume.py --until 80

Every step uses the same 96 rows, divided among the ranks, so both runs train on the same data.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardstep import ZeroRedundancyOptimizer, checkpoint


def main() -> None:
    """Train from the newest checkpoint up to step `--until`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", type=int, default=40)
    parser.add_argument("--folder", default="runs/resume", help="on a disk that all ranks share")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, module=model, lr=3e-3)

    step = 0
    if loaded := checkpoint.resume(args.folder, opt, model):  # each rank reads its new share
        step = loaded.extra["step"]
        if opt.rank == 0:
            print(f"resumed {loaded.path} on {opt.world_size} ranks", flush=True)

    saving = None
    while step < args.until:
        rows = torch.randn(96, 32, generator=torch.Generator().manual_seed(step))
        inputs = rows.chunk(opt.world_size)[opt.rank].to(device)
        loss = F.cross_entropy(model(inputs), inputs[:, :10].argmax(dim=1))
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        if step % 20 == 0:
            path = f"{args.folder}/step-{step}"
            # Returns when the state is copied. A thread writes it while training continues.
            saving = checkpoint.async_save(path, opt, model, {"step": step}, keep_last=2)
            if opt.rank == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if saving is not None:
        saving.wait()  # before the process group is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
