"""Rows gathered from symmetric memory: the same bits as when they are pushed, and nobody reads or writes too early."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from operators import CASES, HIDDEN, case_config, covered, make_comm, ranks
from sharing import SHARING, few_processes, fewer
from torch import Tensor

import ep_ops
from meta_kernels.arguments import CombineGatheredArgs

BF16 = torch.bfloat16
TOKENS = (1, 7, 512, 4096)
STEPS = fewer(100, 12)
DELAY = 3_000_000  # cycles, more than a millisecond: several operations


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cuda").manual_seed(seed + 977 * ranks()[0])


def rows_of(route: ep_ops.Route, alignment: int, count: int, hidden: int, dtype: torch.dtype, seed: int) -> Tensor:
    """[count, H], NaN where nobody may read. Magnitudes differ, so that the order of additions shows."""
    draw = generator(seed)
    spread = torch.randn(count, 1, generator=draw, device="cuda").mul(2).exp()
    rows = (spread * torch.randn(count, hidden, generator=draw, device="cuda")).to(dtype)
    rows[:, 0] = -0.0
    held, padding = covered(route.tensors, alignment, count)
    return torch.where((held | padding)[:, None], rows, torch.nan)


def bits(rows: Tensor) -> Tensor:
    return rows.view(torch.int32 if rows.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_same_bits_as_combine(name, dtype, seed, together):
    rank, world_size = ranks()
    case = cases.route_cases(world_size, seed)[name]
    config = case_config(case, dtype) | {"symmetric_rows": max(1, *case.capacity)}
    rows, topk_idx = case.capacity[rank], case.topk_idx[rank].cuda()
    with make_comm("cute", name, **config) as comm, make_comm("reference", name, **config) as ref:
        route, _ = comm.plan(topk_idx, **case.room(rank), max_tokens=case.max_tokens)
        given = rows_of(route, case.alignment, rows, HIDDEN[dtype], dtype, seed)
        y = comm.empty_rows(rows).copy_(given)
        got = comm.combine_gathered(y, route)
        pushed = comm.combine(given, route)
        torch.cuda.synchronize()
        comm.check_errors()
        expected = ref.combine_gathered(ref.empty_rows(rows).copy_(given), route)
        with together():
            assert not got.isnan().any()
            assert torch.equal(bits(got), bits(pushed)) and torch.equal(bits(got), bits(expected))


def by_rank_config(world_size: int, tokens: int) -> dict[str, Any]:
    """Expert r stands for rank r."""
    return dict(
        num_experts=world_size, hidden_size=7168, top_k=world_size, max_tokens_per_rank=max(tokens, 512),
        alignment=1, symmetric_rows=world_size * tokens,
    )  # fmt: skip


@pytest.mark.parametrize("sms", [2, 24, 132])
@pytest.mark.parametrize("tokens", TOKENS)
def test_one_row_per_token_and_rank(tokens, sms, seed, together):
    """A gathering combine of one row for each token and rank returns the sum of these rows."""
    rank, world_size = ranks()
    if sms == 2 and tokens > 512:
        pytest.skip("slow")
    if SHARING > 1 and tokens > 512:
        pytest.skip("needs a GPU for each rank: takes too much memory where several share one")
    capacity = world_size * tokens
    config = by_rank_config(world_size, tokens)
    mine = tokens if rank % 2 == 0 else tokens // 2 + tokens % 2
    idx = every_rank(mine)
    idx[torch.rand(idx.shape, generator=generator(seed), device="cuda") < 0.1] = -1
    with make_comm("cute", "by rank", combine_sms=sms, **config) as comm:
        route, dropped = comm.plan(idx, capacity=capacity)
        given = rows_of(route, 1, capacity, 7168, BF16, seed)
        y = comm.empty_rows(capacity).copy_(given)
        got = comm.combine_gathered(y, route)
        pushed = comm.combine(given, route)
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert not dropped.any() and torch.equal(bits(got), bits(pushed))


def steps_config(world_size: int) -> dict[str, Any]:
    return dict(
        num_experts=world_size, hidden_size=1024, top_k=world_size, max_tokens_per_rank=256, alignment=1,
        symmetric_rows=world_size * 256,
    )  # fmt: skip


def every_rank(tokens: int) -> Tensor:
    """topk_idx of tokens that all have a row at every rank."""
    return torch.arange(ranks()[1], dtype=torch.int32, device="cuda").repeat(tokens, 1)


def stamped(comm: ep_ops.Communicator, y: Tensor, number: Tensor | int) -> None:
    """Rows that tell rank and step, in small integers."""
    y.fill_(0).add_(number % 31 + comm.rank)


def told(comm: ep_ops.Communicator, idx: Tensor, number: Tensor | int) -> Tensor:
    """Return the sum of each token's stamped rows, [T, 1]."""
    value = torch.arange(comm.world_size, device="cuda") + number % 31
    return (value * (idx >= 0)).sum(1, keepdim=True).to(BF16)


