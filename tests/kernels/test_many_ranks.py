"""Kernels fit whatever the number of ranks: into registers, and into the shared memory of a multiprocessor."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import assert_in_registers, built, count

from cute_kernels.heap import MOST_RANKS, Problem
from cute_kernels.latency import combine as latency_combine
from cute_kernels.latency import dispatch as latency_dispatch
from cute_kernels.latency.sizes import block_bytes, most_tokens
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.gather import Gather
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.publish_tokens import PublishTokens
from cute_kernels.throughput.pull import Pull
from cute_kernels.throughput.pull_scaled import PullScaled
from ep_ops.backends.cute.ahead import latency_kernels, throughput_kernels
from ep_ops.config import default_experts
from ep_ops.group.topology import NEEDED_SHARED_BYTES

LATENCY = (latency_dispatch.LatencyDispatch, latency_combine.LatencyCombine)
TWO_BLOCKS = 113 * 1024
"""The most bytes of shared memory of a block of which a multiprocessor holds two: it has 228 KiB, of which the system
takes one for each block."""

CASES = [
    # ranks, arch; all kernels of 4 ranks are looked at in test_ptx.py, for sm_100a too
    (2, "sm_90a"), (32, "sm_90a"), (72, "sm_90a"), (72, "sm_103a"),
]  # fmt: skip


def problem(world_size: int) -> Problem:
    num_experts = max(256, 4 * world_size)
    return Problem(world_size, default_experts(num_experts, world_size), 8, 7168, "bf16", 4096)


def kernels(made: Problem) -> list[Any]:
    """Those that have the most to do of each kind."""
    tokens = min(256, most_tokens(made))
    found = [*throughput_kernels(made), *latency_kernels(made, tokens)]
    largest = [
        Publish(made, True, True, True, False), Pull(made, True, False, True, True), PullScaled(made, False),
        Combine(made, True, True, False, True), Combine(made, True, False, True), Gather(made),
        PublishTokens(made, True, True, True, False, pushes=made.has_room_for_pushes),
        Combine(made, True, False, True, False, True),
        *(kind(made, tokens, True) for kind in LATENCY),
    ]  # fmt: skip
    assert set(largest) < set(found) and {type(kernel) for kernel in largest} == {type(kernel) for kernel in found}
    return largest


@pytest.mark.drawn
@pytest.mark.parametrize(("world_size", "arch"), CASES)
def test_kernels_fit(world_size: int, arch: str) -> None:
    # Of the second Blackwell the kernels with the most shared memory: what differs there is how much there is.
    for kernel in kernels(problem(world_size))[: 2 if arch == "sm_103a" else None]:
        made = built(kernel, arch)
        assert f".target {arch}" in made.ptx
        assert_in_registers(kernel, arch)
        # All of a block's shared memory is what the launch asks for.
        assert count(made.ptx, ".shared") == 0 and made.ptx.count(".shared .align") <= 1
        assert made.shared_bytes > 0 or "__dynamic_shmem__" not in made.ptx
        most = TWO_BLOCKS if isinstance(kernel, LATENCY) else NEEDED_SHARED_BYTES
        assert made.shared_bytes <= most, kernel


@pytest.mark.parametrize("world_size", [2, MOST_RANKS])
def test_what_a_launch_asks_for_is_what_was_planned_with(world_size: int) -> None:
    made = problem(world_size)
    plan = Publish(made, True, False, False, True)
    assert made.placing_bytes - 2048 < built(plan, "sm_90a").shared_bytes <= made.placing_bytes
    for tokens in {min(256, most_tokens(made)), most_tokens(made)}:
        dispatch = latency_dispatch.LatencyDispatch(made, tokens, False, False, True)
        assert 0 <= built(dispatch, "sm_90a").shared_bytes - block_bytes(made, tokens) < 1024
