"""The same bits on 1 to 72 ranks, throughput and latency kernels, on as many processes as were started: one launch with
72 runs all counts, each on the first so many ranks. They may share one GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from operators import of_kernels, ranks
from oracle import Oracle, World
from sharing import TURNS
from torch import Tensor

import ep_ops
from ep_ops import arrivals
from ep_ops.backends.cute.sizing import heap_of

COUNTS = (1, 2, 3, 4, 8, 16, 17, 18, 30, 31, 32, 33, 48, 64, 72)
MAX_TOKENS = 48
POISON = 0xA5
FEW = 20
"""A call with this bound runs on the latency kernels, one with `MAX_TOKENS` on the throughput kernels."""
SAME = ("random", "all_to_one_rank", "no_tokens_on_last_rank", "over_capacity", "nothing_to_last_rank", "padded")
"""Routes that one communicator can take."""
GROUPS = (
    ("even", SAME, 24, torch.bfloat16),
    ("uneven", ("uneven_experts",), 136, torch.float32),
    ("wide", ("top_8_wide",), 1032, torch.float16),
)


def config_of(case: cases.RouteCase, hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        num_experts=case.num_experts, experts_per_rank=case.experts_per_rank, hidden_size=hidden, top_k=case.top_k,
        max_tokens_per_rank=MAX_TOKENS, dtype=dtype, latency_max_tokens=FEW,
    )  # fmt: skip


@functools.cache
def first_ranks(count: int) -> Any:
    """Collective over all processes."""
    return dist.new_group(range(count)) if dist.is_initialized() else None


@pytest.mark.parametrize("name", [name for name, *_ in GROUPS])
@pytest.mark.parametrize("count", COUNTS)
def test_ranks(count, name, seed, together):
    rank, world_size = ranks()
    if count > world_size:
        pytest.skip(f"needs {count} processes; this run has {world_size}")
    group = first_ranks(count)
    _, names, hidden, dtype = next(made for made in GROUPS if made[0] == name)
    if count > 33:
        names = names[:4]
    with together():
        if rank < count:
            made = cases.route_cases(count, seed)
            rows = max(max(made[n].capacity) for n in names)
            config = config_of(made[names[0]], hidden, dtype) | {"symmetric_rows": rows}
            with ep_ops.Communicator(
                group, backend="cute", device="cuda", timeout=10.0 * TURNS, name=f"{name} {count}", **config
            ) as comm:
                assert of_kernels(comm).latency.tokens == FEW
                guard = poisoned_guards(comm)
                for n in names:
                    check(comm, World(made[n], hidden, dtype, seed), MAX_TOKENS)
                    check(comm, World(few_tokens(made[n]), hidden, dtype, seed + 1), FEW)
                check_captured(comm, World(few_tokens(made[names[0]]), hidden, dtype, seed + 2))
                for guarded in guard:
                    assert (guarded == POISON).all(), "a kernel wrote behind a buffer"


def poisoned_guards(comm: ep_ops.Communicator) -> list[Tensor]:
    """Views of what lies behind the buffers of this rank's symmetric memory, filled with `POISON`."""
    guards = [of_kernels(comm).memory.local[begin:end] for begin, end in heap_of(comm.config).guards]
    for guarded in guards:
        guarded.fill_(POISON)
    torch.cuda.synchronize()
    return guards


def few_tokens(case: cases.RouteCase) -> cases.RouteCase:
    return dataclasses.replace(case, topk_idx=tuple(idx[:FEW] for idx in case.topk_idx), max_tokens=FEW)


def equal(what: str, got: Tensor, expected: Tensor) -> None:
    """Bit for bit but for the sign of zero, where the expected ones are not NaN."""
    expected = expected.to(got.dtype)
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    asked = ~expected.isnan()
    got = got.cpu()
    wrong = (got[asked] != expected[asked]).sum()
    assert not wrong, f"{what}: {wrong} of {asked.sum()} numbers differ"


