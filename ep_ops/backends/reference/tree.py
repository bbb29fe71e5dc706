"""The tree in which a token's rows are added up at its owner, over ranks and NVLink domains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def add_up(
    out: Tensor, arrived: Sequence[Tensor], went: Tensor, domains: Sequence[Sequence[int]], owner: int,
    crossed: Callable[[Tensor], Tensor],
) -> None:  # fmt: skip
    """Adds to zeros ``out`` [T, H] (fp32 or fp64) what each rank has sent: a row of out's dtype for each token that
    ``went`` [W, T] there, in their order.

    For each domain, over its ranks ascending; as it is once it has ``crossed`` to the owner's domain, unless it is that
    one. Then over domains ascending.
    """
    for ranks in domains:
        total = torch.zeros_like(out)
        for rank in ranks:
            total[went[rank]] += arrived[rank]
        out += total if owner in ranks else crossed(total)
