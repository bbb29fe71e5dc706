"""Checks of a dispatch of the latency kernels that a rank rejects while another rank is late: all other ranks return a
route without rows, so a combine along it ends, in which the rejecting rank takes part with a route without rows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from . import latency, latency_tokens
from .ranks import numbered
from .routes import Shape
from .threads import Launch, run

BEHIND = 2500
"""Rounds that the late rank begins behind the others."""


def rejected(both: latency.Pair, draw: random.Random, split: bool) -> None:
    from cute_kernels import marks, sync
    from cute_kernels.heap import REASON_BYTES
    from cute_kernels.rejection import Reject
    from ep_ops import arrivals

    ranks, world = both.ranks, both.ranks.world_size
    both.inputs()
    while sum(idx.numel() > 0 for idx in both.truth.case.topk_idx) < world:
        both.inputs()
    case = both.truth.case
    rejects, late = draw.sample(range(world), 2)
    usual, sync.POLLS_PER_CHECK = sync.POLLS_PER_CHECK, 8
    text = ranks.memory.take(REASON_BYTES, "text", 65)
    if split:
        sends = both.launches("dispatch", True, (True, False))
        run([launch for rank, launch in enumerate(sends) if rank != rejects], draw)
    launches = both.launches("dispatch", True, (not split, True))
    args = numbered(Reject.Args, ranks=ranks.args(rejects, marks.pack_rejection(rejects)), text=text, blocks=1)
    launches[rejects] = Launch(Reject(both.heap.problem, both.heap.tokens * bool(both.shape.domains)), args)
    launches[late] = dataclasses.replace(launches[late], behind=BEHIND)
    run(launches, draw, quiet_turns=2 * BEHIND)
    sync.POLLS_PER_CHECK = usual
    ranks.operations += 1
    ranks.check_wire()
    told = [ranks.reported(rank) for rank in range(world)]
    assert all(said[0] == (0, 0) for said in told), told
    assert all(said[1][0] == sync.REJECTION for rank, said in enumerate(told) if rank != rejects), told
    for rank, at in enumerate(both.at):
        held, rows, entries = case.experts_per_rank[rank], case.capacity[rank], case.topk_idx[rank].numel()
        lists = ranks.view(at["arrivals"], arrivals.size(rows, world))
        if rank == rejects:
            ranks.view(at["send_rows"], entries).fill_(-1)
            lists.zero_()
            continue
        assert ranks.view(at["send_rows"], entries).eq(-1).all(), f"rows of rank {rank} at other ranks"
        assert not arrivals.views(lists, rows).sources.any(), f"copies at rank {rank}"
        for name in ("counts", "dropped"):
            assert not ranks.view(at[name], held).any(), f"{name} of rank {rank}"
    run(both.launches("combine", not both.token_major, (True, True)), draw)
    ranks.operations += 1
    ranks.check_wire()
    ranks.check_epochs()
    for rank, at in enumerate(both.at):
        if case.topk_idx[rank].shape[0]:
            assert not ranks.floats(at["out"], case.topk_idx[rank].shape[0], both.shape.hidden).any(), f"sums, {rank}"


def grouped(shape: Shape, draw: random.Random, split: bool = False) -> None:
    rejected(latency.Pair(shape, draw, (1, 1 - bool(shape.domains), 4), (1, 0, 3)), draw, split)


def by_token(shape: Shape, draw: random.Random, split: bool = False) -> None:
    rejected(latency_tokens.Pair(shape, draw, (1, 1 - bool(shape.domains), 4), (1, 0, 3)), draw, split)


ACROSS = Shape((2,) * 3, 3, 3, 64, domains=((0,), (1,), (2,)), wire="nvshmem")

CHECKS: dict[str, Callable[[random.Random], None]] = {
    "rejected_latency": lambda draw: grouped(Shape((2, 1, 2), 3, 3, 64, alignment=2), draw),
    "rejected_latency_slots": lambda draw: grouped(Shape((2, 1, 2), 3, 3, 64, slots=(3,)), draw),
    "rejected_latency_split": lambda draw: grouped(Shape((2, 1, 2), 3, 3, 64), draw, True),
    "rejected_latency_tokens": lambda draw: by_token(Shape((2, 1, 2, 1), 3, 3, 64), draw),
    "rejected_latency_across": lambda draw: draw.choice((grouped, by_token))(ACROSS, draw),
    "rejected_latency_across_bundled": lambda draw: draw.choice((grouped, by_token))(
        dataclasses.replace(ACROSS, rows=2), draw
    ),
}  # fmt: skip
