"""Combine of one row for each copy of a token: experts as many as ranks, or added up already.

As many bytes cross as in a combine of expert-grouped rows. The owners gather the rows from symmetric memory, or
the ranks that hold them push them from an ordinary tensor.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ep_ops import Communicator

from .operators import Calls, relative_error
from .workloads import goes_to

ROW_OPERATORS = ("combine_gathered", "combine_pushed")


def by_rank(given: Communicator) -> Communicator:
    """A communicator like `given` in which an expert stands for a rank. Collective."""
    ranks = given.world_size
    config = dataclasses.replace(
        given.config, name="", num_experts=ranks, experts_per_rank=(), top_k=ranks, alignment=1, latency_max_tokens=0,
        symmetric_rows=ranks * given.max_tokens_per_rank,
    )  # fmt: skip
    return Communicator(given.group, config, device=given.device)


class RankCalls:
    """Everything of it that is timed of one workload, along the routes of `calls`; method `f(i)` uses route i.
    Collective."""

    def __init__(self, comm: Communicator, calls: Calls) -> None:
        self.comm = comm
        ranks, experts, tokens = comm.world_size, calls.workload.experts, calls.workload.tokens
        rank = torch.arange(ranks, dtype=torch.int32, device=comm.device)
        self.routes = []
        for s in calls.sets:
            there = goes_to(s.topk_idx, experts, ranks).T
            topk_idx = torch.where(there, rank, -1).contiguous()
            self.routes.append(comm.plan(topk_idx, capacity=ranks * tokens, max_tokens=tokens)[0])
        self.rows = comm.empty_rows(ranks * tokens)
        self.plain = torch.randn(self.rows.shape, dtype=self.rows.dtype, device=comm.device)
        self.rows.copy_(self.plain)

    def combine_gathered(self, i: int) -> Tensor:
        return self.comm.combine_gathered(self.rows, self.routes[i % len(self.routes)])

    def combine_pushed(self, i: int) -> Tensor:
        return self.comm.combine(self.plain, self.routes[i % len(self.routes)])

    def errors(self) -> dict[str, float]:
        """Of sums of rows that hold their rank's number, from 1: the worst row's relative error."""
        topk_idx, given = self.routes[0].topk_idx, self.plain.clone()
        self.plain.fill_(self.comm.rank + 1)
        self.rows.copy_(self.plain)
        expected = (topk_idx + 1).sum(1, keepdim=True).expand(-1, self.comm.hidden_size)
        found = {op: relative_error(getattr(self, op)(0), expected) for op in ROW_OPERATORS}
        self.plain.copy_(given)
        self.rows.copy_(given)
        return found
