"""Ranks are killed one after the other; the others are told, and go on without them. Also in several NVLink domains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import deaths
import pytest
import torch
import torch.distributed as dist
from cases import fresh_seed

from ep_ops import backends
from ep_ops.symmetric import nvshmem

RANKS = int(os.environ.get("EP_OPS_DEATHS", 8))
LEFT = int(os.environ.get("EP_OPS_DEATHS_LEFT", 2))
"""Processes that are started, and that are left; more of them need more host memory, and more deaths more time."""
OVER = ((RANKS, "nvlink"), (2, "nvlink"), (1, "nvlink"), (2, "nvshmem"), (1, "nvshmem"))
"""Ranks of each NVLink domain, and the wire between them."""


@pytest.mark.skipif("RANK" in os.environ, reason="starts its processes itself: torchrun would end the survivors")
@pytest.mark.parametrize(("size", "wire"), OVER)
def test_ranks_die_one_after_the_other(size: int, wire: str, tmp_path: Path) -> None:
    if wire == "nvshmem" and (why := nvshmem.problem() or backends.no_device_library()):
        pytest.skip(f"needs NVSHMEM: {why}")
    here = Path(__file__).parent
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        **os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "GLOO_SOCKET_IFNAME": "lo",
        "NVSHMEM_DISABLE_NVLS": "1", "EP_OPS_WIRE": wire,
        "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here.parent), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    seed = fresh_seed()
    started = []
    for rank in range(RANKS):
        numbers = map(str, (rank, RANKS, LEFT, store.port, seed, size))
        command = [sys.executable, str(here / "deaths.py"), *numbers]
        log = open(tmp_path / f"log {rank}", "wb")
        started.append(subprocess.Popen([*command, str(tmp_path / f"{rank}.json")], env=env, stdout=log, stderr=log))
    try:
        # Kernels over NVSHMEM take several times as long to compile, anew for each number of ranks that are left.
        limit = (60 if wire == "nvlink" else 240) + 12 * RANKS
        ended = [process.wait(timeout=limit) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = {rank: (tmp_path / f"log {rank}").read_text(errors="replace")[-3000:] for rank in range(RANKS)}
    paths = [tmp_path / f"{rank}.json" for rank in range(RANKS)]
    told = [json.loads(path.read_text()) if path.exists() else [] for path in paths]
    killed = [rank for rank, code in enumerate(ended) if code == -9]
    done = [rank for rank, code in enumerate(ended) if code == 0 and logs[rank].endswith("done\n")]
    right = all(code in (0, -9) for code in ended) and len(killed) == max(map(len, told)) > 0
    right = right and len(done) >= (1 if wire == "nvshmem" else LEFT)
    assert right, f"{ended}\n" + "\n".join(
        f"--- rank {rank}\n{logs[rank]}" for rank, code in enumerate(ended) if code not in (0, -9)
    )
    for one in (one for by_rank in told for one in by_rank):
        assert one["named"], one
        assert one["seconds"] < 2 * deaths.TIMEOUT + RANKS / torch.cuda.device_count(), one
