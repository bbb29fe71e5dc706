"""NVLink domains of ranks, and their indices there. Ranks with the same index form a rail.

After the addresses of all ranks' heaps, their table contains each rank's domain and index, then the rank at each
(domain, index). With one domain these are not read.

The *stager* of a source rank of another domain is the rank of this domain on the source's rail. At each rank, other
domains have a *slot*: their distance in cyclic order. Slot 0 is the rank's own domain.
"""

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from . import ptx
from .views import Words

INDEX_BITS = 32


def position_words(domains: Sequence[Sequence[int]]) -> list[int]:
    """Return the words that follow the addresses, for the ranks of each domain."""
    positions = [0] * sum(map(len, domains))
    for domain, members in enumerate(domains):
        for index, rank in enumerate(members):
            positions[rank] = domain << INDEX_BITS | index
    return positions + [rank for members in domains for rank in members]


def position_of(ranks: Any, rank: Int32) -> tuple[Int32, Int32]:
    """Return a rank's domain and its index there."""
    word = ptx.ld_constant(Words(ranks.peers).at(ranks.world_size + rank))
    return Int32(word >> INDEX_BITS), Int32(word & ((1 << INDEX_BITS) - 1))


def rank_at(ranks: Any, domain: Int32, index: Int32 | int) -> Int32:
    """Return the rank at this position."""
    number = domain * ranks.heap.problem.domain_ranks + index
    return Int32(ptx.ld_constant(Words(ranks.peers).at(2 * ranks.world_size + number)))


@cute.jit
def index_of(ranks: Any, rank: Int32) -> Int32:
    """Return a rank's index in its domain."""
    index = Int32(rank)
    if const_expr(ranks.heap.problem.num_domains > 1):
        _, index = position_of(ranks, rank)
    return index


@cute.jit
def near_rank(ranks: Any, index: Int32) -> Int32:
    """Return the rank of this domain with that index."""
    rank = Int32(index)
    if const_expr(ranks.heap.problem.num_domains > 1):
        domain, _ = position_of(ranks, ranks.rank)
        rank = rank_at(ranks, domain, index)
    return rank


@cute.jit
def is_near(ranks: Any, rank: Int32) -> Boolean:
    """Return whether a rank is in this domain, which maps its memory."""
    near = Boolean(True)
    if const_expr(ranks.heap.problem.num_domains > 1 and ranks.heap.problem.domain_ranks == 1):
        near = rank == ranks.rank
    elif const_expr(ranks.heap.problem.num_domains > 1):
        theirs, _ = position_of(ranks, rank)
        mine, _ = position_of(ranks, ranks.rank)
        near = theirs == mine
    return near


@cute.jit
def neighbor(ranks: Any, step: Int32) -> Int32:
    """Return the rank `step` places further in this domain, cyclically."""
    return near_rank(ranks, (index_of(ranks, ranks.rank) + step) % ranks.heap.problem.domain_ranks)


@cute.jit
def stager_of(ranks: Any, rank: Int32) -> Int32:
    """Return the stager of a rank in this domain: the rank itself, if it is in this domain."""
    return near_rank(ranks, index_of(ranks, rank))


@cute.jit
def slot_of(ranks: Any, rank: Int32) -> Int32:
    """Return the slot of a rank's domain at all ranks of this domain."""
    slot = Int32(0)
    if const_expr(ranks.heap.problem.num_domains > 1):
        theirs, _ = position_of(ranks, rank)
        mine, _ = position_of(ranks, ranks.rank)
        slot = theirs - mine
        if slot < 0:
            slot += ranks.heap.problem.num_domains
    return slot


@cute.jit
def on_rail(ranks: Any, slot: Int32) -> Int32:
    """Return the rank on this rank's rail whose domain has that slot here."""
    domain, index = position_of(ranks, ranks.rank)
    domain += slot
    if domain >= ranks.heap.problem.num_domains:
        domain -= ranks.heap.problem.num_domains
    return rank_at(ranks, domain, index)


def slot_there(ranks: Any, slot: Int32 | int) -> Int32:
    """Return the slot of this rank's domain at ranks of the domain that has `slot` here."""
    return ranks.heap.problem.num_domains - slot