@pytest.mark.parametrize("slow", ["nobody", "a writer", "a reader"])
def test_rows_are_overwritten_at_once(slow, seed, together):
    """Each step writes over the rows of the step before, without any wait, while one rank lags behind: it writes its
    rows late, or fetches with a single block."""
    rank, world_size = ranks()
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    with make_comm("cute", "overwrite", **steps_config(ranks()[1])) as comm:
        comm.warmup()
        y = comm.empty_rows(comm.symmetric_rows)
        stamped(comm, y, 0)
        bad += (y[:256] != told(comm, every_rank(256), 0)).sum() * 0  # loads what else runs below
        torch.cuda.synchronize()
        sms = comm.backend.budget.gather
        for number in range(STEPS):
            idx = every_rank(256 - number % 7)
            idx[torch.rand(idx.shape, generator=generator(seed + number), device="cuda") < 0.2] = -1
            route, _ = comm.plan(idx, capacity=comm.symmetric_rows)
            lags = number % 5 == 3 and rank == (number // 5) % world_size
            if lags and slow == "a writer":
                torch.cuda._sleep(DELAY)
            stamped(comm, y, number)
            comm.backend.budget.gather = 1 if lags and slow == "a reader" else sms
            out = comm.combine_gathered(y, route)
            y.fill_(torch.nan)
            bad += (out != told(comm, idx, number)).sum()
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert int(bad) == 0


def test_graph_replay(together):
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    with make_comm("cute", "replay", **steps_config(ranks()[1])) as comm:
        comm.warmup()
        idx = every_rank(256)
        route, _ = comm.plan(idx, capacity=comm.symmetric_rows)
        number = torch.zeros((), dtype=torch.int64, device="cuda")
        y = comm.empty_rows(comm.symmetric_rows)

        def step() -> None:
            number.add_(1)
            stamped(comm, y, number)
            out = comm.combine_gathered(y, route)
            y.fill_(torch.nan)
            bad.add_((out != told(comm, idx, number)).sum())

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):  # an odd number: replays begin with either bank of the flags
                step()
        for i in range(STEPS):
            graph.replay()
            if i % 10 == 0:  # eager operations in between
                stamped(comm, y, 5)
                bad += (comm.combine_gathered(y, route) != told(comm, idx, 5)).sum()
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert int(bad) == 0 and int(number) == 3 * STEPS + 1
        del graph


def test_gradients(seed, together):
    with make_comm("cute", "gradients", **steps_config(ranks()[1])) as comm:
        idx = every_rank(100)
        x = torch.randn(100, 1024, generator=generator(seed), device="cuda").to(BF16)
        results = []
        for gathered in (True, False):
            leaf = x.clone().requires_grad_()
            sent = comm.dispatch(leaf, idx, capacity=comm.symmetric_rows)
            made = sent.x * 3
            if gathered:
                out = comm.combine_gathered(comm.empty_rows(made.shape[0]).copy_(made), sent.route)
            else:
                out = comm.combine(made, sent.route)
            results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaf)])
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            for one, other in zip(*results, strict=True):
                assert torch.equal(one, other) and not one.isnan().any()


