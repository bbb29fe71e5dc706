"""What a communicator's methods that call operators have in common, whichever rows these bring."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from . import formats
from .backends.base import Backend
from .group.survivors import ExpertIds
from .overflow import Overflow
from .records import Route


class Caller:
    """What such methods know of their :class:`ep_ops.Communicator`."""

    name: str
    world_size: int
    num_local_experts: int
    hidden_size: int
    top_k: int
    max_tokens_per_rank: int
    alignment: int
    dtype: torch.dtype
    weights_dtype: torch.dtype
    backend: Backend
    expert_ids: ExpertIds | None
    place: tuple[int, int, str]  # what operators that plan are told: local experts, ranks, name
    warned_rows: float  # rows of a default capacity that is warned of
    overflowed: Overflow | None


def default_rows(comm: Caller, rows: int, tokens: int) -> int:
    """A default capacity, of which is warned where it is large. (Between this and the user stand two functions.)"""
    if rows > comm.warned_rows and not torch.compiler.is_compiling():
        size = rows * comm.hidden_size * comm.dtype.itemsize / 2**30
        text = (
            f"communicator {comm.name!r}: without capacity, rows that {tokens} tokens per rank may send here"
            f" take {size:.1f} GiB in the worst case. Pass capacity (what does not fit is dropped and"
            " counted), call dispatch_dynamic, or make several calls of fewer tokens (max_tokens)."
        )
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    return rows


def scales_of(rows: Tensor, recv_scales: Tensor, route: Route, format: str, scales_as: str) -> Tensor | None:
    """Scales as consumers take them; None where rows have none."""
    form = formats.format_of(format) if format else None
    if form is None or form.wire:
        return None
    grid = formats.Grid(route.num_rows, route.slots, route.offs.shape[0], rows.shape[1])
    return formats.view(recv_scales, formats.layout_of(form, scales_as), grid)
