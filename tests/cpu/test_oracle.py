"""The oracle of the GPU tests on many ranks, against plain loops."""

from __future__ import annotations

import sys
from pathlib import Path

import cases
import pytest
import torch
from torch import Tensor

from ep_ops import arrivals

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from oracle import Oracle, World

HIDDEN = 8


def padded(values: Tensor, rows: int) -> Tensor:
    """NaN in rows behind those that were drawn."""
    out = torch.full((rows, *values.shape[1:]), torch.nan, dtype=values.dtype)
    out[: values.shape[0]] = values
    return out


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("name", cases.CASE_NAMES)
def test_against_loops(name: str, world_size: int) -> None:
    seed = cases.fresh_seed()
    case = cases.route_cases(world_size, seed)[name]
    world, plans = World(case, HIDDEN, torch.bfloat16, seed), cases.expected_plan(case)
    ranks = range(world_size)
    tokens = [cases.Tokens(world.x(r), world.weights(r)) for r in ranks]
    received = cases.expected_dispatch(case, plans, tokens)
    oracles = [Oracle(world, r) for r in ranks]
    y, weights = oracles[0].outputs()
    all_y = [padded(rows, case.capacity[r]) for r, rows in enumerate(y)]
    all_weights = [padded(rows, case.capacity[r]) for r, rows in enumerate(weights)]
    home = cases.expected_combine(case, plans, all_y, all_weights, [t.x for t in tokens])
    for oracle, plan, rows, tokens_home, mine in zip(oracles, plans, received, home, tokens, strict=True):
        for name_, expected in (("send_rows", plan.send_rows), ("offs", plan.offs), ("counts", plan.counts)):
            assert torch.equal(getattr(oracle, name_).int(), expected), name_
        assert torch.equal(oracle.dropped.int(), plan.dropped)
        copies, owned_rows = oracle.copy_lists(case.max_tokens)
        lists = arrivals.views(plan.arrivals, case.capacity[oracle.rank])
        assert torch.equal(lists.copies[: copies.shape[0]].long(), copies)
        assert torch.equal(lists.copies[copies.shape[0], 0].long(), torch.tensor(owned_rows.shape[0]))
        assert torch.equal(lists.owned[: owned_rows.shape[0]].long(), owned_rows)
        assert torch.equal(lists.sources.long(), oracle.sources())
        owned, padding = oracle.covered()
        assert torch.equal(owned | padding, rows.covered)
        assert torch.equal(oracle.recv([t.x for t in tokens])[rows.covered], rows.x[rows.covered])
        scalars = oracle.recv_scalars([t.weights for t in tokens])
        assert torch.equal(scalars[rows.covered], rows.weights[rows.covered])
        assert torch.equal(oracle.combined(y, weights, mine.x), tokens_home)
