"""Losses and bias updates that balance the load of experts over the tokens of all ranks.

The losses return the same value on all ranks: the value that one process with all tokens would compute. The average of
their gradients over the ranks of ``group``, which DistributedDataParallel and FSDP2 compute, is the gradient of that
value, even if ranks have different numbers of tokens. Add them to the loss of each rank, times a coefficient that is
the same on all ranks. They are collective: every rank of ``group`` calls them in the same order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ep_ops.formats import exact_dtype
from ep_ops.records import check_types


def load_balancing_loss(logits: Tensor, topk_idx: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the load-balancing loss of Switch Transformers for top-k routing: E · sum over experts of f · P.

    f is the fraction of all choices that select an expert, and P is its mean probability (softmax of the logits). The
    loss is 1 if all experts are chosen equally often, and at most E. Gradients flow through P.

    Args:
        logits: the router's scores [..., E].
        topk_idx: the chosen experts [..., K]; -1 means no expert. Tokens without an expert do not count.
        group: ranks whose tokens count; None: the default group, or this process if torch.distributed is not
            initialized.

    Returns:
        Tensor: float32 [] (float64 if the logits are).

    Raises:
        TypeError: ``logits`` or ``topk_idx`` is not a tensor.
        ValueError: they have different numbers of tokens.
    """
    _check_tokens(logits, topk_idx)
    num_experts = logits.shape[-1]
    logits, topk_idx = logits.reshape(-1, num_experts), topk_idx.reshape(-1, topk_idx.shape[-1])
    there = (topk_idx >= 0).any(dim=-1, keepdim=True)
    logits = torch.where(there, logits, 0)  # those of padding can be infinite, whose gradient is NaN
    probabilities = torch.softmax(logits, dim=-1, dtype=exact_dtype(logits.dtype))
    mine = torch.where(there, probabilities, 0).sum(dim=0)
    counts = expert_counts(topk_idx, num_experts).to(mine.dtype)
    mine, counts, tokens = _sum_over(group, mine, counts, there.sum().to(mine.dtype).reshape(1))
    parts = counts / counts.sum().clamp(min=1)
    return num_experts * (parts * mine).sum() / tokens.squeeze(0).clamp(min=1)


def router_z_loss(logits: Tensor, topk_idx: Tensor | None = None, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the mean over tokens of the squared log-sum-exp of the logits, a loss that keeps logits small.

    Args:
        logits: the router's scores [..., E].
        topk_idx: the chosen experts [..., K]. Tokens without an expert (-1), such as padding, do not count. None: all
            tokens count.
        group: as for :func:`load_balancing_loss`.

    Returns:
        Tensor: float32 [] (float64 if the logits are).

    Raises:
        TypeError, ValueError: as for :func:`load_balancing_loss`.
    """
    _check_tokens(logits, topk_idx)
    logits = logits.reshape(-1, logits.shape[-1]).to(exact_dtype(logits.dtype))
    if topk_idx is None:
        there = torch.ones_like(logits[:, 0], dtype=torch.bool)
    else:
        there = (topk_idx.reshape(-1, topk_idx.shape[-1]) >= 0).any(dim=-1)
    logits = torch.where(there[:, None], logits, 0)  # those of padding can be infinite, whose gradient is NaN
    mine = torch.where(there, torch.logsumexp(logits, dim=-1).square(), 0).sum().reshape(1)
    mine, tokens = _sum_over(group, mine, there.sum().to(mine.dtype).reshape(1))
    return (mine / tokens.clamp(min=1)).squeeze(0)


@torch.no_grad()
def update_expert_bias_(
    bias: Tensor, counts: Tensor, rate: float = 1e-3, group: dist.ProcessGroup | None = None
) -> None:
    """Raise the bias of experts that were chosen less often than the mean by ``rate``, and lower that of the others.

    This is DeepSeek-V3's load balancing without an auxiliary loss. Call it once for each optimizer step, after
    backward, because activation checkpointing runs the router again.

    Args:
        bias: buffer ``Router.bias`` [E], float32 or float64, changed in place, equally on all ranks.
        counts: how often this rank's tokens chose each expert since the last update, [E]: ``Routing.counts``, or their
            sum over micro-batches.
        rate: amount by which a bias changes.
        group: as for :func:`load_balancing_loss`.

    Raises:
        TypeError: bias has a dtype of lower precision, in which updates would be rounded away.
        ValueError: bias and counts have different shapes.
    """
    if bias.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"bias has dtype {bias.dtype}; allowed: torch.float32, torch.float64")
    if bias.shape != counts.shape:
        raise ValueError(f"counts has shape {tuple(counts.shape)}; allowed: {tuple(bias.shape)}, that of bias")
    (total,) = _sum_over(group, counts.to(torch.float64))
    bias += (rate * torch.sign(total.mean() - total)).to(bias.dtype)


def expert_counts(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert occurs in ``topk_idx``.

    Args:
        topk_idx: global expert ids [..., K]. Entries of -1 do not count.
        num_experts: E.

    Returns:
        Tensor: int64 [E].
    """
    chosen = topk_idx.reshape(-1).long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen.device)
    counts = counts.index_add(0, torch.where(chosen >= 0, chosen, num_experts), torch.ones_like(chosen))
    return counts[:num_experts]


def _check_tokens(logits: Tensor, topk_idx: Tensor | None) -> None:
    """Raise TypeError or ValueError unless logits and ids, if given, are of the same tokens."""
    check_types(Tensor, logits=logits)
    if topk_idx is None:
        return
    check_types(Tensor, topk_idx=topk_idx)
    tokens = logits.shape[:-1].numel()
    if topk_idx.shape[:-1].numel() != tokens:
        raise ValueError(
            f"topk_idx has shape {tuple(topk_idx.shape)}; allowed: [..., K] of {tokens} tokens, like logits"
        )


def _sum_over(group: dist.ProcessGroup | None, *parts: Tensor) -> tuple[Tensor, ...]:
    """Add vectors over ranks in one all-reduce. The gradient of a sum is that of this rank's part times the number of
    ranks, which averaging divides by."""
    if not dist.is_initialized():
        return parts
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return parts
    sizes = [part.shape[0] for part in parts]
    total = torch.cat([part.detach() for part in parts])
    dist.all_reduce(total, group=group)
    own = (
        total_part + ranks * (part - part.detach()) for total_part, part in zip(total.split(sizes), parts, strict=True)
    )
    return tuple(own)
