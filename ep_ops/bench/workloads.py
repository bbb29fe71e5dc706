"""Workloads: sizes, routes, and the rows and bytes that a route moves."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from ep_ops.config import default_experts

ROUTINGS = ("balanced", "skewed")
"""How experts are drawn. There is "hot 0.2", too: that part of the tokens choose among the experts of rank 0 alone,
to which 0.2 x ranks + 0.8 times the mean rows then come."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALIGNMENT = 16
ZIPF_EXPONENT = 0.8


@dataclasses.dataclass(frozen=True)
class Workload:
    """One MoE layer's exchange. `tokens` is of each rank; `routing` is one of `ROUTINGS`, or "hot 0.2"."""

    tokens: int = 4096
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    routing: str = "balanced"
    dtype: str = "bf16"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.torch_dtype.itemsize

    def __str__(self) -> str:
        return f"T={self.tokens} H={self.hidden} E={self.experts} K={self.top_k} {self.routing} {self.dtype}"


def draw_route(workload: Workload, rank: int, seed: int, device: torch.device, world_size: int = 1) -> Tensor:
    """Return distinct experts of each token of `rank`, int32 [T, K], equal for equal arguments. Balanced: every set of
    K experts is equally likely. Skewed: experts are drawn without replacement with probabilities 1 / (1 + i) ** 0.8,
    where i is an expert's position in a random order that all ranks share."""
    draw = torch.Generator(device).manual_seed(seed * 1009 + rank)
    shape = (workload.tokens, workload.experts)
    noise = torch.rand(shape, generator=draw, device=device).clamp_min_(1e-12)
    if workload.routing == "skewed":
        order = torch.randperm(workload.experts, generator=torch.Generator().manual_seed(seed)).to(device)
        # Adding Gumbel noise to log probabilities and taking the largest draws without replacement.
        noise = -(-noise.log()).clamp_min_(1e-12).log() - ZIPF_EXPONENT * (order + 1).log()
    elif workload.routing.startswith("hot "):
        part = float(workload.routing.removeprefix("hot "))
        hot = torch.rand((workload.tokens, 1), generator=draw, device=device) < part
        noise[:, default_experts(workload.experts, world_size)[0] :] -= 2.0 * hot
    elif workload.routing != "balanced":
        raise ValueError(f"routing is {workload.routing!r}; allowed: one of {ROUTINGS}, or like 'hot 0.2'")
    return noise.topk(workload.top_k, dim=1).indices.int()


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a route moves. `rows[s][d]`: rows from rank s to rank d, one for each copy of a token."""

    rows: tuple[tuple[int, ...], ...]
    expanded: tuple[int, ...]  # rows of each rank once every (token, expert) has its own
    capacity: int  # receive rows that hold everything on every rank, padding included

    @property
    def crossing(self) -> int:
        """Rows that enter or leave, over NVLink, the rank with most of them: it sets the pace."""
        ranks = range(len(self.rows))
        leaving = [sum(self.rows[r][d] for d in ranks if d != r) for r in ranks]
        entering = [sum(self.rows[s][r] for s in ranks if s != r) for r in ranks]
        return max(*leaving, *entering)

    @property
    def sends(self) -> list[list[int]]:
        """`rows` without what stays on its own rank."""
        return [[0 if s == d else n for d, n in enumerate(row)] for s, row in enumerate(self.rows)]


def holders(topk_idx: Tensor, experts: int, world_size: int) -> Tensor:
    """Return the rank that holds each expert, int64 [T, K]; -1 for no expert."""
    first = torch.tensor([0, *default_experts(experts, world_size)], device=topk_idx.device).cumsum(0)
    return torch.bucketize(topk_idx.long(), first, right=True) - 1


def goes_to(topk_idx: Tensor, experts: int, world_size: int) -> Tensor:
    """Return which tokens of `topk_idx` are sent to each rank, bool [W, T]."""
    rank = holders(topk_idx, experts, world_size)
    return torch.stack([(rank == r).any(1) for r in range(world_size)])


def rows_by_rank(topk_idx: Tensor, experts: int, world_size: int) -> Tensor:
    """Return the number of tokens of `topk_idx` that are sent to each rank, int64 [W], without duplicates."""
    return goes_to(topk_idx, experts, world_size).sum(1)


def rows_by_expert(topk_idx: Tensor, experts: int) -> Tensor:
    """Return the number of rows of each expert, int64 [E]."""
    return torch.bincount(topk_idx[topk_idx >= 0].flatten().long(), minlength=experts)


def traffic_of(by_rank: Tensor, by_expert: Tensor) -> Traffic:
    """Return the traffic, given `rows_by_rank` of every rank [W, W] and `rows_by_expert` summed over ranks [E]."""
    held = default_experts(by_expert.numel(), by_rank.shape[0])
    padded = ((by_expert + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).cpu().split(held)
    return Traffic(
        rows=tuple(map(tuple, by_rank.tolist())),
        expanded=tuple(int(part.sum()) for part in by_expert.cpu().split(held)),
        capacity=max(ALIGNMENT, *(int(part.sum()) for part in padded)),
    )


def measure_traffic(topk_idx: Tensor, experts: int, world_size: int) -> Traffic:
    """Return the traffic of the routes of all ranks. Collective."""
    by_rank = rows_by_rank(topk_idx, experts, world_size)
    by_expert = rows_by_expert(topk_idx, experts)
    if world_size == 1:
        return traffic_of(by_rank[None], by_expert)
    gathered = [torch.empty_like(by_rank) for _ in range(world_size)]
    dist.all_gather(gathered, by_rank)
    dist.all_reduce(by_expert)
    return traffic_of(torch.stack(gathered), by_expert)
