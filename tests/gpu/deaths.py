"""One rank of test_deaths.py, started by hand: ranks die one after the other, the others go on without them.

Every round has a victim, a kind of kernel, a way to run it (`WAYS`) and a moment; all ranks draw the same from the
seed. Survivors look at every result until they are told, shrink, and look again. Where there are several NVLink
domains, which must have equally many ranks, some that live leave with the one that died.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import ep_ops

EXPERTS, HIDDEN, TOP_K = 2, 64, 2  # of each rank; a row; a token
MANY, FEW, TOKENS = 64, 32, 20
TIMEOUT = 2.0
STEPS = 4
"""Right ones before a death."""
WAYS = ("eager", "replayed", "compiled")
MOMENTS = ("before", "dispatch", "between", "combine", "after", "any time")


def die(after: float = 0.0) -> None:
    if after:
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def names(text: str, victim: int) -> bool:
    """Whether a failure says who died: as the one who was waited for, or as the one whom that rank has not seen, where
    its own wait began no earlier than the one that failed (processes that share a GPU run one after the other)."""
    return f"for rank {victim} " in text or f"has not seen rank {victim} in it" in text


class Rank:
    """A rank's work with one communicator."""

    def __init__(self, comm: ep_ops.Communicator, bound: int, way: str, me: int, all_ranks: int) -> None:
        self.comm, self.bound, self.me, self.all_ranks = comm, bound, me, all_ranks
        self.x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.idx = torch.full((TOKENS, TOP_K), -1, dtype=torch.int32, device="cuda")
        self.graph: Any = None
        self.compiled = torch.compile(self.both, fullgraph=True, backend="aot_eager") if way == "compiled" else None
        if way == "replayed":
            self.dispatch(), self.combine()
            torch.cuda.synchronize()
            dist.barrier(comm.group)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.dispatch(), self.combine()

    def dispatch(self) -> None:
        self.sent = self.comm.dispatch(self.x, self.idx, max_tokens=self.bound)

    def combine(self) -> None:
        self.out = self.comm.combine(self.sent.x, self.sent.route)

    def both(self, x: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        sent = self.comm.dispatch(x, idx, max_tokens=self.bound)
        return self.comm.combine(sent.x, sent.route)

    def begin(self, seed: int) -> torch.Tensor:
        """New tokens; what is to come back of them."""
        gen = torch.Generator().manual_seed(seed * 1000 + self.me)
        x = torch.randint(-8, 8, (TOKENS, HIDDEN), generator=gen).bfloat16()
        idx = torch.rand(TOKENS, EXPERTS * self.all_ranks, generator=gen).topk(TOP_K).indices.int()
        self.x.copy_(x)
        self.idx.copy_(idx)
        left = torch.isin(idx // EXPERTS, torch.tensor(self.comm.members)).sum(1)
        return x * left[:, None]

    def step(self, seed: int, moment: str = "", after: float = 0.0) -> None:
        """A round trip, in which a victim dies at some moment. RuntimeError when a failure is told."""
        expected = self.begin(seed)
        if moment == "before":
            die()
        if self.compiled is not None:
            self.out = self.compiled(self.x, self.idx)
        elif self.graph is None:
            self.dispatch()
            if moment == "dispatch":
                die(after)
            if moment == "between":
                torch.cuda.synchronize()
                die()
            self.combine()
        else:
            self.graph.replay()
        if moment and moment != "after":
            die(after)
        torch.cuda.synchronize()
        if moment == "after":
            die()
        self.comm.check_errors()
        got = self.out.cpu()
        assert torch.equal(got, expected), f"{int((got != expected).sum())} of {got.numel()} numbers are wrong"


def who_stays(comm: ep_ops.Communicator, victim: int, draw: random.Random) -> list[int]:
    """Some ranks of a communicator that has lost one: all others of one domain; else the victim's domain goes, or one
    rank of each of them."""
    ranks, domain = range(comm.world_size), next(domain for domain in comm.domains if victim in domain)
    if len(comm.domains) == 1:
        return [rank for rank in ranks if rank != victim]
    if len(domain) == 1 or draw.random() < 0.5:
        return [rank for rank in ranks if rank not in domain]
    gone = [victim if victim in members else draw.choice(members) for members in comm.domains]
    return [rank for rank in ranks if rank not in gone]


def shrunk(comm: ep_ops.Communicator, stay: list[int], name: str) -> ep_ops.Communicator:
    """Return the communicator of ranks `stay`; over NVSHMEM of those of this rank's domain, when a larger group has
    been rejected."""

    def group_of(ranks: list[int]) -> Any:
        return dist.new_group([comm.members[rank] for rank in ranks], use_local_synchronization=True)

    near = [rank for rank in stay if rank in next(domain for domain in comm.domains if comm.rank in domain)]
    if comm.config.wire != "nvshmem" or near == stay:
        return comm.shrink(group_of(stay), name=name)
    try:
        comm.shrink(group_of(stay))
    except ValueError as error:
        assert "uses NVSHMEM, which cannot continue" in str(error), error
    else:
        raise AssertionError("NVSHMEM has gone on with some ranks of several domains")
    return comm.shrink(group_of(near), name=name)


def main(rank: int, world_size: int, left: int, port: int, seed: int, size: int, out: str) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    draw = random.Random(seed)
    sizes = dict(num_experts=EXPERTS * world_size, hidden_size=HIDDEN, top_k=TOP_K, max_tokens_per_rank=MANY)
    comm = ep_ops.Communicator(
        **sizes, latency_max_tokens=FEW, backend="cute", timeout=TIMEOUT, name="deaths", domain_size=size
    )
    assert len(comm.domains) == world_size // size
    # A process compiles its first function in seconds, which are not all the same; peers wait for TIMEOUT.
    torch.compile(torch.sin, fullgraph=True, backend="aot_eager")(torch.zeros(1, device="cuda"))
    dist.barrier()
    told: list[dict[str, Any]] = []
    number = 0
    while comm.world_size > left:
        bound, way = (MANY, FEW)[number % 2], WAYS[number // 2 % 3]
        victim, moment, after = draw.randrange(comm.world_size), draw.choice(MOMENTS), draw.uniform(1e-5, 4e-3)
        comm.warmup()
        mine = Rank(comm, bound, way, rank, world_size)
        for i in range(STEPS):
            mine.step(number * 1000 + i)
        dist.barrier(comm.group)
        start, text = time.monotonic(), ""
        for i in range(STEPS, STEPS + 50):
            start = time.monotonic()
            try:
                mine.step(number * 1000 + i, moment if comm.rank == victim else "", after)
            except RuntimeError as error:
                text = str(error)
                break
        told.append(dict(
            victim=victim, moment=moment, few=bound == FEW, way=way, steps=i - STEPS, domains=comm.domains,
            seconds=time.monotonic() - start, named=names(text, victim), text=text,
        ))  # fmt: skip
        with open(out, "w") as file:
            json.dump(told, file)
        stay = who_stays(comm, victim, draw)
        if comm.rank not in stay:
            comm.destroy()
            print("left", flush=True)
            os._exit(0)
        comm = shrunk(comm, stay, f"deaths {number}")
        number += 1
    mine = Rank(comm, MANY, "eager", rank, world_size)
    for i in range(STEPS):
        mine.step(10**6 + i)
    print("done", flush=True)
    os._exit(0)  # the default group has lost ranks


if __name__ == "__main__":
    main(*map(int, sys.argv[1:7]), sys.argv[7])
