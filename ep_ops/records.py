"""What functions hand to each other instead of long positional lists. Imports torch alone.

W ranks, T tokens of this rank, K = top_k, El local experts.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MAX_ALIGNMENT = 1024
INT32_LIMIT = 2**31


class Sizes(NamedTuple):
    """How much room a plan has, and how it is laid out."""

    capacity: int  # rows of the receive buffer, a multiple of alignment
    alignment: int  # segments of rows are padded to a multiple of it
    slots: int  # 0: segments follow each other; else rows that each local expert has ([El, slots, H] layout)
    max_tokens: int  # bound on T that all ranks share


class Placed(NamedTuple):
    """What a plan returns: int32 tensors."""

    send_rows: Tensor  # [T, K] row at the destination rank, -1 where there is none or it was dropped
    recv_rows: Tensor  # [W, max_tokens, K] row here of (source rank, token, k), -1 where nothing came here
    offs: Tensor  # [El] end of each local expert's segment, padded to the alignment
    counts: Tensor  # [El] kept rows of each local expert
    dropped: Tensor  # [El] rows routed here that did not fit


class Route(NamedTuple):
    """What goes where: int32 tensors, and what they were planned with."""

    topk_idx: Tensor  # [T, K] global expert id, -1 none
    send_rows: Tensor  # [T, K] row at the destination rank, -1 where there is none or it was dropped
    recv_rows: Tensor  # [W, max_tokens, K] row here of (source rank, token, k), -1 where nothing came here
    offs: Tensor  # [El] end of each local expert's segment, padded to the alignment
    counts: Tensor  # [El] kept rows of each local expert
    alignment: int  # segments are padded to a multiple of it
    num_rows: int  # rows of the buffers that it fills: the capacity, or what a dynamic dispatch needed

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Without the ints."""
        return self[:5]

    @property
    def max_tokens(self) -> int:
        """Bound on T that the ranks shared."""
        return self.recv_rows.shape[1]
