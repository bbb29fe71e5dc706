"""The latency kernels compile without a GPU, for Hopper and Blackwell, to the instructions they are meant to have."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import built, compiled_ptx, count, lines_apart

from cute_kernels.heap import Heap, Problem
from cute_kernels.latency.combine import LatencyCombine
from cute_kernels.latency.dispatch import LatencyDispatch
from cute_kernels.latency.dispatch_sender import AHEAD
from cute_kernels.latency.reach import words_of
from cute_kernels.latency.sizes import (
    MOST_BLOCK_BYTES,
    PACKET_BYTES,
    PAYLOAD_BYTES,
    LatencyHeap,
    block_bytes,
    most_tokens,
    packets,
)

LARGE = Problem(4, (64,) * 4, 8, 7168, "bf16", 4096)
WIDEST = Problem(8, (32,) * 8, 8, 7168, "bf16", 4096)
UNEVEN = Problem(3, (3, 0, 5), 4, 8200, "fp32", 100)
ALONE = Problem(1, (8,), 32, 128, "fp16", 16)
MOST = Problem(72, (4,) * 72, 8, 7168, "bf16", 4096)  # ranks
PROBLEMS = {"large": (LARGE, 256), "widest": (WIDEST, 256), "uneven": (UNEVEN, 100), "alone": (ALONE, 16)}
COMPILED = [("large", "sm_90a"), ("large", "sm_100a"), ("uneven", "sm_90a"), ("alone", "sm_90a")]
"""Other numbers of ranks: test_many_ranks.py."""


def assert_two_blocks_fit(kernel, arch: str) -> None:
    """On a multiprocessor: the next kernel's block waits there for this one's to end. Next to nothing is spilled."""
    made = built(kernel, arch)
    assert made.registers <= 64 and made.stack_bytes <= 32, (made.registers, made.stack_bytes)


@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_registers_and_spills(name: str, arch: str) -> None:
    problem, tokens = PROBLEMS[name]
    for kernel in (
        LatencyDispatch(problem, tokens, True),
        LatencyCombine(problem, tokens, False),
        LatencyCombine(problem, tokens, True),
    ):
        assert_two_blocks_fit(kernel, arch)


@pytest.mark.parametrize("kernel", [LatencyDispatch, LatencyCombine])
def test_registers_and_spills_of_split_operations(kernel) -> None:
    for sends, receives in ((True, False), (False, True)):
        assert_two_blocks_fit(kernel(LARGE, 256, True, sends, receives), "sm_90a")


@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_dispatch(name: str, arch: str) -> None:
    problem, tokens = PROBLEMS[name]
    ptx = compiled_ptx(LatencyDispatch(problem, tokens, True), arch)
    # The route to each peer in turn, and some rows, each to a set of ranks, whose words are gone through one after the
    # other: whole lines, and nothing that waits for them to arrive.
    assert count(ptx, "st.volatile.global.v4.b32") == (problem.world_size > 1) * (1 + AHEAD * words_of(problem))
    assert count(ptx, "ld.volatile.global.v4.b32") >= 1
    assert count(ptx, "griddepcontrol.wait") == 1
    # Dependents come when all that is awaited has been seen: by blocks that take rows, and by those that take none.
    assert count(ptx, "griddepcontrol.launch_dependents") == 2
    assert count(ptx, "atom.relaxed.gpu.global.add.u32") == 1
    assert "fence.acq_rel" not in ptx and "membar" not in ptx
    # Releases only in reports: of a wait that failed, of an id that no expert has.
    assert count(ptx, "st.release.sys") <= 4
    if name == "uneven":
        assert_epoch_is_held(ptx)
        # Where rows are placed: the leader's update comes after every lane's read, and before what reads it next.
        step = r"bar\.warp\.sync.*\n(?:.*\n){0,8}?.*st\.shared\.b16.*\n(?:.*\n){0,3}?.*bar\.warp\.sync"
        stores = count(ptx, "st.volatile.global.v4.b32")
        assert len(re.findall(step, ptx)) * 2 == count(ptx, "bar.warp.sync") - stores > 0


def assert_epoch_is_held(ptx: str) -> None:
    """The block's threads wait for their loads of the epoch before one of them opens the next epoch."""
    assert 0 < ptx.find("@none nanosleep.u32 20") < ptx.find("atom.relaxed.gpu.global.add.u32")


