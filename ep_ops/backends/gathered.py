"""Where rows of a gathering combine may lie: where symmetric memory begins, or elsewhere, to be copied there."""

from __future__ import annotations

from torch import Tensor


def problem(y: Tensor, memory: Tensor | None, most: int, name: str) -> str | None:
    """Why rows ``y`` cannot be gathered; None if they can. ``memory``: where ``most`` rows lie that peers can fetch,
    None if there are none."""
    if memory is None:
        return f"communicator {name!r} has no rows in symmetric memory: symmetric_rows is 0"
    if y.shape[0] > most:
        return f"y has {y.shape[0]} rows; allowed: at most {most}, the symmetric_rows of {name!r}"
    inside = y.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    if inside and y.numel() and elsewhere(y, memory):
        return "y lies in symmetric memory, and not at its beginning; pass the tensor that empty_rows returned"
    return None


def elsewhere(y: Tensor, memory: Tensor) -> bool:
    """Whether rows ``y`` have to be copied into ``memory``."""
    return y.numel() > 0 and y.data_ptr() != memory.data_ptr()
