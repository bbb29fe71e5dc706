"""Placement of logical experts, which a router names, on physical experts, the places for weights.

A *placement* is a sequence of P ints: the logical expert of each physical one. Ranks hold contiguous blocks of physical
experts; ``held`` is their number on each rank. A logical expert that is named n times has n *replicas*, which share its
tokens: token t of rank r uses replica ``((t + r) mod TURNS) mod n``, in the order of physical experts.
"""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ep_ops.config import is_int
from ep_ops.records import is_ordinary

TURNS = 60
"""Number of tokens after which the choice of replicas repeats: 1 to 6 replicas divide it and share tokens evenly."""

SLACK = 0.05
"""Load above the mean, relative to it, that does not cause weights to move."""


def problem_of(placement: Sequence[int], num_experts: int) -> str | None:
    """Return what is wrong with a placement of ``num_experts`` logical experts, or None."""
    if not isinstance(placement, Sequence) or isinstance(placement, str):
        return f"placement is {placement!r}; allowed: the logical expert of each physical one"
    if not is_int(num_experts) or num_experts < 1:
        return f"num_experts is {num_experts!r}; allowed: a positive int"
    for place, expert in enumerate(placement):
        if not is_int(expert) or not 0 <= expert < num_experts:
            return f"placement[{place}] is {expert!r}; allowed: logical experts, 0..{num_experts - 1}"
    missing = set(range(num_experts)) - set(placement)
    if missing:
        return (
            f"placement leaves out logical expert {min(missing)}; each of the {num_experts} must appear at least once"
        )
    return None


def checksum(placement: Sequence[int] | None) -> int:
    """Return a number that ranks compare."""
    return zlib.crc32(repr(placement and tuple(placement)).encode())


def compare(checksums: Tensor) -> None:
    """Raise ValueError unless the checksums of all ranks, [W], are equal."""
    if len(checksums.unique()) > 1:
        by_rank = ", ".join(map(str, checksums.tolist()))
        raise ValueError(f"ranks disagree on placement: its checksums are {by_rank} by rank")


class ReplicaMap:
    """The placement in device memory. A captured graph reads it when it is replayed."""

    def __init__(self, placement: Sequence[int], num_experts: int, max_tokens: int, rank: int, device: torch.device):
        self._experts = num_experts
        with torch.inference_mode(False):  # an inference tensor could not be updated later
            turn = (torch.arange(max_tokens, device=device) + rank) % TURNS
            begin = turn * (num_experts + 3) + 2
            self._first = begin[:, None]  # [max_tokens, 1] where the ids of a token's turn begin
            self._table = torch.empty(TURNS, num_experts + 3, dtype=torch.int32, device=device)
        self.set(placement)

    def set(self, placement: Sequence[int]) -> None:
        """Write a placement, in the order of the current stream."""
        self._table.copy_(_table(placement, self._experts))

    def of(self, topk_ids: Tensor) -> Tensor:
        """Convert logical ids [..., K], int32 or int64, to int32 physical ids.

        Invalid ids stay invalid. Arguments that operators do not accept are returned unchanged; the operator raises the
        error.
        """
        if not is_ordinary(topk_ids) or topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.dim() < 2:
            return topk_ids
        flat = topk_ids.flatten(0, -2)
        tokens = flat.shape[0]
        if tokens > self._first.shape[0] or topk_ids.device != self._table.device:
            return topk_ids
        at = flat.clamp(-2, self._experts) + self._first[:tokens]
        return self._table.take(at).view(topk_ids.shape)


def _table(placement: Sequence[int], num_experts: int) -> Tensor:
    """Return the physical ids of ids -2, -1, 0, ... E in each turn, int32 [TURNS, E + 3]. Invalid ids stay invalid."""
    places: list[list[int]] = [[] for _ in range(num_experts)]
    for place, expert in enumerate(placement):
        places[expert].append(place)
    turns = [[-2, -1, *(own[turn % len(own)] for own in places), len(placement)] for turn in range(TURNS)]
    return torch.tensor(turns, dtype=torch.int32, device="cpu")


# ---------------------------------------------------------------------- choosing one


