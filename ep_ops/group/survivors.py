"""The ranks that continue without others, and expert ids after some experts were lost with their ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import Member


def survivors_of(comm: Member, members: Sequence[int], left: Sequence[int]) -> tuple[list[int], int]:
    """Return the ranks in a communicator that continue without the others, and the ``domain_size`` of the communicator
    that they form.

    Args:
        comm: the communicator of all ranks.
        members: global ranks of its members, in order.
        left: global ranks of those that continue, in order.

    Raises:
        ValueError: as for :meth:`ep_ops.Communicator.shrink`.
    """
    ranks = [members.index(member) for member in left if member in members]
    if len(ranks) != len(left) or ranks != sorted(ranks):
        raise ValueError(
            f"group has global ranks {left}; allowed: some of {list(members)}, the ranks of communicator"
            f" {comm.name!r}, in that order"
        )
    if not any(comm.experts_per_rank[rank] for rank in ranks):
        raise ValueError(
            f"group has global ranks {left}, which hold no experts; allowed: at least one rank with experts"
        )
    config = comm.config
    of_domains = [sum(rank in ranks for rank in domain) for domain in config.domains]
    sizes = {size for size in of_domains if size}
    if len(sizes) > 1:
        raise ValueError(
            f"group leaves {of_domains} ranks of the NVLink domains {config.domains} of communicator {comm.name!r};"
            " allowed: the same number of each, or none"
        )
    (domain_size,) = sizes
    if config.backend == "cute" and config.wire == "nvshmem" and domain_size < len(ranks) < comm.world_size:
        raise ValueError(
            f"communicator {comm.name!r} uses NVSHMEM, which cannot continue with fewer than"
            f" {comm.world_size} ranks; allowed: a group of ranks of one NVLink domain"
        )
    return ranks, domain_size


class ExpertIds:
    """Converts a model's expert ids to those of a communicator with fewer experts."""

    def __init__(self, own: Sequence[int], device: torch.device) -> None:
        """``own``: the communicator's id for each id of the model, or -1."""
        self.own = tuple(own)
        self._lost = sum(i < 0 for i in own)
        self._table = torch.tensor([-1, *self.own], dtype=torch.int32, device=device)

    @staticmethod
    def kept(held: Sequence[int], ranks: Sequence[int], before: ExpertIds | None, device: torch.device) -> ExpertIds:
        """Return the ids for a communicator of some ``ranks`` of another one. ``held``: experts of each rank of that
        one; ``before``: its own conversion, or None."""
        first, own = 0, [-1] * sum(held)
        for rank in ranks:
            begin = sum(held[:rank])
            own[begin : begin + held[rank]] = range(first, first + held[rank])
            first += held[rank]
        if before is not None:
            own = [-1 if i < 0 else own[i] for i in before.own]
        return ExpertIds(own, device)

    def of(self, topk_idx: Tensor) -> Tensor:
        """Convert to ids of this communicator; experts that no longer exist become -1.

        Ids that the model does not have remain invalid: those below -1 are unchanged, those above the last one are
        reduced by the number of lost experts (:func:`id_of_model` is the inverse). The operator rejects them.
        """
        if not isinstance(topk_idx, Tensor) or topk_idx.dtype != torch.int32:
            return topk_idx  # the operator rejects it
        own = self._table[topk_idx.clamp(-1, len(self.own) - 1).long() + 1]
        own = torch.where(topk_idx < len(self.own), own, topk_idx - self._lost)
        return torch.where(topk_idx < -1, topk_idx, own)

    def lost(self, topk_idx: Tensor) -> Tensor:
        """Count the entries that name an expert that no longer exists: int64 []."""
        return ((topk_idx >= 0) & (self.of(topk_idx) < 0)).sum()


def id_of_model(invalid: int, lost_experts: int) -> str:
    """Return the model's id for an invalid id of a communicator that has lost ``lost_experts`` experts. Ids outside of
    the int32 range become its last number, or -2 (inputs.py)."""
    given = invalid if invalid < 0 else invalid + lost_experts
    return f"{given} or more" if given == 2**31 - 1 else str(given)
