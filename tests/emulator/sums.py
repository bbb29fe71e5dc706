"""Checks of combines whose sums are rounded or sent in a format, bit for bit, against tests/quantized.py."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import quantized
import torch
from cases import RouteCase, expected_combine, expected_plan
from tokens import expected_copies, expected_sums
from torch import Tensor

from .ranks import Ranks, numbered
from .routes import DEPTH, Shape, drawn, wire_of
from .threads import Launch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MX, POW2 = "e4m3/32/mx", "e4m3/128/pow2"


def noise(draw: random.Random, rows: int, hidden: int, dtype: str) -> Tensor:
    """Return rows of all magnitudes with the special cases of rounding and scales: zeros, numbers that are not finite,
    and rows that cancel the row before."""
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(draw.getrandbits(31)))
    for number, row in enumerate(x):
        row *= 10.0 ** draw.uniform(-8, 8)
        kind, first = draw.random(), draw.randrange(hidden // 32) * 32
        if kind < 0.1:
            row[draw.randrange(hidden)] = draw.choice([float("inf"), float("nan"), -float("inf"), 3.0e38])
        elif kind < 0.3:
            row[first : first + 32] = draw.choice([0.0, -0.0, 1e-30, 1e-38, 448.0, 1.75])
        elif kind < 0.4:
            row[first] = draw.choice([-1e6, 1e6])  # one channel is far larger than the others
        elif kind < 0.5 and number:
            row[:] = -x[number - 1]
    return x.to(DTYPES[dtype])


def words(rows: Tensor) -> Tensor:
    """Return rows as the words that memory holds."""
    return rows.contiguous().view(torch.int32)


def same(got: Tensor, want: Tensor, what: str) -> None:
    """Assert that tensors are equal bit for bit, except that all NaNs are equal."""
    ints = torch.int32 if want.dtype == torch.float32 else torch.int16
    wrong = (got.view(ints) != want.view(ints)) & ~(got.isnan() & want.isnan())
    assert not wrong.any(), (
        f"{what}: {got[wrong].tolist()[:8]} instead of {want[wrong].tolist()[:8]} at {wrong.nonzero().tolist()[:8]}"
    )


def arrived(format: str) -> Any:
    """Return the function from a sum [H] to its quantized and dequantized value; None if it is only rounded."""
    if not format:
        return None

    def sent(row: Tensor) -> Tensor:
        codes, scales = quantized.quantized(row[None], format.removeprefix("e4m3/"))
        return quantized.dequantized(codes, scales, torch.float32)[0]

    return sent


@dataclasses.dataclass
class Step:
    """One combine of all ranks: its route, its inputs, and the expected outputs."""

    case: RouteCase
    plans: Any
    y: list[Tensor]
    weights: list[Tensor] | None
    residual: list[Tensor] | None
    wants: list[Tensor]


class Sums:
    """Combines of all ranks on the same heaps by the throughput or the latency kernels; no format: sums are rounded."""

    def __init__(
        self, draw: random.Random, shape: Shape, format: str, dtype: str, token_major: bool, latency: bool
    ) -> None:
        from cute_kernels.heap import Heap, Problem
        from cute_kernels.latency.sizes import LatencyHeap

        self.draw, self.shape, self.format, self.dtype = draw, shape, format, dtype
        self.token_major, self.latency = token_major, latency
        bound, wire = shape.max_tokens + draw.randint(0, 3), wire_of(shape)
        world_size = len(shape.experts)
        self.problem = problem = Problem(
            world_size, shape.experts, shape.top_k, shape.hidden, dtype, bound, shape.domains, wire
        )
        heap = LatencyHeap(problem, bound) if latency else Heap(problem)
        depth = DEPTH * (shape.wire == "adversary")
        self.ranks = Ranks(heap, draw, mapped=shape.wire != "nvshmem", depth=depth)

    def drawn(self, weighted: bool, residual: bool) -> Step:
        """Draw another route and its rows."""
        shape, case = self.shape, drawn(self.shape, self.draw)
        if self.token_major:
            case = dataclasses.replace(case, alignment=1, slots=(0,) * case.world_size)
        y = [noise(self.draw, rows, shape.hidden, self.dtype) for rows in case.capacity]
        weights = [torch.randn(rows) for rows in case.capacity] if weighted else None
        counts = [idx.shape[0] for idx in case.topk_idx]
        added = [noise(self.draw, count, shape.hidden, self.dtype) for count in counts] if residual else None
        plans: Any
        if self.token_major:
            plans = expected_copies(case, case.capacity)
            wants = expected_sums(case, plans, y, shape.domains, arrived(self.format))
        else:
            plans = expected_plan(case)
            wants = expected_combine(case, plans, y, weights, added, shape.domains or None, arrived(self.format))
        return Step(case, plans, y, weights, added, wants)

    def launches(self, step: Step, outs: list[int], parts: tuple[bool, bool] = (True, True)) -> list[Launch]:
        """Return the launch of each rank. `parts`: whether a latency kernel sends, and whether it receives."""
        from cute_kernels import marks
        from cute_kernels.latency.combine import LatencyCombine
        from cute_kernels.throughput.combine import Combine

        put, weighted, kernel = self.ranks.memory.put, step.weights is not None, None
        if self.latency:
            kernel = LatencyCombine(self.problem, self.problem.max_tokens, weighted, *parts, self.format)
        else:
            kernel = Combine(self.problem, True, weighted, False, step.residual is not None, False, self.format)
        made = []
        for rank, (plan, out) in enumerate(zip(step.plans, outs, strict=True)):
            joining = self.draw.randint(0, 2)
            senders, first = self.draw.choice(((1, 1), (2, 0))) if all(parts) else (1, 0)
            if self.problem.world_size == 1:
                senders, first = 0, 0
            terms = marks.pack("combine", step.case.max_tokens, latency=self.latency, format=self.format)
            given: dict[str, Any] = dict(
                ranks=self.ranks.args(rank, terms), y=put(words(step.y[rank]), "y"),
                recv_weights=0 if step.weights is None else put(step.weights[rank], "weights"),
                row_scalars=0, out_scalars=0, topk_idx=put(step.case.topk_idx[rank], "topk_idx"),
                send_rows=put(plan.send_rows, "send_rows"), arrivals=put(plan.arrivals, "arrivals"),
                residual=0 if step.residual is None else put(words(step.residual[rank]), "residual"),
                out=out, tokens=step.wants[rank].shape[0], max_tokens=step.case.max_tokens,
                num_rows=step.case.capacity[rank], pushers=self.draw.choice((1, 2, 3)), joining=joining, expected=2,
                senders=senders, first_receiver=first, blocks=3 if self.latency else 4 + joining,
            )  # fmt: skip
            if self.latency and parts == (True, False):
                given["blocks"] = max(senders, 1)
            made.append(Launch(kernel, numbered(kernel.Args, **{name: given[name] for name in kernel.Args._fields})))
        return made

    def run(self, step: Step, split: bool) -> None:
        """Run a combine and compare its outputs bit for bit."""
        outs = [self.ranks.blank(want.numel() * want.itemsize // 4, "out") for want in step.wants]
        if split:
            self.ranks.run(self.launches(step, outs, (True, False)), ends=False)
            self.ranks.run(self.launches(step, outs, (False, True)))
        else:
            self.ranks.run(self.launches(step, outs))
        for rank, (out, want) in enumerate(zip(outs, step.wants, strict=True)):
            got = self.ranks.view(out, want.shape[0], want.shape[1] * want.itemsize // 4).view(want.dtype)
            same(got, want, f"sums of rank {rank} in {self.format or self.dtype}")


def sums(
    draw: random.Random, shape: Shape, format: str = MX, dtype: str = "fp32", token_major: bool = False,
    latency: bool = False, times: int = 2,
) -> None:  # fmt: skip
    """Run combines on several routes, with and without weights and a residual."""
    on = Sums(draw, shape, format, dtype, token_major, latency)
    for number in range(times):
        weighted = number % 2 == 0 and not token_major
        residual = not (token_major or latency) and draw.random() < 0.5
        on.run(on.drawn(weighted, residual), latency and draw.random() < 0.5)


def few(draw: random.Random, shape: Shape, format: str = MX, dtype: str = "fp32", **more: Any) -> None:
    """Run combines by the latency kernels."""
    sums(draw, shape, format, dtype, latency=True, **more)


def either(draw: random.Random) -> str:
    return draw.choice(("fp32", "bf16"))


PAIRS, THREE = ((0, 2), (1, 3)), ((0, 3), (1, 4), (2, 5))

CHECKS = {
    "sums": lambda draw: sums(draw, Shape((3, 0, 2), 4, 4, hidden=64, share=0.6)),
    "sums_bf16": lambda draw: sums(draw, Shape((3, 2), 3, 4, hidden=128, alignment=2), dtype="bf16"),
    "sums_wide": lambda draw: sums(draw, Shape((2, 1), 2, 2, hidden=1056), times=1),
    "sums_wide_bf16": lambda draw: sums(draw, Shape((2, 1), 2, 2, hidden=7296), dtype="bf16", times=1),
    "sums_one_rank": lambda draw: sums(draw, Shape((4,), 3, 4, hidden=32), dtype=either(draw)),
    "sums_rounded": lambda draw: sums(draw, Shape((3, 2), 4, 5, hidden=96, share=0.7), "", "bf16", times=3),
    "sums_rounded_tokens": lambda draw: sums(draw, Shape((2, 3), 3, 5, hidden=64, share=0.8), "", "bf16", True),
    "sums_four_ranks": lambda draw: sums(draw, Shape((2,) * 4, 6, 3, hidden=32), dtype="bf16"),
    "sums_tokens": lambda draw: sums(
        draw, Shape((3, 2), 3, 4, hidden=64, share=0.8), dtype="bf16", token_major=True
    ),
    "sums_across": lambda draw: sums(
        draw, Shape((3, 2), 4, 4, hidden=96, domains=((0,), (1,)), wire="nvshmem"), dtype=either(draw)
    ),
    "sums_across_pairs": lambda draw: sums(
        draw, Shape((2, 0, 3, 2), 4, 4, hidden=64, share=0.7, domains=PAIRS, wire="nvshmem"), dtype=either(draw)
    ),
    "sums_across_three": lambda draw: sums(
        draw, Shape((2,) * 6, 6, 3, hidden=32, domains=THREE, wire="nvlink"), dtype=either(draw)
    ),
    "sums_across_wide": lambda draw: sums(
        draw, Shape((1,) * 4, 2, 2, draw.choice((1056, 2080)), domains=PAIRS, wire="nvlink"), dtype="bf16", times=1
    ),
    "sums_across_tokens": lambda draw: sums(
        draw, Shape((2, 0, 3, 2), 3, 4, hidden=64, domains=PAIRS, wire="adversary"), dtype="bf16", token_major=True
    ),
    "sums_pow2": lambda draw: sums(draw, Shape((3, 2), 3, 4, hidden=384, share=0.7), POW2, either(draw)),
    "sums_across_pow2": lambda draw: sums(
        draw, Shape((2, 0, 3, 2), 4, 3, hidden=128, domains=PAIRS, wire="nvshmem"), POW2, either(draw)
    ),
    "sums_few_pow2": lambda draw: few(draw, Shape((2, 2), 3, 3, hidden=draw.choice((128, 1152))), POW2, either(draw)),
    "sums_few_across_pow2": lambda draw: few(
        draw, Shape((2, 3), 3, 3, hidden=640, domains=((0,), (1,)), wire="nvshmem"), POW2, either(draw)
    ),
    "sums_few": lambda draw: few(draw, Shape((3, 0, 2), 4, 4, hidden=64, share=0.6), dtype=either(draw)),
    "sums_few_wide": lambda draw: few(draw, Shape((2, 2), 3, 3, hidden=draw.choice((480, 1056))), dtype=either(draw)),
    "sums_few_many_copies": lambda draw: few(draw, Shape((1,) * 6, 6, 3, hidden=128), dtype="bf16", times=1),
    "sums_16_ranks": lambda draw: sums(
        draw, Shape((1, 2) * 8, 6, 2, hidden=128, share=0.8), draw.choice((MX, POW2)), either(draw), times=1
    ),
    "sums_few_16_ranks": lambda draw: few(
        draw, Shape((2, 1) * 8, 6, 1, hidden=128, share=0.8), draw.choice((MX, POW2)), either(draw), times=1
    ),
    "sums_few_one_rank": lambda draw: few(draw, Shape((4,), 3, 4, hidden=128), dtype=either(draw)),
    "sums_few_tokens": lambda draw: few(draw, Shape((3, 2), 3, 4, hidden=64), dtype="bf16", token_major=True),
    "sums_few_across": lambda draw: few(
        draw, Shape((2, 0, 3, 2), 4, 4, hidden=544, domains=PAIRS, wire="nvshmem"), dtype=either(draw)
    ),
    "sums_few_across_three": lambda draw: few(
        draw, Shape((2,) * 6, 6, 3, hidden=64, domains=THREE, wire="nvlink"), dtype=either(draw)
    ),
    "sums_few_bundled": lambda draw: few(
        draw, Shape((2, 1, 2, 2), 4, 5, hidden=64, domains=PAIRS, wire="adversary", rows=3), dtype="bf16"
    ),
}  # fmt: skip
