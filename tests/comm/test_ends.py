"""A process may end at any time: without a crash of its own, and the other ranks learn of it.

Each test runs two programs, since a rank of `run_ranks` leaves without ending the interpreter.
"""

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

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import Comm, connect

pytestmark = pytest.mark.slow

SECONDS = 6.0


def programs(act: str, folder: Path) -> list[tuple[int, str, str]]:
    """Run `act` on two ranks. Return the exit code, the output and the errors of each."""
    store = str(folder / f"{act} {time.monotonic()}")
    command = [sys.executable, __file__, act, store]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(2)]
    found = [rank.communicate(timeout=60) for rank in ranks]
    return [(rank.returncode, *each) for rank, each in zip(ranks, found, strict=True)]


# ---------------------------------------------------------- at once after the last collective


def compare_notes(comm: Comm) -> None:
    """Compare notes and leave, with threads of Gloo that run only when this one is idle."""
    comm.all_gather_bytes(b"everybody is here")
    one_cpu = {min(os.sched_getaffinity(0))}
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), one_cpu)
        if "gloo" in (task / "comm").read_text():
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
    comm.all_gather_bytes(b"the last note")
    time.sleep = lambda seconds: None  # at exit


def reduce_a_loss(comm: Comm) -> None:
    """Use a collective of torch's own and leave."""
    dist.all_reduce(torch.ones(1))
    sleep = time.sleep

    def slept(seconds: float) -> None:
        print(f"sleeps for {seconds}")
        sleep(10 * seconds)  # other tests may have the cores

    time.sleep = slept  # at exit


def leave_gathers_in_flight(comm: Comm) -> None:
    model = torch.nn.Linear(512, 256)
    opt = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, module=model, layout="whole", lr=0.1
    )
    model(torch.ones(2, 512)).sum().backward()
    opt.clip_grad_norm_(1e9)
    (bucket,) = opt.plan.training_buckets
    if bucket.segment(comm.group_rank).numel > bucket.numel // 2:
        time.sleep(0.5)  # the other has come to its end
    opt.step()


@pytest.mark.parametrize(
    ("act", "said"),
    [
        # A thread of Gloo takes Python's lock to let go of a tensor. Python ends the thread if it
        # is shutting down by then, and C++ the whole process. It happened to 5 of 6.
        *[("compare_notes", "")] * 2,
        ("reduce_a_loss", "sleeps for 0.1\n"),
        ("leave_gathers_in_flight", ""),
    ],
)
def test_gloo_s_threads_hold_no_tensors_when_the_process_ends(
    act: str, said: str, tmp_path: Path
) -> None:
    found = programs(act, tmp_path)
    assert [code for code, *_ in found] == [0, 0], found
    if act != "leave_gathers_in_flight":
        assert [out for _, out, _ in found] == [said, said]


# ---------------------------------------- before the others, though its connections outlast it


class Slow:
    """Is taken down slowly, as a large program is."""

    def __del__(self, sleep: object = time.sleep) -> None:
        assert callable(sleep)
        sleep(SECONDS)


def wait_for_the_other(comm: Comm) -> None:
    comm = comm.new_connection()
    comm.all_gather_bytes(b"connected")
    if comm.group_rank == 0:
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=r"a peer has ended or failed: .*see Join"):
            comm.all_gather(torch.zeros(2), [0, 1, 2]).wait()
        print(time.monotonic() - begin)


def kill(comm: Comm) -> None:
    wait_for_the_other(comm)
    if comm.group_rank == 1:
        # A worker of a loader, which lives on for a while.
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(SECONDS,)).start()
        os.kill(os.getpid(), signal.SIGKILL)


def fail(comm: Comm) -> None:
    wait_for_the_other(comm)
    if comm.group_rank == 1:
        vars(torch)["slow"] = Slow()
        raise RuntimeError("injected")


@pytest.mark.parametrize(("act", "code"), [("fail", 1), ("kill", -signal.SIGKILL)])
def test_a_rank_that_has_ended_is_noticed_at_once(act: str, code: int, tmp_path: Path) -> None:
    (_, waited, _), (other, *_) = programs(act, tmp_path)
    assert float(waited) < SECONDS / 2
    assert other == code


if __name__ == "__main__":
    dist.init_process_group(
        "gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[3]), world_size=2
    )
    globals()[sys.argv[1]](connect(None))
