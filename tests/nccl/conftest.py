"""Records a run: `NCCL_RESULTS=FILE` has the process that collects the reports write them there."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_gpu import MPS


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get("NCCL_RESULTS")
    if path and not hasattr(config, "workerinput"):  # under xdist, not in its workers
        config.pluginmanager.register(_Record(Path(path)), "nccl-record")


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", {})
    output["without_mps"] = MPS.refusal


class _Record:
    """The outcome of every test, its reason if it was skipped, and the machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.monotonic()
        self._outcomes: dict[str, str] = {}
        self._failures: dict[str, str] = {}
        self._skipped: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._without_mps: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed or (report.when == "call" and report.nodeid not in self._outcomes):
            self._outcomes[report.nodeid] = report.outcome
        if report.failed:
            self._failures[report.nodeid] = report.longreprtext[-2000:]
        if report.skipped:
            self._outcomes[report.nodeid] = "skipped"
            self._skipped[str(report.longrepr[2]) if report.longrepr else ""] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._without_mps.add(getattr(node, "workeroutput", {}).get("without_mps", "ended early"))

    def pytest_sessionfinish(self) -> None:
        counts = Counter(self._outcomes.values())
        found = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self._began, 1),
            **{each: counts[each] for each in ("passed", "failed", "skipped")},
            "failures": self._failures,
            "reasons for skipping": dict(self._skipped),
            "slowest": {name: round(took, 1) for name, took in self._seconds.most_common(10)},
            "processes without MPS, because": sorted(self._without_mps - {""}),
            "machine": _machine(),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=2) + "\n")


def _machine() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"torch": torch.__version__}
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "cores": os.cpu_count(),
    }
