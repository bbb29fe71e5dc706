"""Ranks are killed one after the other; the others are told, and go on without them."""

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

RANKS = int(os.environ.get("EP_OPS_DEATHS", 8))
LEFT = int(os.environ.get("EP_OPS_DEATHS_LEFT", 2))
"""Processes that are started, and that are left; more of them need more host memory, and more deaths more time."""


@pytest.mark.skipif("RANK" in os.environ, reason="starts its processes itself: torchrun would end the survivors")
def test_ranks_die_one_after_the_other(tmp_path: Path) -> None:
    here = Path(__file__).parent
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {
        **os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here.parent), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    seed = fresh_seed()
    started = []
    for rank in range(RANKS):
        numbers = map(str, (rank, RANKS, LEFT, store.port, seed))
        command = [sys.executable, str(here / "deaths.py"), *numbers]
        log = open(tmp_path / f"log {rank}", "wb")
        started.append(subprocess.Popen([*command, str(tmp_path / f"{rank}.json")], env=env, stdout=log, stderr=log))
    try:
        ended = [process.wait(timeout=60 + 12 * RANKS) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = {rank: (tmp_path / f"log {rank}").read_text(errors="replace")[-3000:] for rank in range(RANKS)}
    left = [rank for rank, code in enumerate(ended) if code == 0]
    killed = [rank for rank, code in enumerate(ended) if code == -9]
    assert len(left) == LEFT and len(killed) == RANKS - LEFT, f"{ended}\n" + "\n".join(
        f"--- rank {rank}\n{logs[rank]}" for rank, code in enumerate(ended) if code not in (0, -9)
    )
    for rank in range(RANKS):
        path = tmp_path / f"{rank}.json"
        for told in json.loads(path.read_text()) if path.exists() else []:
            assert told["named"], told
            assert told["seconds"] < 2 * deaths.TIMEOUT + RANKS / torch.cuda.device_count(), told