def balanced(load: Sequence[float], held: Sequence[int], before: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return a placement under which ranks receive about the same number of rows.

    Replicas are given one by one to the expert with most rows per replica. Weights stay where they were ``before`` as
    far as their replicas are still needed. The others are placed by decreasing load on the least loaded rank that has
    room and does not hold the expert yet. Replicas of an expert that share a rank are exchanged for experts of ranks
    without one. Then the most loaded rank swaps experts with other ranks while it exceeds the
    mean by more than ``SLACK`` and the swap helps. The result is the same on all ranks for the same arguments.

    Args:
        load: rows of each logical expert, [E], such as :meth:`MoECommunicator.load`.
        held: number of physical experts on each rank.
        before: the current placement, or None.

    Returns:
        Logical expert of each physical expert.

    Raises:
        ValueError: there are more logical than physical experts, or ``before`` is not a placement of these.
    """
    experts, places = len(load), sum(held)
    if places < experts:
        raise ValueError(
            f"load has {experts} logical experts; allowed: at most {places}, the physical ones of ranks that hold"
            f" {tuple(held)}"
        )
    if before is not None and (problem := problem_of(before, experts)):
        raise ValueError(problem.replace("placement", "before"))
    if before is not None and len(before) != places:
        raise ValueError(f"before has {len(before)} places; allowed: {places}, the physical experts of all ranks")
    wanted = _replicas(load, places, sum(count > 0 for count in held))
    share = [rows / count for rows, count in zip(load, wanted, strict=True)]
    placed = iter(() if before is None else before)
    was = [tuple(itertools.islice(placed, count)) for count in held]
    there: list[list[int]] = [[] for _ in held]
    for rank, own in enumerate(was):
        for expert in dict.fromkeys(own):
            if wanted[expert]:
                wanted[expert] -= 1
                there[rank].append(expert)
    for expert in sorted(range(experts), key=lambda e: -share[e]):
        for _ in range(wanted[expert]):
            free = [rank for rank, count in enumerate(held) if len(there[rank]) < count]
            apart = [rank for rank in free if expert not in there[rank]]
            best = min(apart or free, key=lambda rank: sum(share[e] for e in there[rank]))
            there[best].append(expert)
    _separate(there, share)
    _swap(there, share)
    return tuple(itertools.chain(*map(_settled, there, was)))


def _separate(there: list[list[int]], share: Sequence[float]) -> None:
    """Exchange replicas that share a rank with another one of their expert for experts of ranks that have none, as far
    as there are such ranks."""
    total = [sum(share[e] for e in own) for own in there]
    for rank, own in enumerate(there):
        for mine in {expert for expert in own if own.count(expert) > 1}:
            while own.count(mine) > 1:
                swaps = [
                    (max(total[rank] - share[mine] + share[e], total[other] + share[mine] - share[e]), other, e)
                    for other, theirs in enumerate(there) if mine not in theirs
                    for e in theirs if e not in own
                ]  # fmt: skip
                if not swaps:
                    break
                _, other, e = min(swaps)
                own[own.index(mine)], there[other][there[other].index(e)] = e, mine
                total[rank] += share[e] - share[mine]
                total[other] += share[mine] - share[e]


def _swap(there: list[list[int]], share: Sequence[float]) -> None:
    """Swap experts between ranks, as :func:`balanced` describes."""
    total = [sum(share[e] for e in own) for own in there]
    enough = (1 + SLACK) * sum(total) / len(total)
    while (most := max(total)) > enough:
        full = total.index(most)
        best, swap = most * (1 - 1e-6), None  # smaller gains are rounding
        for rank, own in enumerate(there):
            for mine in there[full]:
                if rank == full or mine in own:
                    continue
                for theirs in own:
                    less = share[mine] - share[theirs]
                    worse = max(most - less, total[rank] + less)
                    if worse < best and theirs not in there[full]:
                        best, swap = worse, (rank, mine, theirs, less)
        if swap is None:
            return
        rank, mine, theirs, less = swap
        there[full][there[full].index(mine)], there[rank][there[rank].index(theirs)] = theirs, mine
        total[full] -= less
        total[rank] += less


def _replicas(load: Sequence[float], places: int, ranks: int) -> list[int]:
    """Return the number of replicas of each expert: at most the number of ranks while some expert has fewer."""
    counts = [1] * len(load)
    waiting = [(-rows, 1, expert) for expert, rows in enumerate(load)]
    heapq.heapify(waiting)
    full: list[tuple[float, int, int]] = []
    for _ in range(places - len(load)):
        while waiting and waiting[0][1] >= ranks:
            full.append(heapq.heappop(waiting))
        if not waiting:
            waiting, full, ranks = full, [], places
            heapq.heapify(waiting)
        _, count, expert = heapq.heappop(waiting)
        counts[expert] = count + 1
        heapq.heappush(waiting, (-load[expert] / (count + 1), count + 1, expert))
    return counts


def _settled(experts: list[int], was: tuple[int, ...]) -> list[int]:
    """Return a rank's experts in an order that leaves the ones that it held in their places."""
    left = sorted(experts)
    kept: list[int | None] = []
    for expert in was:
        kept.append(expert if expert in left else None)
        if expert in left:
            left.remove(expert)
    kept += [None] * (len(experts) - len(kept))
    return [left.pop(0) if expert is None else expert for expert in kept]


class Move(NamedTuple):
    """A copy of a logical expert's weights that a new placement requires."""

    expert: int  # logical expert
    source: int  # physical expert to copy from
    place: int  # physical expert to copy to
    crosses: bool  # whether they are on different ranks


def moves(before: Sequence[int], after: Sequence[int], held: Sequence[int]) -> list[Move]:
    """Return the copies of weights that lead from one placement to another.

    Weights are copied within a rank where possible, else from the replicas in turn.

    Args:
        before, after: placements of the same length.
        held: number of physical experts on each rank.

    Raises:
        ValueError: the lengths differ, or ``after`` names other experts.
    """
    if len(before) != sum(held) or len(after) != sum(held):
        raise ValueError(
            f"placements have {len(before)} and {len(after)} places; allowed: {sum(held)}, as ranks hold {tuple(held)}"
        )
    if missing := set(after) - set(before):
        raise ValueError(f"after has experts {sorted(missing)}; allowed: the experts of before")
    rank_of = [rank for rank, count in enumerate(held) for _ in range(count)]
    found = []
    for place, expert in enumerate(after):
        if before[place] == expert:
            continue
        sources = [p for p, e in enumerate(before) if e == expert]
        here = [p for p in sources if rank_of[p] == rank_of[place]]
        source = (here or sources)[place % len(here or sources)]
        found.append(Move(expert, source, place, rank_of[source] != rank_of[place]))
    return found
