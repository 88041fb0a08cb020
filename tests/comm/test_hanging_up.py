"""The other ranks learn at once that one has ended, though its connections may outlast it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardstep.comm.group import connect

SECONDS = 6.0


class Slow:
    """Is taken down slowly, as a large program is."""

    def __del__(self, sleep: object = time.sleep) -> None:
        assert callable(sleep)
        sleep(SECONDS)


def main(rank: int, store: str, how: str) -> None:
    """Wait on rank 0 for rank 1, which ends."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    comm = connect(None).new_connection()
    comm.all_gather_bytes(b"connected")
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="a peer has ended or failed"):
            comm.all_gather(torch.zeros(2), [0, 1, 2]).wait()
        print(time.monotonic() - begin)
    elif how == "kill":
        # A worker of a loader, which lives on for a while.
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(SECONDS,)).start()
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        vars(torch)["slow"] = Slow()
        raise RuntimeError("injected")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_has_ended_is_noticed_at_once(how: str, tmp_path: Path) -> None:
    command = [sys.executable, __file__]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    waited, _ = ranks[0].communicate(timeout=60)
    assert float(waited) < SECONDS / 2
    assert ranks[1].wait(timeout=60) == (-signal.SIGKILL if how == "kill" else 1)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
