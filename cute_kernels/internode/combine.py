"""Combine of few tokens over several NVLink domains: experts' ranks add up rows and put the sums, owners add up what
arrives.

A warp takes a copy that has rows here, adds them in fp32 over k ascending, rounds, and puts the sum straight into its
place at the owner, [copy number][token], with a word of its own. Then a warp takes one of this rank's tokens, waits for
the words of its copies, which the route tells, and adds the sums up in the tree over domains (docs/domains.md). Every
warp puts before it waits, so all waits end as long as all blocks fit on the device at once.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx, sync
from ..arrivals import Copy, Lists, given_row, guarded, lists, token_of
from ..copies import copies_of, lowest
from ..heap import Heap, Problem
from ..launch import Kernel, RankArgs
from .operation import begin, finish
from .wire import RECORD_WORDS, Adversary, Wire, batch_word

WARPS = 8
BEHIND_ALL = 2**30
"""Larger than the place of any rank in the order of addition."""


class CombineHeap(Heap):
    """A rank's heap for at most so many `tokens` of each rank. `outgoing`: sums on their way out, by their copies'
    places in the list; `sums` and `words`: by [copy number][token]."""

    def __init__(self, problem: Problem, tokens: int, wire: Wire) -> None:
        super().__init__(problem)
        places = problem.most_copies * tokens
        self.take(outgoing=problem.world_size * tokens * problem.row_bytes, sums=places * problem.row_bytes,
                  words=places * 8)  # fmt: skip
        if isinstance(wire, Adversary):
            self.take(posted=8, records=wire.depth * RECORD_WORDS * 8)


class CombineArgs(NamedTuple):
    """Of :class:`Combine`."""

    ranks: RankArgs
    y: Int64
    recv_weights: Int64
    topk_idx: Int64
    send_rows: Int64
    arrivals: Int64
    domains: Int64  # int32 [W]: the number of each rank's domain
    residual: Int64
    out: Int64
    tokens: Int32
    max_tokens: Int32
    num_rows: Int32  # of y and recv_weights
    blocks: Int32


class Order(NamedTuple):
    """What a warp knows of a token's sums: lane i of the i-th that is added."""

    copies: Int32  # how many; in all lanes
    number: Int32  # of the copy
    domain: Int32


