"""Packets of rows in a format. A packet has 30 payload vectors: 28 carry 16 codes each, the next one carries the scales
of all blocks of these codes, and the last one four of the token's routing weights.

A block that is split between two packets has its scale in both, so that each packet can be made and decoded on its own.
All blocks of a packet's 448 codes lie within 32 vectors of 16 codes. Each lane computes the largest magnitude of one
vector and its codes, which shuffles move to the lanes that send them.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..copies import lowest
from ..delivery import Arrived, Delivery
from ..formats import Form
from ..quantize import decode, encode, exact_scale, given_word, largest, of_group, scale_of, word_of_bytes
from ..sync import Ranks
from ..views import Records, Uint8s
from .packets import Words, lane_offset, lane_vector, marks, store_payload

VECTORS = 28
"""Number of vectors of codes in a packet."""
CODES = 16 * VECTORS
"""Number of codes in a packet."""
SCALES, WEIGHTS = 28, 29
"""Indices of the payload vectors of scales and weights."""
SCALES_LANE = 30
"""The lane that holds the vector of scales."""


def packets_of(form: Form, top_k: int, weights: bool) -> int:
    """Return the number of packets of a row, including the weights of its token if `weights`."""
    return max(-(-form.hidden_size // CODES), -(-top_k // 4) if weights else 0)


def first_vector(form: Form, packet: Int32) -> Int32:
    """Return the first vector of 16 codes of the first block that has codes in a packet."""
    each = form.block // 16
    return packet * VECTORS // each * each


def blocks_of(form: Form) -> int:
    """Return how many scales of a packet's 16 bytes of scales are used."""
    return CODES // 32 if form.in_bytes else 4


@cute.jit
def row_words(
    form: cutlass.Constexpr[Form], given: cutlass.Constexpr[bool], weights: cutlass.Constexpr[bool], ranks: Ranks,
    args: Any, token: Int32, packet: Int32, lane: Int32,
) -> Words:  # fmt: skip
    """By the whole warp: a lane's payload vector of a row's packet. `given`: x is quantized already."""
    p = ranks.heap.problem
    mine = lane_vector(lane)
    first = first_vector(form, packet)
    last = p.hidden_size // 16 - 1
    words = cute.make_rmem_tensor((4,), Uint32)
    if const_expr(given):
        vector = cutlass.min(packet * VECTORS + mine, last)
        got = ptx.ld_v4(Records(args.x, p.hidden_size).at(token) + vector * 16)
        for i in range_constexpr(4):
            words[i] = got[i]
            if mine == SCALES:
                words[i] = Uint32(0)
                if const_expr(form.in_bytes):
                    for j in range_constexpr(4):
                        column = packet * blocks_of(form) + 4 * i + j
                        if 4 * i + j < blocks_of(form) and column < form.scales:
                            byte = Uint8s(Records(args.scales, form.scales).at(token))[column]
                            words[i] = words[i] | (Uint32(byte) << (8 * j))
                else:
                    column = first * 16 // form.block + i
                    if column < form.scales:
                        words[i] = Uint32(given_word(form, ranks, args.scales, token, column))
    else:
        vector = cutlass.min(first + lane, last)
        parts = p.itemsize  # 16 bytes each
        numbers: list[Any] = []
        for part in range_constexpr(parts):
            numbers.extend(ptx.ld_v4(Records(args.x, p.row_bytes).at(token) + (vector * parts + part) * 16))
        amax = of_group(largest(numbers, p.dtype), form.block // 16)
        stored, inverse = scale_of(form.kind, amax)
        codes = encode(ptx.unpack(numbers, p.dtype), inverse)
        holder = (packet * VECTORS + mine - first) & 31
        if const_expr(form.in_bytes):
            if lane >= VECTORS or first + lane > last:
                stored = Int32(0)
            stored = word_of_bytes(stored, 2)
        for i in range_constexpr(4):
            words[i] = arch.shuffle_sync(codes[i], holder)
            scale = arch.shuffle_sync(stored, 8 * i)
            if mine == SCALES:
                words[i] = Uint32(scale)
    if mine == WEIGHTS:
        for i in range_constexpr(4):
            words[i] = Uint32(0)
            if const_expr(weights):
                if packet * 4 + i < p.top_k:
                    words[i] = Uint32(args.topk_weights.bits[token * p.top_k + packet * 4 + i])
    return words[0], words[1], words[2], words[3]


def first_weight(packet: Int32, lane: Int32) -> Int32:
    """Return the first of the token's weights in a lane's words; a negative value in lanes that hold none."""
    return (lane_offset(lane) - 16 * WEIGHTS) // 4 + packet * 4


@cute.jit
def store_row(
    delivery: cutlass.Constexpr[Delivery], to: Arrived, words: Words, packet: Int32, rows: Int32, lane: Int32
) -> None:
    """By the whole warp: what a packet brought, to each row that a lane holds (-1: none)."""
    p, form = delivery.problem, delivery.form
    stored = scales_in(words)
    offset = packet * CODES + lane_offset(lane)
    if lane_offset(lane) >= CODES:
        offset = Int32(p.hidden_size)  # behind all codes
    if const_expr(delivery.layout == ""):
        block = (packet * VECTORS + lane_vector(lane) - first_vector(form, packet)) * 16 // form.block
        scale = exact_scale(form.kind, scale_in(form.in_bytes, stored, block))
        numbers = ptx.pack(decode(words, scale), p.dtype)
    count = blocks_of(form)
    column = first_vector(form, packet) * 16 // form.block + lane
    mine = scale_in(form.in_bytes, stored, lane)
    holds = lane < count and column < form.scales
    if column >= form.scales:
        mine = Int32(0)
    if const_expr(delivery.in_words and form.scales % 4 != 0):
        # The columns behind the last one are this row's, too.
        holds = (lane < count + 4 and column < -(-form.scales // 4) * 4) and (lane < count or column >= form.scales)
    left = arch.vote_ballot_sync(rows >= 0)
    while left != 0:
        row = arch.shuffle_sync(rows, lowest(left))
        left = left & (left - 1)
        if const_expr(delivery.layout != ""):
            store_payload(words, lane, Records(to.rows, p.hidden_size).at(row), offset, p.hidden_size)
            at = delivery.scales_at(to, row)
            if holds:
                delivery.store_scale(at, column, mine)
        elif offset < p.hidden_size:
            out = Records(to.rows, p.row_bytes).at(row) + offset * p.itemsize
            for i in range_constexpr(0, len(numbers), 4):
                # Lanes with a mark have half as many codes.
                if 8 * i < 4 * len(numbers) or not marks(lane):
                    ptx.st_v4(out + 4 * i, numbers[i : i + 4])


def scales_in(words: Words) -> list[Int32]:
    """By the whole warp: return the 16 bytes of scales of a received packet."""
    return [Int32(arch.shuffle_sync(word, SCALES_LANE)) for word in words]


@cute.jit
def scale_in(in_bytes: cutlass.Constexpr[bool], stored: Any, block: Int32) -> Int32:
    """Return the scale of a packet's block from its 16 bytes of scales; any value for blocks that it does not have.
    `in_bytes`: scales are bytes, else words."""
    index = block >> 2 if in_bytes else block
    found = stored[0]
    for i in range_constexpr(1, 4):
        if index == i:
            found = stored[i]
    if const_expr(in_bytes):
        found = (found >> (8 * (block & 3))) & 0xFF
    return found
