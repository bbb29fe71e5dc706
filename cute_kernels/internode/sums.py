"""Sums that are sent between NVLink domains in a combine.

An expert's rank stores the sum of a copy at the stager of the token's owner, as it would at the owner itself. For every
batch of tokens, the owner sends a request to the stager of each other domain: a word for each token, whose bits are the
copies in that domain that have rows. The stager waits for these copies, adds them in ascending order of ranks, rounds,
and puts the sums of the batch on the wire, with one word that contains a bit mask of the tokens (sending.py). An empty
request gets no reply.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..barriers import whole_block
from ..copies import Copies, copies_of, entry_of, lowest, nth_bit, pop_lowest
from ..domains import on_rail, position_of, rank_at, slot_of, slot_there
from ..experts import holder_of
from ..heap import Problem
from ..ids import warp_id
from ..quantized_sums import SumSlices, add_slice, store_slice
from ..token_major import copy_scalars
from ..views import Ints, Records, Vectors
from .relayed import row_in
from .sending import batches_of, copy_rows, offset_of_batch, put_batch, vector_of, word_at, word_of

VECTORS = 2
"""Number of vectors of a row that a lane adds up at a time."""

FAR, OPENS, CLOSES = 1 << 30, 1 << 29, 1 << 28
"""Bits that are combined with the number of a row that an owner adds: the row is another domain's sum; it is the first
row of the owner's own domain; it is the last one."""


def in_two_parts(problem: Problem) -> bool:
    """Return whether an owner adds the rows of its own domain separately. With two domains, whose sums may be added in
    any order, it adds the other domain's sum to them."""
    return problem.num_domains > 2


def number_there(problem: Problem, slot: Int32 | int, number: Int32) -> Int32:
    """Return a copy's number at the rank that it is pushed to: 0 in a domain of one rank, which has at most one copy of
    a token."""
    if problem.domain_ranks > 1 or problem.num_domains == 1:
        return number
    return number * Int32(slot == 0)


@cute.jit
def ask(
    ranks: sync.Ranks, ids: cutlass.Constexpr[bool], args: Any, first: Int32, step: Int32
) -> None:  # fmt: skip
    """By a warp, `first` of `step`: what this rank wants of its batches, from all other domains. `ids`: and which
    experts its tokens name. `args`: those of the combine."""
    p = ranks.heap.problem
    lane = Int32(arch.lane_idx())
    batch = Int32(first)
    while batch < batches_of(ranks, args.max_tokens) and ranks.goes_on:
        for i in cutlass.range(p.batch_tokens):
            token = batch * p.batch_tokens + i
            row, expert = entry_of(p, args, token, token < args.tokens)
            copies = copies_of(p, expert, row)
            theirs = slot_of(ranks, cutlass.max(copies.holder, 0))
            for slot in cutlass.range(1, p.num_domains):
                bit = Int32(0)
                if copies.expected != 0 and theirs == slot:
                    bit = Int32(1) << number_there(p, slot, copies.number)
                wanted = arch.warp_redux_sync(bit, "or")
                request = request_at(ranks, ranks.view("wanted_out").at(slot - 1, batch))
                if lane == 0:
                    request.masks[i] = wanted
                if const_expr(ids):
                    if lane < p.top_k:
                        request.ids[i, lane] = expert
        arch.sync_warp()
        for slot in cutlass.range(1, p.num_domains):
            to = slot_there(ranks, slot)
            there = ranks.offsets("wanted_in").at(to - 1, batch)
            word = word_at(ranks, "wanted", to, batch)
            p.wire.put_signal(
                ranks, on_rail(ranks, slot), there, ranks.offsets("wanted_out").at(slot - 1, batch),
                Int32(ranks.heap.wanted_bytes if ids else ranks.heap.masks_bytes), word, word_of(ranks, 0),
            )  # fmt: skip
        batch += step


class SumRequest(NamedTuple):
    """An owner's request for the sums of a batch, by the number of the token in the batch."""

    masks: Ints  # copies that have rows, as bits
    ids: Ints  # [token, k] experts that the token names


