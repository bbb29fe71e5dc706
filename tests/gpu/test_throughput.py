"""Kernels against the reference backend, to the bit, on every kind of route and size."""

from __future__ import annotations

import cases
import pytest
import torch
from operators import CASES, Call, case_config, compare, make_comm, of_kernels, ranks, run_all, size_config
from sharing import SHARING


def inputs(seed: int, tokens: int, hidden: int, top_k: int, rows: int, dtype: torch.dtype):
    draw = torch.Generator(device="cuda").manual_seed(seed + 977 * ranks()[0])

    def normal(*shape):
        return torch.randn(*shape, generator=draw, device="cuda")

    x, y = normal(tokens, hidden).to(dtype), normal(rows, hidden).to(dtype)
    weights = torch.rand(tokens, top_k, generator=draw, device="cuda") * 2 - 0.5
    row_weights = torch.rand(rows, generator=draw, device="cuda") * 2 - 0.5
    return x, weights, y, row_weights


SIZES = (120, 2880, 7168, 8192)
WIDEST = dict(num_experts=1024, hidden_size=128, top_k=32, max_tokens_per_rank=48)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_operator(name, dtype, seed, together):
    rank, world_size = ranks()
    case = cases.route_cases(world_size, seed)[name]
    config = case_config(case, dtype)
    hidden = config["hidden_size"]
    call = Call(case.topk_idx[rank].cuda(), case.capacity[rank], case.alignment, case.slots[rank], case.max_tokens)
    given = inputs(seed, call.topk_idx.shape[0], hidden, case.top_k, call.capacity, dtype)
    with make_comm("cute", name, **config) as comm, make_comm("reference", name, **config) as ref:
        got = run_all(comm, call, *given)
        torch.cuda.synchronize()
        comm.check_errors()
        expected = run_all(ref, call, *given)
        with together():
            compare(got, expected, call)


@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("tokens", [0, 1, 7, 64, 512, 4096])
def test_sizes(tokens, hidden, seed, together):
    if SHARING > 1 and tokens * hidden > 512 * 1024:
        pytest.skip("needs a GPU for each rank: takes too much memory where several share one")
    check_size(size_config(hidden), tokens, max(tokens, 1), seed, together)


def test_most_experts(seed, together):
    """The widest route: 1024 experts, 32 of them for each token."""
    check_size(WIDEST, 40, 48, seed, together)


def check_size(config, tokens, bound, seed, together):
    rank, _ = ranks()
    experts, top_k, hidden = config["num_experts"], config["top_k"], config["hidden_size"]
    draw = torch.Generator(device="cuda").manual_seed(seed + rank)
    mine = tokens if rank % 2 == 0 else tokens // 2 + tokens % 2
    idx = torch.rand(mine, experts, generator=draw, device="cuda").argsort(1)[:, :top_k].int()
    with make_comm("cute", "sizes", **config) as comm, make_comm("reference", "sizes", **config) as ref:
        capacity = (bound * top_k * 5 // 4 + experts * 16) // 16 * 16
        call = Call(idx, capacity, 16, 0, bound)
        given = inputs(seed, mine, hidden, top_k, capacity, torch.bfloat16)
        got = run_all(comm, call, *given)
        torch.cuda.synchronize()
        comm.check_errors()
        expected = run_all(ref, call, *given)
        with together():
            compare(got, expected, call)


def test_budgets(seed, together):
    """The bits are the same whatever multiprocessors the kernels get, another number on each rank."""
    rank, world_size = ranks()
    case = cases.route_cases(world_size, seed)["random"]
    config = case_config(case, torch.bfloat16)
    call = Call(case.topk_idx[rank].cuda(), case.capacity[rank], case.alignment, case.slots[rank], case.max_tokens)
    given = inputs(seed, call.topk_idx.shape[0], config["hidden_size"], case.top_k, call.capacity, torch.bfloat16)
    with make_comm("cute", "budgets", **config) as comm, make_comm("reference", "budgets", **config) as ref:
        expected = run_all(ref, call, *given)
        budget = of_kernels(comm).budget
        most = budget.most_dispatch, budget.most_combine
        for dispatch, combine in ((1, 2), (min(2 + rank, most[0]), min(7 + rank, most[1])), most):
            with comm.sm_budget(dispatch=dispatch, combine=combine):
                got = run_all(comm, call, *given)
            torch.cuda.synchronize()
            comm.check_errors()
            with together():
                compare(got, expected, call)
        with pytest.raises(ValueError, match="dispatch is"), comm.sm_budget(dispatch=most[0] + 1):
            pass
