"""NVIDIA's Multi-Process Service (MPS): processes that share a GPU run at the same time, each on a part of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PROBE = "import torch; assert int(torch.ones(8, device='cuda').sum()) == 8"


class Mps:
    """A daemon of this process's own. `problem` says why there is none."""

    def __init__(self, folder: Path, gpu: str = "") -> None:
        """``gpu``: id of the only GPU that its processes may use; empty: those that are visible."""
        self.folder, self.gpu, self.problem = folder, gpu, ""
        if shutil.which(CONTROL) is None:
            self.problem = f"{CONTROL} is not installed"
            return
        for name in ("pipe", "log"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        started = subprocess.run([CONTROL, "-d"], env=os.environ | self.env(100), capture_output=True, text=True)
        if started.returncode != 0:
            self.problem = f"{CONTROL} -d: {(started.stderr or started.stdout).strip()}"
            return
        try:
            tried = subprocess.run(
                [sys.executable, "-c", PROBE], env=os.environ | self.env(50), capture_output=True, text=True, timeout=60
            )
            if tried.returncode != 0:
                self.problem = f"a process under MPS fails: {tried.stderr.strip()[-200:]}"
        except subprocess.TimeoutExpired:
            self.problem = "a process under MPS does not end"
        if self.problem:
            self.stop()

    def env(self, percentage: int, queues: int = 0) -> dict[str, str]:
        """The environment of a process that gets that share of the multiprocessors, and so many hardware queues (0: the
        driver's choice). Streams of a process that share a queue run one after the other. All processes take queues
        from one pool: on an H100 two processes get 32 each; of four, the last fail with `out of memory`."""
        return {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percentage),
            **({"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu else {}),
            **({"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)} if queues else {}),
        }

    def stop(self) -> None:
        subprocess.run([CONTROL], input="quit\n", env=os.environ | self.env(100), capture_output=True, text=True)
