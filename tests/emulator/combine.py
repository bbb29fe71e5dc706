"""Checks of the combine of few tokens over domains, on rows of bf16: where sums are rounded shows."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from cases import RouteCase, expected_combine, expected_plan
from torch import Tensor

from .batches import COURIERS
from .ranks import Ranks, numbered, same
from .routes import Shape, drawn, wire_of
from .threads import Launch, run

HIDDEN = 24


def words(rows: Tensor) -> Tensor:
    """Rows of bf16, as memory takes them."""
    return rows.contiguous().view(torch.int32)


def noise(rows: int, draw: torch.Generator) -> Tensor:
    """Draw numbers of very unequal size."""
    spread = torch.randn(rows, 1, generator=draw).mul(2).exp()
    return (spread * torch.randn(rows, HIDDEN, generator=draw)).bfloat16()


def combine(draw: random.Random, shape: Shape, times: int = 3) -> None:
    """Several operations of different routes, one behind the other."""
    from courier import Courier

    from cute_kernels import marks
    from cute_kernels.heap import Problem
    from cute_kernels.latency.combine import LatencyCombine

    world_size, made = len(shape.experts), wire_of(shape)
    problem = Problem(world_size, shape.experts, shape.top_k, HIDDEN, "bf16", shape.max_tokens, shape.domains, made)
    kernels = [LatencyCombine(problem, shape.max_tokens, weighted) for weighted in (True, False)]
    heap = kernels[0].heap
    depth = made.depth if shape.wire == "adversary" else 0
    ranks = Ranks(heap, draw, mapped=shape.wire != "nvshmem", depth=depth)
    generator = torch.Generator().manual_seed(draw.getrandbits(31))
    launches: list[Launch] = []
    before: dict[Any, int] = {}
    wanted: list[tuple[str, int, Tensor]] = []

    def launch(stream: Any, what: Any, **values: Any) -> None:
        launches.append(Launch(what, numbered(what.Args, **values), before.get(stream)))
        before[stream] = len(launches) - 1

    for number in range(1, times + 1):
        kernel = kernels[number % len(kernels)]
        case: RouteCase = drawn(shape, draw)
        plans = expected_plan(case)
        y = [noise(rows, generator) for rows in case.capacity]
        weights = [torch.randn(rows, generator=generator) for rows in case.capacity]
        wants = expected_combine(case, plans, y, weights if kernel.weighted else None, None, shape.domains)
        put = ranks.memory.put
        for rank, (plan, want) in enumerate(zip(plans, wants, strict=True)):
            args = ranks.args(rank, marks.pack("combine", case.max_tokens, latency=True))
            out = ranks.blank(want.numel() // 2, "out")
            wanted.append((f"sums of rank {rank}, step {number}", out, want))
            launch(
                rank, kernel, ranks=args, y=put(words(y[rank]), "y"), recv_weights=put(weights[rank], "weights"),
                topk_idx=put(case.topk_idx[rank], "topk_idx"), send_rows=put(plan.send_rows, "send_rows"),
                arrivals=put(plan.arrivals, "arrivals"), out=out, tokens=want.shape[0],
                max_tokens=case.max_tokens, num_rows=case.capacity[rank], senders=2, first_receiver=0, blocks=2,
            )  # fmt: skip
            if depth:
                one = ranks.courier(rank, Courier(problem, depth), number, COURIERS)
                launches.append(dataclasses.replace(one, after=before.get((rank, 1))))
                before[rank, 1] = len(launches) - 1
    run(launches, draw)
    for rank in range(world_size):
        assert not any(reason for reason, _ in ranks.reported(rank)), f"rank {rank} reports something"
    for what, out, want in wanted:
        same(ranks.view(out, *words(want).shape).view(torch.bfloat16), want, what)


CHECKS = {
    "domains_nvlink": lambda draw: combine(
        draw, Shape((2,) * 6, 6, 3, domains=((0, 5), (1, 4), (2, 3)), wire="nvlink")
    ),
    "domains_nvshmem": lambda draw: combine(
        draw, Shape((3, 0, 2, 2), 5, 4, share=0.5, domains=((0, 1), (2, 3)), wire="nvshmem"), 4
    ),
    "domains_bundled": lambda draw: combine(
        draw, Shape((2, 1, 2, 2), 4, 5, domains=((0, 1), (2, 3)), wire=draw.choice(("nvshmem", "adversary")), rows=3), 3
    ),
    "domains_adversary": lambda draw: combine(draw, Shape((2,) * 4, 4, 3, domains=((0, 1), (2, 3)), wire="adversary")),
}
