"""How many processes compile kernels in `Communicator.warmup`. Needs no GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels import prepare
from ep_ops.backends.cute import launcher
from ep_ops.backends.cute.backend import CuteBackend
from ep_ops.config import Config
from ep_ops.group import topology
from ep_ops.group.exchange import Exchange
from ep_ops.memory import planned

ALL = range(8)


def processes(cases: Sequence[tuple[str, Sequence[Any], int]]) -> list[int]:
    """Return the number of processes with which this rank compiles, for each case: hosts, cores of ranks, and number
    of visible GPUs."""
    rank, found = dist.get_rank(), []
    backend, made = object.__new__(CuteBackend), object.__new__(launcher.Launcher)
    backend._launcher, made._arch = made, "sm_90a"
    backend._exchange = Exchange(dist.group.WORLD, torch.device("cpu"))
    backend._config = planned(Config(num_experts=6, hidden_size=64, top_k=2, max_tokens_per_rank=64), len(cases[0][0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        patch.setattr(prepare, "Path", lambda path: Path("/missing"))
        patch.setattr(made, "_compiled", lambda kernel: None)
        patch.setattr(launcher, "prepare_all", lambda kernels, arch, count: found.append(count))
        for hosts, cores, gpus in cases:
            patch.setattr(topology, "_host", lambda hosts=hosts: hosts[rank])
            patch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(cores[rank]))
            patch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
            backend.compile()
    return found


def test_ranks_of_a_host_share_its_cores() -> None:
    """Each rank may see one GPU only, without a variable for the number of ranks, and may have cores of its own."""
    cases = {
        ("aab", (ALL, ALL, ALL), 1): (4, 4, 8),
        ("aaa", (ALL, ALL, ALL), 1): (2, 2, 2),
        ("aab", (ALL, ALL, ALL), 4): (2, 2, 2),  # ranks of other groups may compile on their GPUs
        ("aba", (range(4), ALL, range(4, 8)), 1): (4, 8, 4),
        ("aba", (range(4), ALL, range(4, 8)), 2): (4, 4, 4),
        ("aab", (ALL, range(4, 8), ALL), 1): (6, 2, 8),
        ("aaa", (range(2), range(2), range(2)), 0): (0, 0, 0),  # each rank compiles by itself
    }
    found = run_ranks(3, processes, [(hosts, cores, gpus) for hosts, cores, gpus in cases])
    assert [*zip(*found, strict=True)] == [*cases.values()]


@pytest.mark.parametrize(
    ("limit", "alone", "of_four"),
    [("max 100000", 8, 2), ("400000 100000", 4, 1), ("50000 100000", 0, 0), ("1600000 100000", 8, 2)],
)
def test_a_quota_of_a_container(
    limit: str, alone: int, of_four: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    monkeypatch.setattr(prepare, "Path", lambda path: tmp_path / Path(path).name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(ALL))
    assert prepare.share_of_cores() == alone
    assert prepare.share_of_cores([frozenset(ALL)] * 3) == of_four
