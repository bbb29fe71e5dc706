"""Routers, which choose the experts of each token."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ep_ops.formats import exact_dtype


class Routed(NamedTuple):
    """The result of a router for tokens x [..., H]. Other routers can return a plain tuple of these three."""

    topk_idx: Tensor
    """[..., K], int32 or int64: global ids of the chosen experts; -1 means no expert."""
    topk_weights: Tensor
    """[..., K], float32: weights of the chosen experts."""
    logits: Tensor | None = None
    """[..., E]: scores before softmax or sigmoid, for losses. None if the router has none."""


class Router(nn.Module):
    """A linear layer that scores all experts and chooses the ``top_k`` experts with the highest scores.

    The scores are computed in float32 (float64 if x is), also under ``torch.autocast``.

    Args:
        num_experts: E, the number of experts of all ranks.
        hidden_size: H.
        top_k: K, the number of experts of a token.
        scores: "softmax" over all experts, or "sigmoid" of each.
        bias: keep a float32 buffer ``bias`` [E] that is added to the scores when experts are chosen, but not to their
            weights (see :func:`update_expert_bias_`).
        seed: seed of the initial weights.
        device: device of the parameters.

    Raises:
        ValueError: ``scores`` or ``top_k`` is not allowed.
    """

    bias: Tensor | None

    def __init__(
        self, num_experts: int, hidden_size: int, top_k: int, *, scores: str = "softmax", bias: bool = False,
        seed: int = 0, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores is {scores!r}; allowed: 'softmax', 'sigmoid'")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k is {top_k}; allowed: 1..num_experts {num_experts}")
        self.top_k, self.scores, self.seed = top_k, scores, seed
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=torch.float32, device=device))
        zeros = torch.zeros(num_experts, dtype=torch.float32, device=device) if bias else None
        self.register_buffer("bias", zeros)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights and set the bias to zero. Parameters must not be sharded."""
        if self.weight.is_meta:
            return
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(self.weight.shape, generator=generator, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            self.weight.copy_(drawn * self.weight.shape[1] ** -0.5)
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, x: Tensor) -> Routed:
        """Return the :class:`Routed` of x [..., H]. The weights of a token add up to 1."""
        dtype = exact_dtype(x.dtype)
        # torch.autocast does not take meta devices.
        with contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            logits = x.to(dtype) @ self.weight.to(dtype).t()
            scores = torch.softmax(logits, dim=-1) if self.scores == "softmax" else torch.sigmoid(logits)
            chosen_by = scores if self.bias is None else scores + self.bias
            topk_idx = chosen_by.topk(self.top_k, dim=-1).indices
            weights = scores.gather(-1, topk_idx)
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Routed(topk_idx.to(torch.int32), weights, logits)
