"""Checks of the combine over domains, on rows of bf16: where sums are rounded shows."""

from __future__ import annotations

import random
from typing import Any

import torch
from cases import RouteCase, expected_combine, expected_plan
from torch import Tensor

from .batches import COURIERS
from .ranks import Ranks, numbered, same
from .routes import Shape, drawn
from .threads import Launch, run

HIDDEN = 24
DEPTH = 24


def words(rows: Tensor) -> Tensor:
    """Rows of bf16, as memory takes them."""
    return rows.contiguous().view(torch.int32)


def noise(rows: int, draw: torch.Generator) -> Tensor:
    """Of very unequal size."""
    spread = torch.randn(rows, 1, generator=draw).mul(2).exp()
    return (spread * torch.randn(rows, HIDDEN, generator=draw)).bfloat16()


def combine(draw: random.Random, shape: Shape, kind: str, domains: tuple[tuple[int, ...], ...], times: int = 3) -> None:
    """Several operations of different routes, one behind the other."""
    from cute_kernels import marks
    from cute_kernels.heap import Problem
    from cute_kernels.internode import wire
    from cute_kernels.internode.combine import Combine
    from cute_kernels.internode.courier import Courier

    world_size = len(shape.experts)
    problem = Problem(world_size, shape.experts, shape.top_k, HIDDEN, "bf16", shape.max_tokens)
    made = {"nvlink": wire.Nvlink(), "nvshmem": wire.Nvshmem("library"), "adversary": wire.Adversary(DEPTH)}[kind]
    kernels = [
        Combine(problem, made, shape.max_tokens, weighted, added) for weighted, added in ((1, 1), (1, 0), (0, 0))
    ]
    heap = kernels[0].heap
    courier = Courier(problem, heap, DEPTH)
    ranks = Ranks(heap, draw, mapped=kind != "nvshmem")
    of = torch.tensor([next(d for d, members in enumerate(domains) if r in members) for r in range(world_size)])
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
        residual = [noise(idx.shape[0], generator) for idx in case.topk_idx]
        wants = expected_combine(
            case, plans, y, weights if kernel.weighted else None, residual if kernel.added else None, domains
        )
        put = ranks.memory.put
        for rank, (plan, want) in enumerate(zip(plans, wants, strict=True)):
            args = ranks.args(rank, marks.pack("combine", case.max_tokens, few=True))
            out = ranks.blank(want.numel() // 2, "out")
            wanted.append((f"sums of rank {rank}, step {number}", out, want))
            launch(
                rank, kernel, ranks=args, y=put(words(y[rank]), "y"), recv_weights=put(weights[rank], "weights"),
                topk_idx=put(case.topk_idx[rank], "topk_idx"), send_rows=put(plan.send_rows, "send_rows"),
                arrivals=put(plan.arrivals, "arrivals"), domains=put(of.int(), "domains"),
                residual=put(words(residual[rank]), "residual"), out=out, tokens=want.shape[0],
                max_tokens=case.max_tokens, num_rows=case.capacity[rank], blocks=2,
            )  # fmt: skip
            if kind == "adversary":
                launch((rank, 1), courier, ranks=args, epoch=number, seed=draw.getrandbits(30), blocks=COURIERS)
    run(launches, draw)
    for rank in range(world_size):
        assert not any(reason for reason, _ in ranks.reported(rank)), f"rank {rank} reports something"
    for what, out, want in wanted:
        same(ranks.view(out, *words(want).shape).view(torch.bfloat16), want, what)


CHECKS = {
    "domains_nvlink": lambda draw: combine(draw, Shape((2,) * 6, 6, 3), "nvlink", ((0, 5), (1, 4), (2, 3))),
    "domains_nvshmem": lambda draw: combine(draw, Shape((3, 0, 2, 2), 5, 4, share=0.5), "nvshmem", ((0, 1), (2, 3)), 6),
    "domains_adversary": lambda draw: combine(draw, Shape((2, 2, 2), 4, 3), "adversary", ((0,), (1,), (2,))),
}  # fmt: skip
