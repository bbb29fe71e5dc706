"""Routers, which choose the experts of each token."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ep_ops.formats import exact_dtype
from ep_ops.nn.expert_module import fill_weight
from ep_ops.records import whole


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
        bias: keep a buffer ``bias`` [E] that is added to the scores when experts are chosen, but not to their weights
            (see :func:`update_expert_bias_`). It stays float32 when the module is converted, because a lower precision
            would round updates away.
        normalize: divide the weights of a token by their sum. None: unless ``top_k`` is 1, for which the weight would
            always be 1 and the router would not learn from it.
        seed: seed of the initial weights, which do not depend on ``torch.manual_seed``.
        device: device of the parameters.

    Raises:
        ValueError: ``scores`` or ``top_k`` is not allowed.
    """

    bias: Tensor | None

    def __init__(
        self, num_experts: int, hidden_size: int, top_k: int, *, scores: str = "softmax", bias: bool = False,
        normalize: bool | None = None, seed: int = 0, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores is {scores!r}; allowed: 'softmax', 'sigmoid'")
        if not 1 <= whole("top_k", top_k) <= num_experts:
            raise ValueError(f"top_k is {top_k}; allowed: 1..num_experts {num_experts}")
        self.top_k, self.scores, self.seed = top_k, scores, seed
        self.normalize = top_k > 1 if normalize is None else normalize
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=torch.float32, device=device))
        zeros = torch.zeros(num_experts, dtype=torch.float32, device=device) if bias else None
        self.register_buffer("bias", zeros)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights and set the bias to zero.

        Call it after ``to_empty``, also if FSDP2 has sharded the parameters. Does nothing on the meta device.
        """

        def draw() -> Tensor:
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.randn(self.weight.shape, generator=generator, dtype=torch.float32, device="cpu")
            return drawn * drawn.shape[1] ** -0.5

        fill_weight(self, "weight", draw)
        if self.bias is not None:
            self.bias.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        before = self.bias
        super()._apply(fn, recurse)
        if before is not None and self.bias is not None and self.bias.dtype != torch.float32:
            self.bias = before.to(self.bias.device)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.bias is not None:
            self.bias = self.bias.float()  # load_state_dict(assign=True) keeps the dtype of the file

    def forward(self, x: Tensor) -> Routed:
        """Return the :class:`Routed` of x [..., H]."""
        dtype = exact_dtype(x.dtype)
        # torch.autocast does not take meta devices.
        with contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            logits = x.to(dtype) @ self.weight.to(dtype).t()
            scores = torch.softmax(logits, dim=-1) if self.scores == "softmax" else torch.sigmoid(logits)
            chosen_by = scores if self.bias is None else scores + self.bias
            topk_idx = chosen_by.topk(self.top_k, dim=-1).indices
            weights = scores.gather(-1, topk_idx)
            if self.normalize:
                weights = weights / weights.sum(dim=-1, keepdim=True)
        return Routed(topk_idx.to(torch.int32), weights, logits)
