"""One GPU for all ranks of a test: the settings of NCCL, and CUDA's multi-process service (MPS).

Without MPS, processes take turns on a GPU, and a kernel of NCCL spends its turn waiting for a peer
that has none. So each pytest process has an MPS daemon. A rank that dies may take the MPS server
with it, hence one daemon for each, and a new one after a failure.

Ranks look for the daemon in one folder. If it is not there, they run without MPS.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"


class Service:
    """An MPS daemon with its own folder.

    Attributes:
        environment: how processes find it.
        running: whether ranks that start now are its clients.
        refusal: why there is none, or an empty string.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
            # MPS gives a process two queues. Streams that share one run in turn, and a missing wait
            # between them does not show.
            "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        }
        self.running = False
        self.refusal = ""
        if os.environ.get("SHARDSTEP_NO_MPS"):
            self.refusal = "SHARDSTEP_NO_MPS is set"
        elif "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
            self.refusal = "CUDA_MPS_PIPE_DIRECTORY is set, so ranks use what is there"
        elif not shutil.which(CONTROL):
            self.refusal = f"there is no {CONTROL}"

    def start(self) -> None:
        """Start the daemon, unless it runs or was refused."""
        if self.running or self.refusal:
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            for name in ("pipe", "log"):
                (self._folder / name).mkdir(mode=0o700, parents=True)
            self._control("-d", seconds=20)
        except (OSError, subprocess.SubprocessError) as error:
            self.refuse(f"{CONTROL} -d failed: {error}")
        else:
            self.running = True

    def refuse(self, reason: str) -> None:
        """End the daemon, and start no other."""
        self.stop()
        self.refusal = reason

    def stop(self) -> None:
        """End the daemon and its server, by force if need be. No rank may be running."""
        if not self._folder.exists():
            return
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._control(said="quit\n", seconds=10)
        for pid in self._left_after(seconds=1.5):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._left_after(seconds=5)
        shutil.rmtree(self._folder, ignore_errors=True)
        self.running = False

    def _left_after(self, seconds: float) -> list[int]:
        """Return the processes that have not ended within so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def processes(self) -> list[int]:
        """Return the daemon and its server: those that have this folder in their environment."""
        mark = f"CUDA_MPS_PIPE_DIRECTORY={self._folder / 'pipe'}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = (entry / "comm").read_text().startswith(CONTROL[:15])
                if ours and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def _control(self, *args: str, said: str = "", seconds: float) -> None:
        # A daemon would keep a pipe open, so its output goes to a file.
        with open(self._folder / "output", "a") as output:
            subprocess.run(
                [CONTROL, *args],
                input=said,
                text=True,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment},
                timeout=seconds,
                check=True,
                start_new_session=True,
            )


# Short, since a Unix socket's path has at most 107 bytes.
MPS = Service(Path(f"/tmp/mps-{os.getpid()}"))
atexit.register(MPS.stop)

ENVIRONMENT = {
    **MPS.environment,
    # Each process claims to be another host (see `ranks.py`), so NCCL talks over sockets.
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_RAS_ENABLE": "0",
    # For the same bits every time.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""For every rank, from its start."""
