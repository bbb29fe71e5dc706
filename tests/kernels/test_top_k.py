"""Kernels compile at the largest top_k, at which a mask of a token's entries takes all bits of a word, and one less."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import compiled_ptx

from cute_kernels.heap import Problem
from cute_kernels.internode.wire import BUNDLE, Nvlink
from cute_kernels.latency.combine import LatencyCombine
from cute_kernels.latency.dispatch import LatencyDispatch
from ep_ops.backends.cute.ahead import latency_kernels, throughput_kernels
from ep_ops.config import consecutive_domains

ONE = Problem(2, (32, 32), 32, 256, "bf16", 64)
TWO = dataclasses.replace(
    ONE, world_size=4, experts_per_rank=(16,) * 4, domains=consecutive_domains(4, 2), wire=Nvlink()
)
PROBLEMS = {
    "one rank": dataclasses.replace(ONE, world_size=1, experts_per_rank=(64,)),
    "one domain": ONE,
    "40 ranks": dataclasses.replace(ONE, world_size=40, experts_per_rank=(2,) * 40),
    "domains": TWO,
    "40 ranks in domains": dataclasses.replace(
        TWO, world_size=40, experts_per_rank=(2,) * 40, domains=consecutive_domains(40, 4)
    ),
}
TOKENS = 32
CASES = [
    (name, kind)
    for name, problem in PROBLEMS.items()
    for kind in dict.fromkeys(map(type, [*throughput_kernels(problem), *latency_kernels(problem, TOKENS)]))
]


@pytest.mark.parametrize(("top_k", "ranks"), [
    (32, 40), *(pytest.param(*case, marks=pytest.mark.drawn) for case in ((31, 4), (31, 40), (32, 4))),
])  # fmt: skip
def test_bundles(top_k: int, ranks: int) -> None:
    problem = PROBLEMS["domains" if ranks == 4 else "40 ranks in domains"]
    problem = dataclasses.replace(problem, top_k=top_k, wire=Nvlink(rows=BUNDLE))
    compiled_ptx(LatencyCombine(problem, TOKENS, True), "sm_90a")
    compiled_ptx(LatencyDispatch(problem, TOKENS, True), "sm_100a")


@pytest.mark.drawn
@pytest.mark.parametrize("top_k", [31, 32])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_every_kind(name: str, kind: Any, top_k: int) -> None:
    """The kernel of each kind that has the most to do."""
    problem = dataclasses.replace(PROBLEMS[name], top_k=top_k)
    kernels = [*throughput_kernels(problem), *latency_kernels(problem, TOKENS)]
    fields = [field.name for field in dataclasses.fields(kind) if field.name not in ("problem", "tokens")]
    made = [kernel for kernel in kernels if kernel.NAME == kind.NAME]
    compiled_ptx(max(made, key=lambda kernel: sum(bool(getattr(kernel, name)) for name in fields)), "sm_90a")
