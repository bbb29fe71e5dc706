"""The tree in which a token's rows are added up at its owner, over ranks and NVLink domains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_up(out: Tensor, arrived: Sequence[Tensor], went: Tensor, domains: Sequence[Sequence[int]], owner: int) -> None:
    """Adds to zeros ``out`` [T, H] (fp32 or fp64) what each rank has sent: a row of the wire dtype for each token that
    ``went`` [W, T] there, in their order.

    For each domain, over its ranks ascending, in out's dtype; rounded to the wire dtype, as it crosses to the owner's
    domain, unless it is that one. Then over domains ascending.
    """
    for ranks in domains:
        total = torch.zeros_like(out)
        for rank in ranks:
            total[went[rank]] += arrived[rank].to(out.dtype)
        out += total if owner in ranks else total.to(arrived[owner].dtype).to(out.dtype)