@pytest.mark.parametrize(("name", "arch"), [
    *(pytest.param(*case, marks=pytest.mark.drawn) for case in (("large", "sm_90a"), ("uneven", "sm_100a"))),
    ("most", "sm_90a"),
])  # fmt: skip
def test_token_major(name: str, arch: str) -> None:
    """The kernel that receives token-major rows stores each row once, with its ids and weights; the one that sends is
    unchanged."""
    problem, tokens = {**PROBLEMS, "most": (MOST, 28)}[name]
    whole = LatencyDispatch(problem, tokens, True, token_major=True)
    assert_two_blocks_fit(whole, arch)
    ptx = compiled_ptx(LatencyDispatch(problem, tokens, True, False, True, token_major=True), arch)
    assert "st.volatile.global.v4.b32" not in ptx and count(ptx, "atom.relaxed.gpu.global.add.u32") == 1
    assert "fence.acq_rel" not in ptx and "membar" not in ptx and ".local" not in ptx
    assert count(ptx, "red.relaxed.cta.shared.add.u32") == 2  # (row, k) of each expert, and dropped ones


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_combine(name: str, weighted: bool, arch: str) -> None:
    problem, tokens = PROBLEMS[name]
    ptx = compiled_ptx(LatencyCombine(problem, tokens, weighted), arch)
    assert count(ptx, "st.volatile.global.v4.b32") == (problem.world_size > 1)
    assert count(ptx, "griddepcontrol.wait") == 1
    assert count(ptx, "griddepcontrol.launch_dependents") == 1
    # Products and sums are each rounded: the same bits as everywhere else.
    assert (count(ptx, "mul.rn.f32") > 0) == weighted and count(ptx, "add.rn.f32") > 0
    assert "fma.rn.f32" not in ptx
    assert "fence.acq_rel" not in ptx and "membar" not in ptx
    if name == "uneven":
        assert_epoch_is_held(ptx)


@pytest.mark.parametrize("kernel", [LatencyDispatch, LatencyCombine])
@pytest.mark.parametrize("instruction", ["bar.warp.sync", "vote.sync"])
def test_lanes_that_are_apart_are_seen(kernel, instruction: str) -> None:
    """`compiled_ptx` looks at all kernels; here at one without its barriers or votes."""
    ptx = compiled_ptx(kernel(LARGE, 256, True), "sm_90a")
    assert lines_apart(ptx.replace(instruction, "nothing"))


@pytest.mark.parametrize("kernel", [LatencyDispatch, LatencyCombine])
def test_split_operations(kernel) -> None:
    """A kernel that only sends waits for nobody and leaves the epoch alone; one that only receives sends nothing."""
    start = compiled_ptx(kernel(LARGE, 256, True, True, False), "sm_90a")
    assert "ld.volatile.global.v4.b32" not in start and "atom.relaxed.gpu.global.add" not in start
    wait = compiled_ptx(kernel(LARGE, 256, True, False, True), "sm_90a")
    assert "st.volatile.global.v4.b32" not in wait and count(wait, "atom.relaxed.gpu.global.add.u32") == 1
    # What only sends has no wait to note.
    assert "red.relaxed.gpu.global.max" not in start and count(wait, "red.relaxed.gpu.global.max.u64") == 1


@pytest.mark.parametrize("name", PROBLEMS)
def test_lines_lie_apart(name: str) -> None:
    """Marked lines begin behind everything else, on lines of their own, and each place holds a row and its weights."""
    problem, tokens = PROBLEMS[name]
    heap = LatencyHeap(problem, tokens)
    assert heap.offset["routes"] >= Heap(problem).nbytes
    for name in ("routes", "lines"):
        assert heap.offset[name] % 128 == 0 and heap.distance[name] % 128 == 0
    assert heap.row_stride % 128 == 0 and PACKET_BYTES % 128 == 0
    assert heap.row_stride // PACKET_BYTES * PAYLOAD_BYTES >= problem.row_bytes + 4 * problem.top_k
    assert packets(PAYLOAD_BYTES) == 1 and packets(PAYLOAD_BYTES + 1) == 2
    assert sum(heap.sizes().values()) == heap.nbytes


def test_bound() -> None:
    """The most tokens that a block can place in shared memory, two blocks a multiprocessor; none with very many
    experts."""
    assert 2 * (MOST_BLOCK_BYTES + 1024) <= 228 * 1024  # the system takes one KiB for each
    many = Problem(8, (256,) * 8, 8, 7168, "bf16", 4096)
    most = {"large": 539, "widest": 269, "uneven": UNEVEN.max_tokens, "alone": ALONE.max_tokens}
    for problem, tokens in [*((PROBLEMS[name][0], most[name]) for name in PROBLEMS), (many, 59), (MOST, 28)]:
        assert most_tokens(problem) == tokens and block_bytes(problem, tokens) <= MOST_BLOCK_BYTES
        assert tokens == problem.max_tokens or block_bytes(problem, tokens + 1) > MOST_BLOCK_BYTES
    assert all(tokens <= most[name] for name, (_, tokens) in PROBLEMS.items())
    assert most_tokens(Problem(8, (1024,) * 8, 8, 7168, "bf16", 4096)) == 0  # counters alone take more
    assert most_tokens(Problem(2, (32768,) * 2, 1, 16, "bf16", 1)) == 0  # their ids do not fit into 16 bits
