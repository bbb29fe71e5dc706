"""The order in which a token's rows are summed at its owner, over ranks and NVLink domains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def add_up(
    out: Tensor, arrived: Sequence[Tensor], went: Tensor, domains: Sequence[Sequence[int]], owner: int,
    crossed: Callable[[Tensor], Tensor],
) -> None:  # fmt: skip
    """Add what each rank has sent to ``out`` [T, H] of zeros, fp32 or fp64.

    For each domain, over its ranks ascending; the sums of other domains than the owner's pass through ``crossed``. Then
    over domains ascending.

    Args:
        arrived: for each rank, a row for each token that ``went`` there, in order.
        went: bool [W, T].
    """
    for ranks in domains:
        total = torch.zeros_like(out)
        for rank in ranks:
            total[went[rank]] += arrived[rank]
        out += total if owner in ranks else crossed(total)
