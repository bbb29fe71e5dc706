"""Baselines: dispatch and combine with torch.distributed alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_to_all_single

from .workloads import Traffic, Workload


class SameBytes:
    """all_to_all_single of the rows that must cross, one for each copy of a token, already sorted by destination.

    Nothing is selected, grouped or added up: only the transfer, from and to ordinary tensors.
    """

    def __init__(self, workload: Workload, traffic: Traffic, rank: int, device: torch.device) -> None:
        sends = traffic.sends
        self.leaving = sends[rank]
        self.entering = [row[rank] for row in sends]
        rows = (max(sum(self.leaving), sum(self.entering)), workload.hidden)
        # Sent in turn, so that no cache holds what is sent.
        self.sent = [torch.randn(rows, dtype=workload.torch_dtype, device=device) for _ in range(2)]
        self.received = torch.empty(rows, dtype=workload.torch_dtype, device=device)

    def dispatch(self, i: int) -> None:
        self._exchange(i, self.leaving, self.entering)

    def combine(self, i: int) -> None:
        self._exchange(i, self.entering, self.leaving)

    def pair(self, i: int) -> None:
        self.dispatch(i)
        self.combine(i)

    def _exchange(self, i: int, leaving: list[int], entering: list[int]) -> None:
        sent, received = self.sent[i % 2][: sum(leaving)], self.received[: sum(entering)]
        dist.all_to_all_single(received, sent, entering, leaving)


class Sent(NamedTuple):
    """What follows an `eager_dispatch` needs to know of it."""

    order: Tensor
    grouping: Tensor
    counts: Tensor  # int64 [world_size, local experts]: rows that came from each rank for each expert
    leaving: list[int]
    entering: list[int]


def exchange(rows: Tensor, entering: list[int], leaving: list[int]) -> Tensor:
    """Return the rows of an all-to-all. Differentiable. `entering`, `leaving`: numbers of rows, by rank."""
    arrived = rows.new_empty(sum(entering), rows.shape[1])
    return all_to_all_single(arrived, rows.contiguous(), entering, leaving)


def eager_dispatch(x: Tensor, topk_idx: Tensor, experts: int, world_size: int) -> tuple[Tensor, Sent]:
    """Send tokens with eager PyTorch: sort, exchange counts, exchange rows, group. Returns rows grouped by local
    expert, one for each (token, expert). Differentiable. `experts` is a multiple of `world_size`; no expert id is -1.
    Synchronizes the host once, for the counts."""
    flat = topk_idx.flatten()
    order = flat.argsort(stable=True)
    sorted_rows = x[order // topk_idx.shape[1]]
    counts = torch.bincount(flat, minlength=experts)
    counts_here = torch.empty_like(counts)
    dist.all_to_all_single(counts_here, counts)
    by_rank = torch.stack((counts, counts_here)).view(2, world_size, -1).sum(2).tolist()
    leaving, entering = by_rank
    arrived = exchange(sorted_rows, entering, leaving)
    local = torch.arange(experts // world_size, device=x.device).repeat(world_size)
    grouping = local.repeat_interleave(counts_here, output_size=sum(entering)).argsort(stable=True)
    return arrived[grouping], Sent(order, grouping, counts_here.view(world_size, -1), leaving, entering)


def eager_combine(y: Tensor, topk_weights: Tensor, sent: Sent) -> Tensor:
    """Return the rows of `eager_dispatch` and compute the weighted sum of each token's rows."""
    ungrouped = torch.empty_like(y)
    ungrouped[sent.grouping] = y
    returned = exchange(ungrouped, sent.leaving, sent.entering)
    rows = torch.empty_like(returned)
    rows[sent.order] = returned
    tokens, top_k = topk_weights.shape
    return torch.bmm(topk_weights.to(y.dtype).unsqueeze(1), rows.view(tokens, top_k, -1)).squeeze(1)
