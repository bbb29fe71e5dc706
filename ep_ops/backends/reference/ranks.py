"""The locations of experts, and the ranks and copies that the ids of tokens name."""

from __future__ import annotations

import torch
from torch import Tensor

from ...config import Member
from ...group.survivors import id_of_model
from .. import failure_text


class ExpertRanks:
    """W ranks and E experts in contiguous blocks. This rank is ``rank``."""

    def __init__(self, member: Member) -> None:
        self.world_size, self.rank, self.device = member.world_size, member.rank, member.device
        self.domains = member.config.domains
        self.num_experts, self.experts_per_rank = member.num_experts, member.experts_per_rank
        self.lost_experts = member.config.lost_experts
        ranks = torch.arange(self.world_size, device=self.device)
        per_rank = torch.tensor(self.experts_per_rank, device=self.device)
        self.rank_of_expert = torch.repeat_interleave(ranks, per_rank)  # [E]
        self.first_expert = per_rank.cumsum(0) - per_rank  # [W]

    def named(self, topk_idx: Tensor) -> Tensor:
        """Return the rank of each expert; world_size for none."""
        rank = self.rank_of_expert[topk_idx.long().clamp(0, self.num_experts - 1)]
        return torch.where(topk_idx >= 0, rank, self.world_size)

    def local(self, topk_idx: Tensor) -> Tensor:
        """Return the local number of each expert on its rank; undefined for none."""
        return topk_idx - self.first_expert.int()[self.named(topk_idx).clamp(max=self.world_size - 1)]

    def copy_numbers(self, destination: Tensor) -> Tensor:
        """Return the number of each token's copy here, [W, max_tokens]: how many earlier ranks its ids name.
        ``destination``: the ranks that they name, [W, max_tokens, K]."""
        number = torch.zeros(destination.shape[:2], dtype=torch.long, device=self.device)
        for rank in range(self.rank):
            number += (destination == rank).any(2)
        return number

    def problem(self, topk_idx: Tensor, distinct: bool = False) -> str | None:
        """Return a text about an invalid id, or None. ``distinct``: the ids of a token must be distinct."""
        invalid = (topk_idx < -1) | (topk_idx >= self.num_experts)
        if bool(invalid.any()):
            token, k = invalid.nonzero()[0].tolist()
            return (
                f"topk_idx[{token}, {k}] is {id_of_model(int(topk_idx[token, k]), self.lost_experts)} on rank"
                f" {self.rank}; expert ids are 0..{self.num_experts + self.lost_experts - 1}, or -1 for none"
            )
        again = (topk_idx[:, :, None] == topk_idx[:, None, :]).tril(-1).any(2) & (topk_idx >= 0)
        if distinct and bool(again.any()):
            token, k = again.nonzero()[0].tolist()
            return f"topk_idx[{token}, {k}] names an expert again on rank {self.rank}; {failure_text.REPEATS}"
        return None
