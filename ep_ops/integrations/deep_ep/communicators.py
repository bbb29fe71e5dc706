"""The communicators behind a buffer: DeepEP's callers name sizes with each call, and not when they make it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops.communicator import Communicator
from ep_ops.group.exchange import Exchange
from ep_ops.records import Route

Bias = Tensor | tuple[Tensor, Tensor] | None


class Communicators:
    """One for each kind of rows of a group, made when it is first needed, by all ranks in the same call."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._made: dict[tuple[Any, ...], Communicator] = {}
        self._captured: list[Communicator] = []  # by CUDA graphs, which go on using them

    def of(self, x: Tensor, num_experts: int, top_k: int, max_tokens: int) -> Communicator:
        """For rows as those of ``x`` [., H] (bfloat16 where they are quantised), and at least ``max_tokens`` a rank,
        the same number on all."""
        dtype = torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype
        key = (x.shape[1], num_experts, top_k, dtype, x.device)
        found = self._made.get(key)
        if found is None or found.max_tokens_per_rank < max_tokens:
            if found is not None and found not in self._captured:
                found.destroy()  # routes do not depend on it: those that were planned go on with its successor
            found = self._made[key] = Communicator(
                self._group, num_experts=num_experts, hidden_size=x.shape[1], top_k=top_k, dtype=dtype,
                max_tokens_per_rank=1 << max(max_tokens - 1, 0).bit_length(), alignment=1, device=x.device,
            )  # fmt: skip
        if _capturing(x.device) and found not in self._captured:
            self._captured.append(found)
        return found

    def agreed(self, tokens: int, device: torch.device) -> int:
        """The most that any rank has; waits for all."""
        return int(Exchange(self._group, device).all_gather(torch.tensor(tokens, device="cpu")).max())

    def total(self, counts: Tensor) -> Tensor:
        """The sum over ranks; waits for all."""
        return Exchange(self._group, counts.device).all_gather(counts).sum(0)

    def combined(self, x: Tensor, route: Route, num_experts: int, bias: Bias = None) -> Tensor:
        """The rows ``x`` home: their sums, with ``bias`` (two of them are added up and rounded before)."""
        if isinstance(bias, tuple):
            bias = (bias[0].float() + bias[1].float()).to(x.dtype)
        comm = self.of(x, num_experts, route.topk_idx.shape[1], route.max_tokens)
        return comm.combine(x.contiguous(), route, residual=bias)

    def summed(self, weights: Tensor, route: Route, num_experts: int) -> Tensor:
        """``weights`` [N, K] of token-major rows home: float32 [T, K], the sum of a token's rows. They travel as rows,
        which begin at multiples of 16 bytes."""
        top_k = weights.shape[1]
        wide = torch.nn.functional.pad(weights.float(), (0, -top_k % 4))
        return self.combined(wide, route, num_experts)[:, :top_k].contiguous()

    def destroy(self) -> None:
        """Collective."""
        for made in dict.fromkeys((*self._captured, *self._made.values())):
            made.destroy()
        self._captured.clear()
        self._made.clear()


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def format_of(scales: Tensor | None, columns: bool = False) -> dict[str, Any]:
    """What a dispatch of rows is asked for, if they come with such scales; theirs lie in columns on request."""
    if scales is None:
        return {}
    if scales.dtype != torch.float32:
        raise NotImplementedError(
            f"scales of x have dtype {scales.dtype}: those of a token travel as float32, one for 128 numbers"
        )
    return {
        "scales": scales.contiguous(), "format": "e4m3/128/fp32", "scales_as": "columns" if columns else "rows"
    }  # fmt: skip


def refuse_experts(num_experts: int, ranks: int) -> None:
    """ValueError unless all ranks have as many."""
    if num_experts % ranks:
        raise ValueError(f"num_experts is {num_experts}; it must be a multiple of the {ranks} ranks")
