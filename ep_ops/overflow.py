"""Sums that calls add up in device memory, and counts of dropped rows between checks."""

from __future__ import annotations

import torch
from torch import Tensor


def recomputing() -> bool:
    """Return whether activation checkpointing is running a forward pass again, during backward.

    Always False in compiled functions. If they call ``checkpoint``, the compiler runs side effects once; if they are
    called inside of a checkpoint, side effects run again.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def static_zeros(*sizes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros at a static address, to which calls add in place, also in inference mode.

    ``torch.compile(mode="reduce-overhead")`` captures no CUDA graph of a function that writes to another input.
    """
    with torch.inference_mode(False):  # an inference tensor could not be updated later
        found = torch.zeros(sizes, dtype=dtype, device=device)
    torch._dynamo.mark_static_address(found, guard=False)
    return found


class Overflow:
    """Counts the rows of each local expert that were dropped since the last check."""

    def __init__(self, num_local_experts: int, first_expert: int, device: torch.device) -> None:
        self._first = first_expert
        self._rows = static_zeros(num_local_experts, dtype=torch.int32, device=device)

    def add(self, dropped: Tensor) -> None:
        """Add the drop counts int32 [El] of one dispatch."""
        if not recomputing():
            self._rows.add_(dropped)

    def check(self, name: str, rank: int) -> None:
        """Raise ValueError if rows were dropped, and reset the counts. Synchronizes the host."""
        rows = self._rows.tolist()
        if not any(rows):
            return
        self._rows.zero_()
        which = ", ".join(f"{i + self._first} ({n})" for i, n in enumerate(rows) if n)
        raise ValueError(
            f"communicator {name!r}: rank {rank} dropped {sum(rows)} rows since the last check because capacity or"
            f" slots was exceeded, by expert: {which}. Increase capacity or slots, or pass overflow='count'."
        )
