"""The communicators behind a buffer: DeepEP's callers name sizes with each call, and not when they make it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops.communicator import Communicator
from ep_ops.exchange import Exchange


class Communicators:
    """One for each kind of rows of a group, made when it is first needed, by all ranks in the same call."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._made: dict[tuple[Any, ...], Communicator] = {}

    def of(
        self, x: Tensor, num_experts: int, top_k: int, max_tokens: int, *, dtype: torch.dtype | None = None,
        backend: str = "reference",
    ) -> Communicator:  # fmt: skip
        """For rows as those of ``x`` [., H], of ``dtype`` if that is another, and at least ``max_tokens`` a rank (the
        same number on all)."""
        dtype = x.dtype if dtype is None else dtype
        key = (x.shape[1], num_experts, top_k, dtype, x.device, backend)
        found = self._made.get(key)
        if found is None or found.max_tokens_per_rank < max_tokens:
            if found is not None:  # routes do not depend on it: those that were planned go on with its successor
                found.destroy()
            found = self._made[key] = Communicator(
                self._group, num_experts=num_experts, hidden_size=x.shape[1], top_k=top_k, dtype=dtype,
                max_tokens_per_rank=1 << max(max_tokens - 1, 0).bit_length(), alignment=1, device=x.device,
                backend=backend,
            )  # fmt: skip
        return found

    def agreed(self, tokens: int, device: torch.device) -> int:
        """The most that any rank has; waits for all."""
        return int(Exchange(self._group, device).all_gather(torch.tensor(tokens)).max())

    def total(self, counts: Tensor) -> Tensor:
        """The sum over ranks; waits for all."""
        return Exchange(self._group, counts.device).all_gather(counts).sum(0)

    def destroy(self) -> None:
        """Collective."""
        for made in self._made.values():
            made.destroy()
        self._made.clear()
