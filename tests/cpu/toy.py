"""A small mixture-of-experts layer on the operators, the same computed densely, and inputs for both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops import Communicator, Dispatched

HIDDEN, TOP_K, EXPERTS, ALIGNMENT = 8, 2, 4, 4


def communicator(max_tokens: int = 16, dtype: torch.dtype = torch.float32, **others: object) -> Communicator:
    """On all ranks there are."""
    return Communicator(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        max_tokens_per_rank=max_tokens,
        dtype=dtype,
        alignment=ALIGNMENT,
        device="cpu",
        backend="reference",
        **others,
    )


def inputs(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    """x [T, H], topk_idx [T, K] with some -1, topk_weights [T, K]."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=draw).to(dtype)
    topk_idx = torch.rand(tokens, EXPERTS, generator=draw).argsort(1)[:, :TOP_K].int()
    topk_idx[torch.rand(tokens, TOP_K, generator=draw) < 0.2] = -1
    weights = torch.rand(tokens, TOP_K, generator=draw).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return [x.requires_grad_(grad), topk_idx, weights.requires_grad_(grad)]


def scales(dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    """The experts' parameters [E, H], the same on all ranks."""
    draw = torch.Generator().manual_seed(99)
    return torch.randn(EXPERTS, HIDDEN, generator=draw).to(dtype).requires_grad_(grad)


def experts(rows: Dispatched, scale: Tensor) -> Tensor:
    """tanh(x) * scale of the local expert, for all covered rows; zeros elsewhere. ``scale`` is of local experts."""
    offs = rows.route.offs
    row = torch.arange(rows.x.shape[0], dtype=offs.dtype)
    covered = (row < offs[-1])[:, None]
    expert = (row[:, None] >= offs[None, :-1]).sum(1)
    x = torch.where(covered, rows.x, 0)
    return torch.where(covered, torch.tanh(x) * scale[expert], 0)


def layer(comm: Communicator, x: Tensor, topk_idx: Tensor, weights: Tensor | None, scale: Tensor) -> Tensor:
    """One MoE layer [T, H]; ``scale`` [E, H]. Tracing it gives one dispatch and one combine."""
    first = comm.first_local_expert
    rows = comm.dispatch(x, topk_idx, weights)
    y = experts(rows, scale[first : first + comm.num_local_experts])
    return comm.combine(y, rows.route, rows.weights)


def dense(x: Tensor, topk_idx: Tensor, weights: Tensor | None, scale: Tensor) -> Tensor:
    """The same without any communication."""
    chosen = torch.tanh(x)[:, None] * scale[topk_idx.clamp(min=0).long()]
    weight = (topk_idx >= 0).to(x.dtype) if weights is None else torch.where(topk_idx >= 0, weights, 0)
    return (chosen * weight[..., None]).sum(1)


def recorded(comm: Communicator, calls: list[tuple[str, int, str]]) -> Communicator:
    """Note what the communicator's backend runs: operator, how many rows or tokens it is given, communicator."""
    bind = comm.backend.bind

    def recording(spec: Any, a: Any) -> Any:
        run = bind(spec, a)

        def record(a: Any) -> Any:
            calls.append((spec.kind, a[0].shape[0], comm.name))
            return run(a)

        return record if spec.kind in ("dispatch", "combine", "dispatch_backward", "combine_backward") else run

    comm.backend.bind = recording
    comm.calls.forget()
    return comm
