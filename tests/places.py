"""Token-major rows, drawn at random: which local experts each names, and a route that could have brought them."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from ep_ops import arrivals


def local_ids(draw: random.Random, rows: int, top_k: int, experts: int) -> Tensor:
    """The last rows name nobody, as those behind the last copy."""
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    ids = torch.randint(-2, experts, (rows, top_k), generator=generator).clamp(min=-1).int()
    if draw.random() < 0.3:
        ids[ids >= 0] = draw.randrange(experts)
    ids[draw.randint(0, rows) :] = -1
    return ids


class TokenMajor(NamedTuple):
    """A rank's knowledge of received rows, and of its own tokens."""

    topk_idx: Tensor
    send_rows: Tensor
    arrivals: Tensor
    local_idx: Tensor
    rank: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.topk_idx, self.send_rows, self.arrivals


def token_major(draw: random.Random, ranks: int, each: int, most_rows: int, most_tokens: int = 9) -> TokenMajor:
    """Return token-major routes of ranks with so many experts each. Undefined values in `arrivals` are 7."""
    top_k, rank = draw.randint(1, 8), draw.randrange(ranks)
    tokens, rows = draw.randint(0, most_tokens), draw.randint(1, most_rows)
    ids = local_ids(draw, rows, top_k, each)
    copies = int((ids >= 0).any(1).nonzero().max()) + 1 if (ids >= 0).any() else 0
    homes = sorted(draw.sample(range(ranks * most_tokens + rows), copies))
    given = torch.full((arrivals.size(rows, ranks),), 7, dtype=torch.int32)
    own, owned, sources = arrivals.views(given, rows)
    for copy, home in enumerate(homes):
        own[copy, 0], own[copy, 1] = copy, home * min(top_k, ranks) + draw.randrange(min(top_k, ranks))
        owned[copy, 0], owned[copy, 1] = copy, home * top_k
    own[copies, 0] = copies
    bounds = sorted(draw.randint(0, copies) for _ in range(ranks - 1))
    sources[:] = torch.tensor([0, *bounds, copies], dtype=torch.int32)

    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    topk_idx = torch.randint(-1, ranks * each, (tokens, top_k), generator=generator).int()
    send_rows = torch.full((tokens, top_k), -1, dtype=torch.int32)
    for token, named in enumerate(topk_idx.tolist()):
        holders = [expert // each if expert >= 0 else -1 for expert in named]
        for k, holder in enumerate(holders):
            if holder >= 0 and holder not in holders[:k] and draw.random() < 0.8:
                send_rows[token, k] = draw.randrange(max(1, copies))
    return TokenMajor(topk_idx, send_rows, given, ids, rank)