def request_at(ranks: sync.Ranks, address: Int64) -> SumRequest:
    return SumRequest(Ints(address), Ints(address + ranks.heap.masks_bytes, ranks.heap.problem.weights_each))


@cute.jit
def pass_sums(
    ranks: sync.Ranks, threads: cutlass.Constexpr[int], rows: cutlass.Constexpr[bool], scalars: cutlass.Constexpr[bool],
    ids: cutlass.Constexpr[bool], wire: cutlass.Constexpr[SumSlices | None], max_tokens: Int32,
    share: tuple[Int32, Int32],
) -> None:  # fmt: skip
    """By a block of a stager: its batches of what owners of other domains ask for. `rows`: sums of rows; `scalars`:
    those of the (token, k) in the batch; `ids`: which lie by rank. `wire`: layout of sums that are sent in a
    format. `share`: index of the block among those that pass sums on, and their number."""
    p = ranks.heap.problem
    row_bytes = wire.row_bytes if wire else p.row_bytes
    warp = Int32(warp_id())
    others = p.num_domains - 1
    item, step = Int32(share[0]), share[1]
    while item < batches_of(ranks, max_tokens) * others and ranks.goes_on:
        batch = item // others
        slot = item - batch * others + 1
        owner = on_rail(ranks, slot)
        wanted, complete = await_wanted(ranks, slot, batch, owner)
        mask = Int32(arch.vote_ballot_sync(wanted != 0))
        # Each warp waits for the copies of some tokens.
        for i in cutlass.range(warp, p.batch_tokens, threads // 32):
            if not await_pushed(ranks, slot, batch * p.batch_tokens + i, arch.shuffle_sync(wanted, i), owner):
                complete = Boolean(False)
        # Extends each warp's acquires to the whole block, and counts whether all came: no sum may cross of which a
        # copy has not come.
        whole = ptx.barrier_count(Int32(complete))
        if whole == whole_block(threads) and mask != 0:
            if const_expr(scalars):
                if warp == 0:
                    if const_expr(ids):
                        pick_scalars(ranks, slot, batch)
                    put_scalars(ranks, owner, slot, batch)
            if const_expr(rows):
                token = batch * p.batch_tokens
                here = offset_of_batch(ranks, "rows_out", slot, batch, row_bytes)
                if const_expr(p.domain_ranks > 1 and wire is not None):
                    add_pushed_in_format(wire, ranks, threads, slot, token, wanted, mask, ranks.own + here)
                elif const_expr(p.domain_ranks > 1):
                    add_pushed(ranks, threads, slot, batch, wanted, mask)
                else:
                    # Sums of single copies need no adding, and if no token is left out they lie without gaps.
                    first = slot * p.most_copies * p.max_tokens
                    pushed = ranks.offsets("rows", row_bytes).at(first + token)
                    if mask & (mask + 1) == 0:
                        here = pushed
                    else:
                        copy_rows(threads, mask, ranks.own + here, ranks.own + pushed, row_bytes)
                # The batch is whole before it is put.
                arch.sync_threads()
                put_batch(ranks, threads, "sum", slot, batch, (mask, here, row_bytes), row_bytes)
        item += step


@cute.jit
def await_wanted(ranks: sync.Ranks, slot: Int32, batch: Int32, owner: Int32) -> tuple[Int32, Boolean]:
    """By a whole warp: what each lane's token of a batch is wanted for. Nothing, and False, if that never came."""
    p = ranks.heap.problem
    lane = Int32(arch.lane_idx())
    came = Int64(0)
    word = word_at(ranks, "wanted", slot, batch)
    if lane == 0:
        came = sync.await_word(ranks, ranks.own + word, owner, batch)
    p.wire.arrived(ranks, word, lane == 0)
    complete = arch.shuffle_sync(Int32(came >= 0), 0) != 0
    # What lane 0 acquired comes before what the others read, which a shuffle does not promise.
    arch.sync_warp()
    wanted = Int32(0)
    if complete and lane < p.batch_tokens:
        wanted = request_at(ranks, ranks.view("wanted_in").at(slot - 1, batch)).masks[lane]
    return wanted, complete


@cute.jit
def await_pushed(ranks: sync.Ranks, slot: Int32, token: Int32, copies: Int32, owner: Int32) -> Boolean:
    """By a whole warp: until the copies of a token of another domain have come. False if one never did.

    Which rank of its own domain has a copy the stager does not know. So it looks at the hellos of all of them, for one
    that does something else or has not come; else a report names the owner."""
    p = ranks.heap.problem
    lane = Int32(arch.lane_idx())
    index = (slot * p.most_copies + lane) * p.max_tokens + token
    missing = Boolean(lane < p.most_copies and (copies >> lane) & 1 != 0)
    start, polls, came = Int64(arch.globaltimer()), Int32(0), Boolean(True)
    waiting = arch.vote_any_sync(missing)
    while waiting and came:
        if missing:
            if ranks.seen("token", index):
                missing = Boolean(False)
        waiting = arch.vote_any_sync(missing)
        polls += 1
        if polls == sync.POLLS_PER_CHECK:
            polls = Int32(0)
            if suspects(ranks, start, token):
                came = Boolean(False)
            elif sync.warp_gives_up(ranks, start, "token", owner, token, Int64(0)):
                came = Boolean(False)
    # Hands what each lane acquired to the whole warp.
    arch.sync_warp()
    return came


@cute.jit
def suspects(ranks: sync.Ranks, start: Int64, token: Int32) -> Boolean:
    """By a whole warp that has waited since `start` for some rank of its domain: whether it waits no longer, for one of
    them that has begun something else, or nothing in time."""
    p = ranks.heap.problem
    domain, _ = position_of(ranks, ranks.rank)
    gone = Boolean(False)
    for index in cutlass.range(arch.lane_idx(), p.domain_ranks, arch.WARP_SIZE):
        peer = rank_at(ranks, domain, index)
        hello = ptx.ld_acquire_sys(ranks.view("hello").at(peer))
        if hello != ranks.mark:
            if sync.gives_up(ranks, start, "token", peer, token, hello):
                gone = Boolean(True)
    return arch.vote_any_sync(gone)


@cute.jit
def add_pushed(
    ranks: sync.Ranks, threads: cutlass.Constexpr[int], slot: Int32, batch: Int32, wanted: Int32, mask: Int32
) -> None:
    """By a whole block: the rounded sums of a batch's tokens, each of its copies by ranks ascending. `wanted`: by lane,
    the copies of each."""
    p = ranks.heap.problem
    values = VECTORS * (16 // p.itemsize)
    acc = cute.make_rmem_tensor((values,), Float32)
    rows = ranks.view("rows")
    to = ranks.own + offset_of_batch(ranks, "rows_out", slot, batch)
    total = Int32(arch.popc(mask)) * (p.row_bytes // 16)
    # Lanes of a warp go on together, since they ask each other for `wanted`.
    for first in cutlass.range(Int32(warp_id()) * 32, total, VECTORS * threads):
        # Behind the end the last vector is added up once more.
        numbers = [cutlass.min(first + arch.lane_idx() + i * threads, total - 1) for i in range(VECTORS)]
        left = cute.make_rmem_tensor((VECTORS,), Int32)
        copy = cute.make_rmem_tensor((VECTORS,), Int32)
        addresses = cute.make_rmem_tensor((VECTORS,), Int64)
        for u in range_constexpr(VECTORS):
            token, at = vector_of(p.row_bytes, mask, numbers[u])
            left[u] = arch.shuffle_sync(wanted, token)
            copy[u] = lowest(left[u])
            addresses[u] = rows.at(batch * p.batch_tokens + token) + at
        for i in range_constexpr(values):
            acc[i] = Float32(0.0)
        more = Int32(1)
        while more != 0:
            more = Int32(0)
            words: list[Any] = []
            for u in range_constexpr(VECTORS):
                # For a token with fewer copies than another one, the last is loaded again and not added.
                copies = Records(addresses[u], p.row_bytes)
                words.extend(ptx.ld_v4(copies.at((slot * p.most_copies + copy[u]) * p.max_tokens)))
            found = ptx.unpack(words, p.dtype)
            each = values // VECTORS
            for u in range_constexpr(VECTORS):
                if left[u] != 0:
                    for i in range_constexpr(each):
                        acc[u * each + i] = ptx.add_rn(acc[u * each + i], found[u * each + i])
                left[u] = left[u] & (left[u] - 1)
                if left[u] != 0:
                    copy[u] = lowest(left[u])
                    more = Int32(1)
        sums = ptx.pack([acc[i] for i in range(values)], p.dtype)
        for u in range_constexpr(VECTORS):
            Vectors(to)[numbers[u]] = sums[4 * u : 4 * u + 4]


@cute.jit
def add_pushed_in_format(
    wire: cutlass.Constexpr[SumSlices], ranks: sync.Ranks, threads: cutlass.Constexpr[int], slot: Int32,
    first_token: Int32, wanted: Int32, mask: Int32, to: Int64,
) -> None:  # fmt: skip
    """By a whole block: `add_pushed` of sums in a format, for the batch that begins with `first_token`: decode the sums
    that were pushed, add them and quantize the result, which goes to the address `to`. A warp takes a slice of one."""
    p = ranks.heap.problem
    slices = wire.plain.slices
    acc = cute.make_rmem_tensor((wire.plain.values,), Float32)
    rows = ranks.view("rows", nbytes=wire.row_bytes)
    pushed = Records(rows.at(slot * p.most_copies * p.max_tokens + first_token), wire.row_bytes)
    for item in cutlass.range(Int32(warp_id()), Int32(arch.popc(mask)) * slices, threads // 32):
        row = item // slices
        piece = item - row * slices
        token = nth_bit(mask, row)
        copies = arch.shuffle_sync(wanted, token)
        last = Int32(piece == slices - 1)
        for i in range_constexpr(wire.plain.values):
            acc[i] = Float32(0.0)
        while copies != 0:
            copy, copies = pop_lowest(copies)
            at = pushed.at(copy * p.max_tokens + token) + piece * wire.slice_bytes
            add_slice(wire, at, last, acc)
        store_slice(wire, acc, Records(to, wire.row_bytes).at(row) + piece * wire.slice_bytes, last)


@cute.jit
def pick_scalars(ranks: sync.Ranks, slot: Int32, batch: Int32) -> None:
    """By a whole warp: of each (token, k) of another domain's batch the scalar of the rank here that holds the expert.
    Those of experts elsewhere, and of copies without a row, are left as they are."""
    p = ranks.heap.problem
    domain, _ = position_of(ranks, ranks.rank)
    request = request_at(ranks, ranks.view("wanted_in").at(slot - 1, batch))
    scalars = ranks.view("scalars")
    for i in cutlass.range(arch.lane_idx(), p.batch_tokens * p.top_k, arch.WARP_SIZE):
        of_batch = i // p.top_k
        k = i - of_batch * p.top_k
        token = batch * p.batch_tokens + of_batch
        expert = request.ids[of_batch, k]
        if expert >= 0 and expert < p.num_experts:
            holder = holder_of(p, expert)
            theirs, _ = position_of(ranks, holder)
            if theirs == domain:
                scalars[slot, token, k] = copy_scalars(ranks, ranks.own, slot, holder, token)[k]


@cute.jit
def put_scalars(ranks: sync.Ranks, owner: Int32, slot: Int32, batch: Int32) -> None:
    """By a whole warp: those of a batch of another domain's tokens, whether or not they are of experts here."""
    p = ranks.heap.problem
    to = slot_there(ranks, slot)
    first = batch * p.batch_tokens
    here, there = ranks.offsets("scalars"), ranks.offsets("scalars_in")
    tokens = cutlass.min(Int32(p.max_tokens - first), Int32(p.batch_tokens))
    nbytes = tokens * (p.weights_each * here.step)
    word = word_at(ranks, "returned", to, batch)
    p.wire.put_signal(
        ranks, owner, there.at(to - 1, first, 0), here.at(slot, first, 0), nbytes, word, word_of(ranks, 0)
    )  # fmt: skip


@cute.jit
def await_sums(
    ranks: sync.Ranks, copies: Copies, token: Int32, rows: cutlass.Constexpr[bool], scalars: cutlass.Constexpr[bool]
) -> tuple[Int32, Int32, Boolean]:
    """By a whole warp: until all sums of one of this rank's tokens have come. In the order in which they are added,
    lane i has the i-th: its number, and the bits above, OPENS and CLOSES where it adds `in_two_parts`. Also how many
    there are, and False if one never came."""
    p = ranks.heap.problem
    holder = cutlass.max(copies.holder, 0)
    slot = slot_of(ranks, holder)
    domain, _ = position_of(ranks, holder)
    far = copies.expected != 0 and slot > 0
    near = copies.expected != 0 and slot == 0
    of_slot = Int32(-1)
    if far:
        of_slot = slot
    same = arch.match_sync(0xFFFFFFFF, of_slot)
    leads = far and (same & arch.lanemask_lt()) == 0
    batch = token // p.batch_tokens
    came, number, key = Boolean(True), Int32(0), Int32(0)
    if near:
        number = copies.number * p.max_tokens + token
        key = Int32(copies.number)
        if const_expr(in_two_parts(p)):
            key += domain * 64
        came = ranks.wait("token", number, copies.holder, token)
    word = Int64(0)
    if leads:
        key = domain * 64 if in_two_parts(p) else Int32(64)  # behind those of its own domain
        stager = on_rail(ranks, slot)
        if const_expr(scalars):
            word = word_at(ranks, "returned", slot, batch)
            came = sync.await_word(ranks, ranks.own + word, stager, token, 2) >= 0
        if const_expr(rows):
            word = word_at(ranks, "sum", slot, batch)
            mask = sync.await_word(ranks, ranks.own + word, stager, token, 2)
            came = came and mask >= 0
            row = row_in(Int32(mask), token - batch * p.batch_tokens)
            number = ((slot - 1) * ranks.heap.batches + batch) * p.batch_tokens + row + FAR
    p.wire.arrived(ranks, word, leads)
    # Hands what each lane acquired to the whole warp.
    complete = arch.vote_all_sync(came)
    mine, count = in_order(p, near, leads, key, number)
    return mine, count, complete


@cute.jit
def in_order(
    problem: cutlass.Constexpr[Problem], near: Boolean, leads: Boolean, key: Int32, number: Int32
) -> tuple[Int32, Int32]:
    """By a whole warp: the numbers of a token's sums, lane i the i-th by ascending `key`, and how many there are. Lanes
    with a sum of this rank's own domain are `near`, those with another domain's one are `leads`."""
    lane = Int32(arch.lane_idx())
    if not (near or leads):
        key = Int32(1 << 30)
    position = Int32(0)
    for k in range_constexpr(problem.top_k):
        if arch.shuffle_sync(key, k) < key:
            position += 1
    if const_expr(in_two_parts(problem)):
        nearest, last = Int32(64), Int32(-1)
        if near:
            nearest, last = position, position
        nearest, last = arch.warp_redux_sync(nearest, "min"), arch.warp_redux_sync(last, "max")
        if near and position == nearest:
            number += OPENS
        if near and position == last:
            number += CLOSES
    mine = Int32(0)
    for k in range_constexpr(problem.top_k):
        theirs, what = arch.shuffle_sync(position, k), arch.shuffle_sync(number, k)
        known = arch.shuffle_sync(key, k)
        if known < (1 << 30) and theirs == lane:
            mine = what
    return mine, Int32(arch.popc(Int32(arch.vote_ballot_sync(near or leads))))