@few_processes
@pytest.mark.parametrize(
    ("kernel", "mode"),
    [("generated", None), ("generated", "reduce-overhead"), ("product", None), ("copied", None)],
)
def test_compiled(kernel, mode, seed, together):
    """Rows that compiled code makes lie where they are fetched, without a copy where its kernels make them, in CUDA
    graphs, too; the same bits as the pushing combine's."""
    torch._dynamo.reset()
    config = steps_config(ranks()[1])
    with make_comm("cute", f"compiled {kernel} {mode}", **config) as comm, torch.no_grad():
        comm.warmup()
        w = torch.randn(1024, 1024, generator=generator(seed), device="cuda").to(BF16) / 32
        placed, inner = [], comm.backend._combine_gathered
        memory = comm.empty_rows(1).data_ptr()

        def layer(x: Tensor, idx: Tensor, gathered: bool) -> Tensor:
            sent = comm.dispatch(x, idx, capacity=comm.symmetric_rows)
            own = torch.where(ep_ops.nn.expert_of_rows(sent.route)[:, None] >= 0, sent.x, 0)
            y = {"generated": torch.tanh, "product": lambda x: x @ w, "copied": lambda x: x.sort(1).values}[kernel](own)
            return comm.combine_gathered(y, sent.route) if gathered else comm.combine(y, sent.route)

        def note(a: CombineGatheredArgs) -> Tensor:
            placed.append(a.y.data_ptr() == memory)
            return inner(a)

        comm.backend._combine_gathered = note
        comm.calls.forget()
        compiled = torch.compile(layer, fullgraph=True, mode=mode)
        wrong = 0
        for number in range(6):
            idx = every_rank(200)
            idx[torch.rand(idx.shape, generator=generator(seed + number), device="cuda") < 0.2] = -1
            x = torch.randn(200, 1024, generator=generator(seed + number), device="cuda").to(BF16)
            got, expected = (run(x, idx, gathered).clone() for run, gathered in ((compiled, True), (layer, False)))
            # A product of another library's choice, and a generated tanh, may differ in the last place.
            wrong += int((got.float() - expected.float()).abs().max() > 0.02 * expected.float().abs().max())
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert wrong == 0 and placed and all(placed)


def test_rows_elsewhere_are_copied(seed, together):
    with make_comm("cute", "elsewhere", **steps_config(ranks()[1])) as comm:
        route, _ = comm.plan(every_rank(100), capacity=comm.symmetric_rows)
        given = rows_of(route, 1, comm.symmetric_rows, 1024, BF16, seed)
        comm.empty_rows(comm.symmetric_rows).fill_(torch.nan)
        got, pushed = comm.combine_gathered(given, route), comm.combine(given, route)
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert torch.equal(bits(got), bits(pushed))


def test_rejections(together):
    with make_comm("cute", "rejections", **steps_config(ranks()[1])) as comm:
        idx = torch.zeros(4, comm.world_size, dtype=torch.int32, device="cuda")
        route, _ = comm.plan(idx, capacity=16)
        y = comm.empty_rows(16)
        with together():
            with pytest.raises(ValueError, match="y lies in symmetric memory, and not at its beginning"):
                comm.combine_gathered(comm.empty_rows(20)[4:], route)
            with pytest.raises(ValueError, match="the symmetric_rows of"):
                comm.empty_rows(comm.symmetric_rows + 1)
    with make_comm("cute", "without", **steps_config(ranks()[1]) | {"symmetric_rows": 0}) as comm:
        route, _ = comm.plan(idx, capacity=16)
        with together(), pytest.raises(ValueError, match="symmetric_rows is 0"):
            comm.combine_gathered(torch.zeros_like(y), route)


def test_all_ranks_must_gather(together):
    rank, world_size = ranks()
    if world_size == 1:
        pytest.skip("needs several ranks")
    comm = make_comm("cute", "mixed", **steps_config(ranks()[1]))
    comm.warmup()
    idx = torch.zeros(4, world_size, dtype=torch.int32, device="cuda")
    route, _ = comm.plan(idx, capacity=comm.symmetric_rows)
    y = comm.empty_rows(comm.symmetric_rows).zero_()
    torch.cuda.synchronize()
    if rank == 0:
        comm.combine(y, route)
    else:
        comm.combine_gathered(y, route)
    torch.cuda.synchronize()
    with together():
        with pytest.raises(RuntimeError, match="call operators in different orders"):
            comm.check_errors()
    comm.destroy()