def check(comm: ep_ops.Communicator, world: World, max_tokens: int) -> None:
    """Every operator on one route; few tokens and many take other kernels."""
    case, rank = world.case, comm.rank
    oracle = Oracle(world, rank)
    all_ranks = range(case.world_size)
    y, row_weights = oracle.outputs()
    xs, entry_weights = [world.x(r) for r in all_ranks], [world.weights(r) for r in all_ranks]
    idx, x, weights = case.topk_idx[rank].cuda(), xs[rank].cuda(), entry_weights[rank].cuda()
    sizes = dict(**case.room(rank), alignment=case.alignment, max_tokens=max_tokens)
    owned, padding = oracle.covered()
    used = oracle.used[rank]
    mine, mine_weights = torch.full((owned.numel(), world.hidden), torch.nan), torch.full((owned.numel(),), torch.nan)
    mine[:used] = torch.where(owned[:used, None], y[rank].float(), torch.nan)  # nobody may read the others
    mine_weights[:used] = torch.where(owned[:used], row_weights[rank], torch.nan)
    given, given_weights = mine.to(world.dtype).cuda(), mine_weights.cuda()

    sent = comm.dispatch(x, idx, weights, **sizes)
    torch.cuda.synchronize()
    comm.check_errors()
    check_route(sent.route, oracle, max_tokens)
    equal("dropped", sent.dropped, oracle.dropped)
    equal("recv_x", sent.x, oracle.recv(xs))
    equal("recv_weights", sent.weights, oracle.recv_scalars(entry_weights))
    equal("combine", comm.combine(given, sent.route, given_weights), oracle.combined(y, row_weights))
    with_residual = comm.combine(given, sent.route, given_weights, residual=x)
    equal("residual", with_residual, oracle.combined(y, row_weights, xs[rank]))
    along = (*sent.route.tensors, *sent.route.ints, comm.name)
    if max_tokens == FEW:
        started = comm.dispatch_start(x, idx, weights, **sizes)
        split = comm.dispatch_wait(started)
        check_route(split.route, oracle, max_tokens)
        equal("split dispatch", split.x, oracle.recv(xs))
        summed = comm.combine_wait(comm.combine_start(given, split.route, given_weights))
        equal("split combine", summed, oracle.combined(y, row_weights))
    else:
        planned, _ = comm.plan(idx, **sizes)
        check_route(planned, oracle, max_tokens)
        equal("planned", comm.dispatch_planned(x, planned).x, oracle.recv(xs))
        rows = comm.empty_rows(case.capacity[rank]).copy_(given)
        equal("gathered", comm.combine_gathered(rows, planned), oracle.combined(y, None))
        grad_x, grad_weights = torch.ops.ep.dispatch_backward(given, given_weights, *along)
        equal("dispatch backward", grad_x, oracle.combined(y, None))
        equal("gradients of weights", grad_weights, oracle.returned(row_weights))
        rows_back, dots = torch.ops.ep.combine_backward(
            x, given, given_weights, *along[:5], case.capacity[rank], *along[5:]
        )
        g = oracle.recv(xs).float()
        scaled = (g * mine_weights[:, None]).to(world.dtype)
        scaled[padding] = 0
        equal("combine backward", rows_back, scaled)
        exact = (g[owned].double() * given.cpu()[owned].double()).sum(1)
        torch.testing.assert_close(dots.cpu()[owned].double(), exact, rtol=2e-3, atol=2e-2)
        assert not dots.cpu()[padding].any()
    torch.cuda.synchronize()
    comm.check_errors()


def check_route(route: ep_ops.Route, oracle: Oracle, max_tokens: int) -> None:
    copies, owned = oracle.copy_lists(max_tokens)
    equal("send_rows", route.send_rows, oracle.send_rows)
    equal("offs", route.offs, oracle.offs)
    equal("counts", route.counts, oracle.counts)
    got = arrivals.views(route.arrivals, route.num_rows)
    equal("sources", got.sources, oracle.sources())
    equal("copies", got.copies[: copies.shape[0]], copies)
    equal("number of owned rows", got.copies[copies.shape[0], 0], torch.tensor(owned.shape[0]))
    equal("owned", got.owned[: owned.shape[0]], owned)
    askers = torch.full((route.num_rows,), -1)
    askers[owned[:, 0]] = owned[:, 1]
    equal("recv_from", route.recv_from, askers)


def check_captured(comm: ep_ops.Communicator, world: World) -> None:
    """Dispatch and combine of both kinds of kernel, replayed on other tokens than were captured."""
    case, rank = world.case, comm.rank
    oracle = Oracle(world, rank)
    idx = case.topk_idx[rank].cuda()
    x = torch.zeros(idx.shape[0], world.hidden, dtype=world.dtype, device="cuda")
    sizes = dict(**case.room(rank), alignment=case.alignment)

    def step() -> list[Tensor]:
        outs = []
        for bound in (MAX_TOKENS, FEW):
            sent = comm.dispatch(x, idx, **sizes, max_tokens=bound)
            outs += [sent.x, comm.combine(sent.x, sent.route)]
        return outs

    step()
    torch.cuda.synchronize()
    dist.barrier(comm.group) if comm.world_size > 1 else None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outs = step()
    xs = [world.x(r) for r in range(case.world_size)]
    x.copy_(xs[rank])
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    comm.check_errors()
    # Each rank has the sum of as many rows as the token has on it, each equal to the token.
    home = oracle.combined([Oracle(world, r).recv(xs) for r in range(case.world_size)], None)
    for i in range(0, len(outs), 2):
        equal("replayed dispatch", outs[i], oracle.recv(xs))
        equal("replayed combine", outs[i + 1], home)


def configs(count: int, seed: int) -> list[dict[str, Any]]:
    """Return the configurations of the communicators of so many ranks."""
    made = cases.route_cases(count, seed)
    return [config_of(made[names[0]], hidden, dtype) for _, names, hidden, dtype in GROUPS]
