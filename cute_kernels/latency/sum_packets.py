"""Packets of sums that are sent in a format. A packet has 30 payload vectors: 28 carry 16 codes each, the next one
carries a byte of scale for each 32 of these codes, and the last one is zero.

The lane that quantizes a vector holds its 16 numbers in registers. A block of 128 numbers can lie in two packets, which
both sum and quantize the whole block. A receiving lane has a payload vector, or half of one (packets.py).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from .. import ptx
from ..formats import Form
from ..quantize import decode, encode, exact_scale, largest, quantize_sum, scale_of, word_of_bytes
from ..rows import Width
from .packets import Words, lane_offset, lane_vector, marks
from .quantized import CODES, SCALES, VECTORS, first_vector, scale_in, scales_in
from .row_sums import add_rows, fetch_rows

NUMBERS = 16
"""Numbers of a sum that a lane quantizes: those of one payload vector."""
FEW_TOKENS = 32
"""With at most so many tokens, a warp fetches the rows of a sum that do not fit into its registers into L2 while it
loads the first ones. With more tokens that is slower (benchmarks/results/notes.md)."""


@cute.jit
def sum_words(
    form: cutlass.Constexpr[Form], dtype: cutlass.Constexpr[str], weighted: cutlass.Constexpr[bool], args: Any,
    row: Int32, packet: Int32, lane: Int32, batch: cutlass.Constexpr[int],
) -> Words:  # fmt: skip
    """By the whole warp: return a lane's payload vector of a packet of the sum of the rows that the lanes hold."""
    first = first_vector(form, packet)
    last = form.hidden_size // NUMBERS - 1
    acc = cute.make_rmem_tensor((NUMBERS,), Float32)
    width = Width(form.hidden_size, dtype)
    vectors = width.itemsize  # of 16 bytes, of NUMBERS numbers
    offset = cutlass.min(first + lane, last) * (16 * vectors)
    if args.max_tokens <= FEW_TOKENS:
        fetch_rows(width, args, row, offset, batch)
    add_rows(width, weighted, args, row, offset, vectors, batch, acc)
    stored, codes = quantize_sum(form, [acc[i] for i in range(NUMBERS)])
    if const_expr(form.block > 32):
        stored = arch.shuffle_sync(stored, (packet * VECTORS - first + lane) & 31)
    # Two neighboring lanes have the byte of 32 numbers. Bytes of lanes behind the row's end are never read.
    stored = word_of_bytes(stored, 2)
    mine = lane_vector(lane)
    words = cute.make_rmem_tensor((4,), Uint32)
    for i in range_constexpr(4):
        words[i] = arch.shuffle_sync(codes[i], (packet * VECTORS - first + mine) & 31)
        scales = arch.shuffle_sync(stored, 8 * i)
        if mine == SCALES:
            words[i] = Uint32(scales)
        elif mine > SCALES:
            words[i] = Uint32(0)
    return words[0], words[1], words[2], words[3]


def numbers_in(words: Words, lane: Int32) -> list[Float32]:
    """By the whole warp: return the numbers of the codes in a lane's words of a received packet. A lane with a mark has
    8; the others are undefined."""
    scale = exact_scale("mx", scale_in(True, scales_in(words), lane_vector(lane) >> 1))
    return decode(words, scale)


@cute.jit
def store_sums(width: cutlass.Constexpr[Width], acc: Any, packet: Int32, lane: Int32, out: Int64) -> None:
    """Round the numbers that a lane has of a packet, and store them in the token's row at `out`."""
    offset = packet * CODES + lane_offset(lane)
    if lane_offset(lane) < CODES and offset < width.hidden_size:
        at = out + offset * width.itemsize
        packed = ptx.pack([acc[i] for i in range(NUMBERS)], width.dtype)
        for i in range_constexpr(0, len(packed), 4):
            # Lanes with a mark have half as many codes.
            if 8 * i < 4 * len(packed) or not marks(lane):
                ptx.st_v4(at + 4 * i, packed[i : i + 4])


@cute.jit
def quantize_again(part: Any) -> None:
    """By the whole warp: replace the sums in a packet's lanes by their quantized values. Blocks have 32 numbers, all in
    one packet. Blocks of 128 numbers, which can lie in two packets, are not supported."""
    lane = arch.lane_idx()
    vector = lane_vector(lane)
    sums = [part[i] for i in range(NUMBERS)]
    most = largest(ptx.pack(sums[:8], "fp32"), "fp32")
    others = largest(ptx.pack(sums[8:], "fp32"), "fp32")
    # Lanes that mark have half a vector: the other half is 8 lanes away.
    half = arch.shuffle_sync_bfly(most, 8)
    if marks(lane):
        others = half
    most = cutlass.max(most, others)
    # The other vector of the block, and a lane that has it.
    other = vector ^ 1
    place = other % 15
    most = cutlass.max(most, arch.shuffle_sync(most, other // 15 * 16 + place + Int32(place >= 7)))
    stored, inverse = scale_of("mx", most)
    values = decode(encode(sums, inverse), exact_scale("mx", stored))
    for i in range_constexpr(NUMBERS):
        part[i] = values[i]
