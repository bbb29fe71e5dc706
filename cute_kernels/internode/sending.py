"""Rows that are sent to other NVLink domains: batches of the rows that are needed there, each with one put and one
word.

A batch covers `batch_tokens` consecutive tokens. The rows of those tokens that name an expert of the destination domain
are stored without gaps, in the order of tokens, in the batch's place at the stager of that domain. The batch's word
contains the epoch and a bit mask of these tokens. A reader therefore finds the row of a token by counting bits, batches
may arrive in any order, and a batch without rows is a word with an empty mask. In a batch with the mask 0b1011, which
has rows of tokens 0, 1 and 3, the row of token 3 is the third.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..barriers import whole_block
from ..copies import nth_bit
from ..domains import on_rail, position_of, rank_at, slot_there
from ..experts import holder_of
from ..ids import thread_id, warp_id
from ..marks import has_number, with_number
from ..views import Ints, Records, Vectors

VECTORS = 4
"""Number of vectors of a batch that a thread loads before it stores them."""


def word_of(ranks: sync.Ranks, number: Any) -> Int64:
    """Return a word of this operation that contains a number."""
    return with_number(ranks.base, Int64(number))


def batches_of(ranks: sync.Ranks, max_tokens: Int32) -> Int32:
    """Return the number of batches that every rank sends to each other domain."""
    each = ranks.heap.problem.batch_tokens
    return (max_tokens + each - 1) // each


def offset_of_batch(ranks: sync.Ranks, name: str, slot: Int32, batch: Int32, room: int = 0) -> Int64:
    """Return the offset of a batch in a section of rows with slots. Its rows are contiguous, with the size that is
    sent. `room`: bytes of a row, if not those of a row of the dtype."""
    return ranks.offsets(name, ranks.heap.problem.batch_tokens * room).at(slot - 1, batch)


def word_at(ranks: sync.Ranks, name: str, slot: Int32, index: Int32) -> Int64:
    """Return the offset of a word in a section with slots."""
    return ranks.offsets(name).at(slot - 1, index)


@dataclass(frozen=True)
class BatchFiller:
    """The rows that a rank sends. `fill(ranks, args, batch, mask, to)` puts a batch together, by a whole block: the
    rows of the tokens of `mask`, each of `row_bytes`, without gaps at the address `to`."""

    fill: Callable[..., None]
    row_bytes: int


@cute.jit
def send_rows(
    ranks: sync.Ranks, threads: cutlass.Constexpr[int], rows: cutlass.Constexpr[BatchFiller], args: Any, first: Int32,
    step: Int32,
) -> None:  # fmt: skip
    """By a block, `first` of `step`: its batches of this rank's rows, to all other domains. `args` are those of the
    publish kernel."""
    others = ranks.heap.problem.num_domains - 1
    item = Int32(first)
    while item < batches_of(ranks, args.max_tokens) * others and ranks.goes_on:
        batch = item // others
        slot = item - batch * others + 1
        domain, _ = position_of(ranks, on_rail(ranks, slot))
        mask = needed(ranks, args.topk_idx, batch, args.tokens, domain)
        here = offset_of_batch(ranks, "rows_out", slot, batch)
        rows.fill(ranks, args, batch, mask, ranks.own + here)
        # The batch is whole before it is put.
        arch.sync_threads()
        put_batch(ranks, threads, "batch", slot, batch, (mask, here, rows.row_bytes))
        item += step


@cute.jit
def put_batch(
    ranks: sync.Ranks, threads: cutlass.Constexpr[int], words: cutlass.Constexpr[str], slot: Int32, batch: Int32,
    what: Any, room: cutlass.Constexpr[int] = 0,
) -> None:  # fmt: skip
    """By the block that has put a batch together: one put. `words`: the section of its word. `what`: of which tokens
    it has rows, its offset, and the bytes of a row. `room`: see `offset_of_batch`."""
    p = ranks.heap.problem
    mask, here, row_bytes = what
    to, target = slot_there(ranks, slot), on_rail(ranks, slot)
    word = word_at(ranks, words, to, batch)
    if mask != 0:
        there = offset_of_batch(ranks, "rows_in", to, batch, room)
        nbytes = Int32(arch.popc(mask)) * row_bytes
        p.wire.put_signal_by_block(ranks, threads, target, there, here, nbytes, word, word_of(ranks, mask))
    elif thread_id() == 0:
        p.wire.put_value(ranks, target, word, word_of(ranks, 0))


@cute.jit
def vector_of(row_bytes: cutlass.Constexpr[int], mask: Int32, number: Int32) -> tuple[Int32, Int32]:
    """Return, for a vector of a batch's rows, the token that the row belongs to and the offset of the vector in the
    row."""
    row = number // (row_bytes // 16)
    return nth_bit(mask, row), (number - row * (row_bytes // 16)) * 16


@cute.jit
def copy_rows(
    threads: cutlass.Constexpr[int], mask: Int32, to: Int64, source: Int64, row_bytes: cutlass.Constexpr[int]
) -> None:
    """By a whole block: copy the rows of the tokens of `mask`, without gaps between them."""
    total = Int32(arch.popc(mask)) * (row_bytes // 16)
    for first in cutlass.range(thread_id(), total, VECTORS * whole_block(threads)):
        # Behind the end the last vector is copied once more.
        numbers = [cutlass.min(first + i * threads, total - 1) for i in range(VECTORS)]
        words = []
        for i in range_constexpr(VECTORS):
            token, at = vector_of(row_bytes, mask, numbers[i])
            words.append(ptx.ld_v4(Records(source, row_bytes).at(token) + at))
        for i in range_constexpr(VECTORS):
            Vectors(to)[numbers[i]] = words[i]


@cute.jit
def needed(ranks: sync.Ranks, topk_idx: Ints, batch: Int32, tokens: Int32, domain: Int32) -> Int32:
    """By a whole warp: which tokens of a batch name an expert of a domain, as bits."""
    p = ranks.heap.problem
    lane = Int32(arch.lane_idx())
    token = batch * p.batch_tokens + lane
    names = Boolean(False)
    if lane < p.batch_tokens and token < tokens:
        experts = cute.make_rmem_tensor((p.top_k,), Int32)
        # All loads first: they are in flight together.
        for k in range_constexpr(p.top_k):
            experts[k] = topk_idx[token * p.top_k + k]
        for k in range_constexpr(p.top_k):
            expert = experts[k]
            if expert >= 0 and expert < p.num_experts:
                theirs, _ = position_of(ranks, holder_of(p, expert))
                if theirs == domain:
                    names = Boolean(True)
    return Int32(arch.vote_ballot_sync(names))


@cute.jit
def send_weights(
    ranks: sync.Ranks, warps: cutlass.Constexpr[int], each: cutlass.Constexpr[int], tile: Int32, first: Int32,
    end: Int32,
) -> None:  # fmt: skip
    """By one block, behind a barrier: the weights of its tile, tokens from `first` to `end`, from where it has put
    them for its own domain, to the stagers of all others. `each`: bytes of a token's, and of what goes with them."""
    p = ranks.heap.problem
    slot = Int32(warp_id()) + 1
    while slot < p.num_domains and ranks.goes_on:
        to = slot_there(ranks, slot)
        there = Records(ranks.offsets("weights_in").part(to - 1).base, each).at(first)
        here = Records(ranks.offsets("weights").base, each).at(first)
        word = word_at(ranks, "weighed", to, tile)
        nbytes = cutlass.max(end - first, 0) * each
        p.wire.put_signal(ranks, on_rail(ranks, slot), there, here, nbytes, word, word_of(ranks, 0))
        slot += warps


