"""Throughput kernels compile without a GPU, for Hopper and Blackwell, to the instructions they are meant to have."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import ARCHS, DRAWN_ARCHS, assert_in_registers, compiled_ptx, count

from cute_kernels.heap import Problem
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.publish_tokens import PublishTokens
from cute_kernels.throughput.pull import Pull
from cute_kernels.throughput.pull_scaled import PullScaled
from ep_ops.backends.cute.ahead import throughput_kernels
from ep_ops.config import default_experts

LARGE = Problem(4, (64,) * 4, 8, 7168, "bf16", 4096)
UNEVEN = Problem(2, (3, 5), 4, 8200, "fp32", 100)  # rows of several pieces, the last one short
ALONE = Problem(1, (8,), 32, 128, "fp16", 16)
WIDEST = Problem(8, (128,) * 8, 8, 7168, "bf16", 8192)

LONGEST = "red.relaxed.gpu.global.max.u64"
BULK_IN = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
BULK_OUT = "cp.async.bulk.global.shared::cta.bulk_group"


def flags_without_barrier(ptx: str) -> list[str]:
    """Return the releases of flags, by one thread for its block, that no barrier separates from earlier stores of the
    block. (The emulator does not detect these, because it runs the warps of a block nearly in step.)"""
    found, stored = [], False
    for line in ptx[ptx.index(".visible .entry") :].splitlines():
        if re.search(r"\bbar\.sync|barrier\.cta\.", line):
            stored = False
        stored |= re.search(r"\bst\.global", line) is not None
        if stored and re.search(r"st\.release\.sys\.global\.b64 \[%rd\d+\], %rd", line):
            found.append(line.strip())
    return found


def of_each_kind(problem: Problem) -> list[Any]:
    """One kernel."""
    return list({type(kernel): kernel for kernel in throughput_kernels(problem)}.values())


def check(kernel: Any, arch: str) -> None:
    ptx = compiled_ptx(kernel, arch)
    assert f".target {arch}" in ptx
    assert count(ptx, "elect.sync") == 0, "lanes are elected by hand"
    assert_in_registers(kernel, arch)


@pytest.mark.parametrize("arch", DRAWN_ARCHS)
@pytest.mark.parametrize("kind", dict.fromkeys(map(type, throughput_kernels(LARGE))))
def test_every_kernel(kind: type, arch: str) -> None:
    for kernel in throughput_kernels(LARGE):
        if type(kernel) is kind:
            check(kernel, arch)


@pytest.mark.parametrize("kind", dict.fromkeys(map(type, throughput_kernels(LARGE))))
def test_one_of_each_kind_on_blackwell(kind: type) -> None:
    for kernel in of_each_kind(LARGE):
        if type(kernel) is kind:
            check(kernel, "sm_100a")


@pytest.mark.drawn
@pytest.mark.parametrize("kind", dict.fromkeys(map(type, throughput_kernels(LARGE))))
@pytest.mark.parametrize("problem", [ALONE, UNEVEN, WIDEST], ids=["alone", "uneven", "widest"])
def test_other_problems(problem: Problem, kind: type) -> None:
    for kernel in of_each_kind(problem):
        if type(kernel) is kind:
            assert_in_registers(kernel, "sm_90a")


@pytest.mark.parametrize("arch", ARCHS)
def test_pull(arch: str) -> None:
    ptx = compiled_ptx(Pull(LARGE, True, False, True), arch)
    assert count(ptx, BULK_IN) == 1 and count(ptx, BULK_OUT) == 1
    assert count(ptx, "mbarrier.try_wait") >= 1 and count(ptx, "mbarrier.arrive.expect_tx") == 1
    # Stages are refilled once they have been read out; the block ends when all rows lie in memory.
    assert count(ptx, "cp.async.bulk.wait_group.read") == 1 and count(ptx, "cp.async.bulk.wait_group ") == 1
    assert count(ptx, "griddepcontrol.wait") == 1
    assert count(ptx, "ld.acquire.sys.global") >= 3  # placed, chunk, staged, hello
    assert count(ptx, "fence.proxy.async") >= 1  # what was acquired is fetched by bulk copies
    assert count(ptx, "ld.global.L1::no_allocate.v4") == 0, "no row passes through registers"


@pytest.mark.parametrize(
    ("kernel", "triggers"),
    [
        (Publish(LARGE, True, True, True, False), 1),
        (Publish(LARGE, False, True, False, False), 1),
        (Publish(LARGE, True, False, False, True), 0),
        (PublishTokens(LARGE, True, False, False, True), 0),
        (Pull(LARGE, True, False, True), 1),
        (Pull(LARGE, True, False, True, True), 0),
        (Pull(LARGE, True, False, False), 0),
    ],
    ids=["publish", "publish known", "plan", "plan tokens", "pull", "pull joins", "pull known"],
)
def test_dependents_are_of_the_same_operation(kernel: Any, triggers: int) -> None:
    """A plan ends its operation, and so does a pull without a grid that joins: what is launched behind them must not
    begin while they wait for peers."""
    ptx = compiled_ptx(kernel, "sm_90a")
    assert count(ptx, "griddepcontrol.launch_dependents") == triggers
    if isinstance(kernel, Pull) and triggers:
        at = ptx.index("griddepcontrol.launch_dependents")
        assert re.search(r"@!?%p\d+ bra", ptx[ptx.rindex("bar", 0, at) : at]) or re.search(
            r"@!?%p\d+ griddepcontrol", ptx
        ), "only with blocks that may join"


@pytest.mark.parametrize("arch", ARCHS)
def test_publish(arch: str) -> None:
    ptx = compiled_ptx(Publish(LARGE, True, True, True, False), arch)
    assert not flags_without_barrier(ptx)
    # A chunk passes through shared memory, lies in memory before it is marked, and is announced by another block.
    assert count(ptx, BULK_IN) == 1 and count(ptx, BULK_OUT) == 1
    assert count(ptx, "cp.async.bulk.wait_group.read") == 1 and count(ptx, "cp.async.bulk.wait_group ") == 1
    assert count(ptx, "st.release.gpu.global") == 1 and count(ptx, "ld.acquire.gpu.global") == 1
    assert count(ptx, "fence.acq_rel.sys") == 1 and count(ptx, "st.relaxed.sys.global") >= 1
    assert count(ptx, "griddepcontrol.launch_dependents") == 1
    assert count(ptx, "st.release.sys.global") >= 3  # hello, route, placed, staged
    assert count(ptx, "match.any.sync") >= 1
    assert ptx.count("barrier.cta.red.popc.aligned.u32") == 1  # who has a chunk to announce
    # Sums of counts, which come out the same in whatever order they are added; each rank's first report; and the
    # longest waits.
    atomics = re.findall(r"^\s*(?:@!?%p\d+ )?((?:red|atom)\.\S+)", ptx, re.MULTILINE)
    assert set(atomics) == {"red.relaxed.cta.shared.add.u32", "atom.relaxed.sys.global.exch.b64", LONGEST}
    assert atomics.count("red.relaxed.cta.shared.add.u32") == 5  # asked, mine; entries: all, earlier, of this tile


@pytest.mark.parametrize("arch", ARCHS)
def test_publish_tokens(arch: str) -> None:
    """The same way for rows; what is placed needs no exchange between the blocks of a rank."""
    ptx = compiled_ptx(PublishTokens(LARGE, True, True, True, False), arch)
    assert not flags_without_barrier(ptx)
    assert count(ptx, BULK_IN) == 1 and count(ptx, BULK_OUT) == 1
    assert count(ptx, "st.release.gpu.global") == 1 and count(ptx, "ld.acquire.gpu.global") == 1
    assert count(ptx, "griddepcontrol.launch_dependents") == 1
    # Hello, route, placed, staged; a dispatch of grouped rows has counted flags, too.
    signals = count(ptx, "st.release.sys.global")
    assert 3 <= signals < count(compiled_ptx(Publish(LARGE, True, True, True, False), arch), "st.release.sys.global")
    atomics = re.findall(r"^\s*(?:@!?%p\d+ )?((?:red|atom)\.\S+)", ptx, re.MULTILINE)
    assert set(atomics) == {"red.relaxed.cta.shared.add.u32", "atom.relaxed.sys.global.exch.b64", LONGEST}
    assert atomics.count("red.relaxed.cta.shared.add.u32") == 4  # rows ahead, entries of experts and tiles, dropped


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("route", [True, False], ids=["new", "known"])
def test_pushes(route: bool, arch: str) -> None:
    """A row is visible at the peer before its flag is posted, and a fence stands between the post and the flag."""
    ptx = compiled_ptx(PublishTokens(LARGE, route, True, True, False, pushes=True), arch)
    assert not flags_without_barrier(ptx)
    assert count(ptx, BULK_IN) == 1 and count(ptx, BULK_OUT) == 1
    assert count(ptx, "st.release.gpu.global") == count(ptx, "ld.acquire.gpu.global") == 0, "nothing is announced"
    assert count(ptx, "griddepcontrol.launch_dependents") == 1
    steps = {
        BULK_OUT: "store ", "cp.async.bulk.wait_group.read": "read ", "cp.async.bulk.wait_group": "complete ",
        "st.release.cta.shared.b32": "post ", "ld.acquire.cta.shared.b32": "look ", "fence.acq_rel.sys": "fence ",
        "st.relaxed.sys.global.b64": "flag ",
    }  # fmt: skip
    found = "".join(steps.get(name, "") for name in re.findall(r"^\s*(?:@!?%p\d+ )?([\w.:]+)", ptx, re.MULTILINE))
    # A worker that posts looks whether its outbox is full; the warp that sets flags looks for posts, and posts that it
    # has taken them.
    expected = "store read complete (look post )+complete (look post )+post (look )+fence (flag )+post "
    assert re.fullmatch(expected, found), found


@pytest.mark.parametrize(
    ("world_size", "even", "uneven"),
    [(1, 8190, 8190), (2, 8188, 6369), (8, 8179, 2726), (32, 8140, 826), (72, 8070, 380)],
)
@pytest.mark.parametrize("hidden_size", [8, 7168, 2**18])
def test_tables_and_staging_share_a_block(world_size: int, even: int, uneven: int, hidden_size: int) -> None:
    """Tables and staging share a block for up to as many experts as are allowed if they are spread evenly, or if one
    rank holds all of them."""

    def problem(experts: tuple[int, ...]) -> Problem:
        return Problem(world_size, experts, 1, hidden_size, "bf16", 8)

    def on_one(num_experts: int) -> tuple[int, ...]:
        return num_experts, *(0,) * (world_size - 1)

    assert not problem(default_experts(even + 1, world_size)).fits and not problem(on_one(uneven + 1)).fits
    taken = [default_experts(num_experts, world_size) for num_experts in (world_size, even // 2, even)]
    taken += [on_one(num_experts) for num_experts in (1, uneven // 2, uneven)]
    for made in map(problem, taken):
        assert made.fits
        ring = Publish(made, True, True, True, False).ring
        assert ring.warps >= 1 and ring.piece_bytes >= 16 and ring.piece_bytes % 16 == 0
        assert made.placing_bytes + ring.warps * (ring.stride + 8) <= 227 * 1024


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("residual", [False, True])
def test_combine(arch: str, residual: bool) -> None:
    ptx = compiled_ptx(Combine(LARGE, True, True, False, residual), arch)
    assert count(ptx, BULK_IN) == 2  # pushing and summing
    assert count(ptx, BULK_OUT) == 0 and count(ptx, "st.global.L1::no_allocate.v4") >= 14  # sums leave from registers
    assert count(ptx, "fence.acq_rel.sys") >= 1 and count(ptx, "st.relaxed.sys.global") >= 1  # the outbox
    assert count(ptx, "fence.proxy.async") == 1  # pushed rows are fetched by bulk copies
    assert count(ptx, "fma.rn") == 0, "products are rounded before they are added"
    assert count(ptx, "mul.rn.f32") > 0 and count(ptx, "add.rn.f32") > 0
    tries = re.findall(r"mbarrier\.try_wait\.parity\.shared\.b64 [^;]*;", ptx)
    # Pushing and summing: a look without a time limit, then the wait that may sleep.
    assert [tried.count(",") for tried in tries] == [2, 3, 2, 3]


@pytest.mark.parametrize("arch", ARCHS)
def test_pull_scaled(arch: str) -> None:
    ptx = compiled_ptx(PullScaled(LARGE, False), arch)
    assert count(ptx, BULK_IN) == 2  # slices of gradients, slices of expert rows
    assert count(ptx, BULK_OUT) == 0 and count(ptx, "st.global.L1::no_allocate.v4") >= 7
    assert count(ptx, "griddepcontrol.wait") == 1
