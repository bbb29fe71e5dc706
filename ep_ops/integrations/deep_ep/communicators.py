"""The communicators behind a buffer: DeepEP's callers name sizes with each call, and not when they make it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops.communicator import Communicator
from ep_ops.group.exchange import Exchange
from ep_ops.nn.sums import sum_rows
from ep_ops.records import TOKEN_MAJOR, Route

Rows = Tensor | tuple[Tensor, Tensor]
"""[., H]; or float8_e4m3fn [., H] and their scales, float32 [., H / 128] or int32 (see :func:`format_of`)."""
Bias = Tensor | tuple[Tensor, Tensor] | None


class Communicators:
    """One for each kind of rows of a group, made when it is first needed, by all ranks in the same call."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._made: dict[tuple[Any, ...], Communicator] = {}
        self._captured: list[Communicator] = []  # by CUDA graphs, which go on using them

    def of(self, x: Tensor, num_experts: int, top_k: int, max_tokens: int) -> Communicator:
        """For rows as those of ``x`` [., H] (bfloat16 where they are quantized), and at least ``max_tokens`` a rank,
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

    def combined(
        self, x: Tensor, route: Route, num_experts: int, bias: Bias = None, slots: Tensor | None = None,
        round_partial: bool = True,
    ) -> Tensor:  # fmt: skip
        """Return the sums of the rows ``x`` at their owners, [T, H].

        Rows of a token are summed in fp32 on their rank first, rounded there unless ``round_partial`` is False, then in
        fp32 over ranks and ``bias``, and rounded. Sums that may not be rounded between, and two biases, travel as
        float32: a copy of x in float32, and twice the bytes of bfloat16.

        Args:
            slots: int32 [N, K], the rows of each (token, rank) pair, -1 for none, where several rows belong to a pair;
                needed for two biases.
        """
        comm = self.of(x, num_experts, route.topk_idx.shape[1], route.max_tokens)
        several = route.layout != TOKEN_MAJOR
        if not isinstance(bias, tuple) and (round_partial or not several):
            return comm.combine(x.contiguous(), route, residual=bias)
        if several and round_partial:
            assert slots is not None
            pairs = sum_rows(x.contiguous(), slots)  # rounded; in the place of each pair's first row, the others zero
            first = torch.where(slots >= 0, slots, x.shape[0]).amin(1).long()
            wide = x.new_zeros(x.shape[0] + 1, x.shape[1], dtype=torch.float32)
            wide = wide.index_copy_(0, first, pairs.float())[:-1]
        else:
            wide = x.float()
        out = self.of(wide, num_experts, route.topk_idx.shape[1], route.max_tokens).combine(wide, route)
        if bias is not None:
            out = out + (bias[0].float() + bias[1].float() if isinstance(bias, tuple) else bias.float())
        return out.to(x.dtype)

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


def format_of(x: Tensor, scales: Tensor | None, columns: bool = False) -> dict[str, Any]:
    """Return the arguments of a dispatch of rows that come with ``scales`` [T, G].

    Scales are 4-byte words that travel as they are: float32, or int32 with four UE8M0 exponents in each, one for 128
    numbers (G = ceil(H / 512)) or for 32 (G = H / 128).

    Args:
        columns: whether received scales lie in columns.

    Raises:
        TypeError: ``scales`` are neither float32 nor int32.
        ValueError: ``scales`` have more than H / 128 columns.
    """
    if scales is None:
        return {}
    if scales.dtype not in (torch.float32, torch.int32):
        raise TypeError(f"scales of x have dtype {scales.dtype}; allowed: float32, or int32 of four UE8M0 exponents")
    groups = x.shape[1] // 128
    if scales.shape[1] > groups:
        raise ValueError(
            f"scales of x have shape {tuple(scales.shape)}; at most {groups} columns for x {tuple(x.shape)}"
        )
    words = torch.nn.functional.pad(scales, (0, groups - scales.shape[1])) if scales.shape[1] < groups else scales
    return {
        "scales": words.contiguous().view(torch.float32), "format": "e4m3/128/fp32",
        "scales_as": "columns" if columns else "rows",
    }  # fmt: skip


def with_scales(rows: Tensor, received: Tensor | None, sent: Tensor | None) -> Rows:
    """Return received rows, and beside them their scales in the dtype and number of columns of those that were sent."""
    if received is None or sent is None:
        return rows
    scales = received[:, : sent.shape[1]]
    if received.stride(1) == 1:
        scales = scales.contiguous()
    return rows, scales.view(sent.dtype)


def refuse_experts(num_experts: int, ranks: int) -> None:
    """ValueError unless all ranks have as many."""
    if num_experts % ranks:
        raise ValueError(f"num_experts is {num_experts}; it must be a multiple of the {ranks} ranks")