@dataclass(frozen=True)
class Combine(Kernel):
    """`tokens`: the most of a rank. `weighted`: rows times their routing weight. `added`: there is a residual."""

    wire: Wire
    tokens: int
    weighted: bool
    added: bool

    NAME, Args = "ep_internode_combine", CombineArgs

    @property
    def heap(self) -> CombineHeap:
        return CombineHeap(self.problem, self.tokens, self.wire)

    @property
    def values(self) -> int:
        """Numbers in 16 bytes."""
        return 16 // self.problem.itemsize

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32 * WARPS, 1, 1)}

    @cute.kernel
    def kernel(self, args: CombineArgs) -> None:
        ranks = sync.Ranks(self.heap, args.ranks)
        tid, _, _ = arch.thread_idx()
        block, _, _ = arch.block_idx()
        first = Int32(arch.make_warp_uniform(tid // 32) * args.blocks + block)
        if block == 0:
            begin(self.wire, ranks, tid, 32 * WARPS)
        self.put(ranks, args, first)
        self.sum(ranks, args, first)
        finish(self.wire, ranks, args.blocks)

    @cute.jit
    def put(self, ranks: sync.Ranks, args: CombineArgs, first: Int32) -> None:
        """Sums of the copies that have rows here."""
        p = self.problem
        lane = Int32(arch.lane_idx())
        at = lists(args.arrivals, args.num_rows)
        # Whatever the list says, no more copies than there is room for.
        copies = cutlass.min(ptx.ld_i32(at.sources + p.world_size * 4), p.world_size * args.max_tokens)
        copies = cutlass.min(copies, args.num_rows)
        index = first
        while index < copies:
            copy = guarded(ranks, args.num_rows, args.max_tokens, copy_at(p, at, index, args.max_tokens))
            token, number = token_of(p, copy, args.max_tokens)
            row = Int32(-1)
            if lane < copy.rows:
                row, _ = ptx.ld_pair(at.owned + Int64(copy.begin + lane) * 8)
            row = given_row(ranks, row, args.num_rows)
            if copy.rows > 0:
                here = ranks.at(Int64(0), "outgoing") + Int64(index) * p.row_bytes
                self.add_rows(args, row, ranks.own + here)
                place = Int64(number * self.tokens + token)
                there = ranks.at(Int64(0), "sums") + place * p.row_bytes
                word = ranks.at(Int64(0), "words") + place * 8
                value = batch_word(ranks, Int32(1), Int32(1))
                self.wire.put_signal(ranks, copy.source, there, here, Int32(p.row_bytes), word, value)
            index += args.blocks * WARPS

    @cute.jit
    def add_rows(self, args: CombineArgs, row: Int32, to: Int64) -> None:
        """By a whole warp: the rounded sum of the rows that its lanes hold, lane by lane."""
        p = self.problem
        weight = Float32(1.0)
        if const_expr(self.weighted):
            if row >= 0:
                weight = ptx.ld_f32(args.recv_weights + Int64(row) * 4)
        acc = cute.make_rmem_tensor((self.values,), Float32)
        rows = arch.vote_ballot_sync(row >= 0)
        first = Int32(0)
        while first < p.row_bytes:
            at = cutlass.min(first + Int32(arch.lane_idx()) * 16, p.row_bytes - 16)
            for i in range_constexpr(self.values):
                acc[i] = Float32(0.0)
            left = rows
            while left != 0:
                k = lowest(left)
                left = left & (left - 1)
                words = ptx.ld_v4(args.y + Int64(arch.shuffle_sync(row, k)) * p.row_bytes + at)
                values = ptx.unpack(words, p.dtype)
                if const_expr(self.weighted):
                    w = arch.shuffle_sync(weight, k)
                    values = [ptx.mul_rn(value, w) for value in values]
                for i in range_constexpr(self.values):
                    acc[i] = ptx.add_rn(acc[i], values[i])
            # Lanes behind the row's end store its last vector again, which is the same.
            ptx.st_v4(to + at, ptx.pack([acc[i] for i in range(self.values)], p.dtype))
            first += 32 * 16

    @cute.jit
    def sum(self, ranks: sync.Ranks, args: CombineArgs, first: Int32) -> None:
        """This rank's tokens."""
        p = self.problem
        own = ptx.ld_i32(args.domains + Int64(ranks.rank) * 4)
        token = first
        while token < args.tokens:
            order = self.await_copies(ranks, args, token)
            sums = ranks.at(ranks.own, "sums") + Int64(token) * p.row_bytes
            self.add_copies(args, order, own, sums, Int64(token) * p.row_bytes)
            token += args.blocks * WARPS

    @cute.jit
    def await_copies(self, ranks: sync.Ranks, args: CombineArgs, token: Int32) -> Order:
        """By a whole warp: until the sums of a token have come; over domains, and in each over ranks, ascending. None
        where a wait was given up."""
        p = self.problem
        lane = Int32(arch.lane_idx())
        row, expert = Int32(-1), Int32(-1)
        if lane < p.top_k:
            at = Int64(token * p.top_k + lane) * 4
            row = ptx.ld_i32(args.send_rows + at)
            expert = ptx.ld_i32(args.topk_idx + at)
        copies = copies_of(p, expert, row)
        place, domain = Int32(BEHIND_ALL), Int32(0)
        came = Int64(0)
        if copies.expected != 0:
            domain = ptx.ld_i32(args.domains + Int64(copies.holder) * 4)
            place = domain * p.world_size + copies.holder
            word = ranks.at(Int64(0), "words") + Int64(copies.number * self.tokens + token) * 8
            came = self.wire.wait(ranks, word, copies.holder, token)
        # What every lane acquired comes before what the others read.
        arch.sync_warp()
        count = arch.popc(Int32(arch.vote_ballot_sync(copies.expected != 0)))
        if arch.vote_any_sync(came < 0):
            count = Int32(0)
        mine, of = Int32(0), Int32(0)
        i = Int32(0)
        while i < count:
            least = arch.warp_redux_sync(place, "min")
            winner = lowest(Int32(arch.vote_ballot_sync(place == least)))
            number, where = arch.shuffle_sync(copies.number, winner), arch.shuffle_sync(domain, winner)
            if lane == i:
                mine, of = number, where
            if lane == winner:
                place = Int32(BEHIND_ALL)
            i += 1
        return Order(count, mine, of)

    @cute.jit
    def add_copies(self, args: CombineArgs, order: Order, own: Int32, sums: Int64, row: Int64) -> None:
        """By a whole warp: a token's sums in order, from `sums` (those of copy 0), into its row."""
        p = self.problem
        total = cute.make_rmem_tensor((self.values,), Float32)
        part = cute.make_rmem_tensor((self.values,), Float32)
        first = Int32(0)
        while first < p.row_bytes:
            at = cutlass.min(first + Int32(arch.lane_idx()) * 16, p.row_bytes - 16)
            for i in range_constexpr(self.values):
                total[i] = Float32(0.0)
                part[i] = Float32(0.0)
            n = Int32(0)
            while n < order.copies:
                number, domain = arch.shuffle_sync(order.number, n), arch.shuffle_sync(order.domain, n)
                behind = arch.shuffle_sync(order.domain, (n + 1) & 31)
                words = ptx.ld_v4(sums + Int64(number * self.tokens) * p.row_bytes + at)
                values = ptx.unpack(words, p.dtype)
                for i in range_constexpr(self.values):
                    part[i] = ptx.add_rn(part[i], values[i])
                n += 1
                if n == order.copies or behind != domain:
                    if domain != own:
                        rounded = ptx.unpack(ptx.pack([part[i] for i in range(self.values)], p.dtype), p.dtype)
                        for i in range_constexpr(self.values):
                            part[i] = rounded[i]
                    for i in range_constexpr(self.values):
                        total[i] = ptx.add_rn(total[i], part[i])
                        part[i] = Float32(0.0)
            if const_expr(self.added):
                values = ptx.unpack(ptx.ld_v4(args.residual + row + at), p.dtype)
                for i in range_constexpr(self.values):
                    total[i] = ptx.add_rn(total[i], values[i])
            ptx.st_v4(args.out + row + at, ptx.pack([total[i] for i in range(self.values)], p.dtype))
            first += 32 * 16


@cute.jit
def copy_at(problem: cutlass.Constexpr[Problem], at: Lists, index: Int32, max_tokens: Int32) -> Copy:
    """Copy `index` of the list."""
    place = at.copies + Int64(index) * 8
    begin, home = ptx.ld_pair(place)
    source = Uint32(home) // (Uint32(max_tokens) * problem.most_copies)
    return Copy(begin, ptx.ld_i32(place + 8), home, Int32(source))