@cute.jit
def relay(
    ranks: sync.Ranks, threads: cutlass.Constexpr[int], rows: cutlass.Constexpr[bool],
    weighted: cutlass.Constexpr[bool], max_tokens: Int32,
) -> None:  # fmt: skip
    """By one block of a stager: passes each word on that comes from another domain, to all ranks of this one and to
    itself, behind what came with it. It ends when all have come; so this rank's operation does not end before them.
    `rows`, `weighted`: whether they come."""
    p = ranks.heap.problem
    others = p.num_domains - 1
    domain, _ = position_of(ranks, ranks.rank)
    batches = Int32(0)
    if const_expr(rows):
        batches = others * batches_of(ranks, max_tokens)
    count = Int32(batches)
    if const_expr(weighted):
        count += others * p.tiles
    item = Int32(thread_id())
    start, polls = Int64(arch.globaltimer()), Int32(0)
    while arch.vote_any_sync(item < count):
        # Words are ordered by number, then by slot, in the order in which they are sent.
        number = item // others
        slot = item - number * others + 1
        source = on_rail(ranks, slot)
        word = word_at(ranks, "batch", slot, number)
        flag = ranks.offsets("relayed").at(source, number)
        if item >= batches:
            number = (item - batches) // others
            slot = item - batches - number * others + 1
            source = on_rail(ranks, slot)
            word = word_at(ranks, "weighed", slot, number)
            flag = ranks.offsets("relayed_weights").at(source, number)
        seen, came = Int64(0), Boolean(False)
        if item < count:
            seen = ptx.ld_acquire_sys(ranks.own + word)
            polls += 1
            came = has_number(seen, ranks.base)
        p.wire.arrived(ranks, word, came)
        if came:
            # What was acquired comes before the flags.
            arch.fence_acq_rel_sys()
            for index in cutlass.range(p.domain_ranks):
                ptx.st_relaxed_sys(ranks.peer(rank_at(ranks, domain, index)) + flag, seen)
            item += whole_block(threads)
            start, polls = Int64(arch.globaltimer()), Int32(0)
        elif polls >= sync.POLLS_PER_CHECK:
            polls = Int32(0)
            if sync.gives_up(ranks, start, "batch", source, number, seen):
                item = Int32(count)
