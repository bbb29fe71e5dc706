"""Sizes, inputs and experts that tests of MoECommunicator share, and the same layer computed densely."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor

from ep_ops import formats
from ep_ops.moe import (
    DispatchOutput,
    MoECommunicator,
    MoECommunicatorConfig,
)
from ep_ops.nn import expert_lists, gather_rows, grouped_mm, reduce_rows

E, H, K, MOST = 5, 128, 2, 12
MODES = ("auto", "latency", "throughput")
ROWS = ("grouped", "padded", "token_major")
REPLICAS = (3, 0, 1, 2, 4, 3, 0, 3)
"""Where experts lie unless a test says otherwise: three replicas of one, two of another."""


def config(**more: Any) -> MoECommunicatorConfig:
    given = dict(num_experts=E, hidden_size=H, top_k=K, max_tokens_per_rank=MOST, dtype=torch.float32)
    return MoECommunicatorConfig(**{**given, **more})


def communicator(**more: Any) -> MoECommunicator:
    return MoECommunicator(config(**more), device="cpu")


@dataclasses.dataclass
class Given:
    """Inputs of one rank: small numbers, which all formats but those with scales of fp32 hold exactly."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def drawn(seed: int, rank: int, tokens: int, grad: bool = False) -> Given:
    draw = torch.Generator().manual_seed(seed + 31 * rank)
    x = torch.randint(-8, 9, (tokens, H), generator=draw).float()
    ids = torch.rand(tokens, E, generator=draw).argsort(1)[:, :K]
    ids[torch.rand(tokens, K, generator=draw) < 0.15] = -1
    weights = torch.rand(tokens, K, generator=draw) + 0.1
    return Given(x.requires_grad_(grad), ids, weights.requires_grad_(grad))


def matrices(seed: int) -> Tensor:
    """[E, H, H] of the logical experts, the same on all ranks."""
    return torch.randn(E, H, H, generator=torch.Generator().manual_seed(seed)) / H**0.5


def dense(given: Given, w: Tensor) -> Tensor:
    out = torch.zeros(given.x.shape)
    for expert in range(E):
        out = out + (given.weights * (given.ids == expert)).sum(1, keepdim=True) * (given.x @ w[expert])
    return out


def computed(moe: MoECommunicator, output: DispatchOutput, w: Tensor) -> Tensor:
    """Return the outputs of the local experts ``w`` [El, H, H] for received rows."""
    rows, form = output.x.flatten(0, -2), moe.config.quant.format
    if rows.dtype == torch.float8_e4m3fn:
        assert output.scales is not None
        rows = formats.dequantize(rows, output.scales, formats.format_of(form), torch.float32)
    if moe.config.layout == "padded":
        live = torch.arange(output.x.shape[1]) < output.counts[:, None]
        rows = torch.where(live[..., None], rows.view(output.x.shape), 0)
        return torch.where(live[..., None], torch.bmm(rows, w), 0)  # gradients of slots that hold nothing are undefined
    if moe.config.layout == "grouped":
        return grouped_mm(rows, w, output.offs)
    assert output.local_idx is not None
    lists = expert_lists(output.local_idx, w.shape[0])
    return reduce_rows(grouped_mm(gather_rows(rows, lists), w, lists.offs), lists, output.weights)


def layer(moe: MoECommunicator, given: Given, w: Tensor, max_tokens: int | None = None) -> Tensor:
    x, ids, weights = given.x, given.ids, given.weights
    if moe.config.overlap:
        output, handle = moe.dispatch_async(x, ids, weights, max_tokens=max_tokens).wait()
        return moe.combine_async(computed(moe, output, w), handle).wait()
    output, handle = moe.dispatch(x, ids, weights, max_tokens=max_tokens)
    return moe.combine(computed(moe, output, w), handle)


def on_ranks(ranks: int, function: Any, *args: Any) -> list[Any]:
    """One rank is this process."""
    return run_ranks(ranks, function, *args) if ranks > 1 else [function(*args)]
