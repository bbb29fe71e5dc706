"""Sums of a combine that are sent in a format: their layout in staging, and how lanes store and read them.

A row is stored slice by slice, as the lanes of a warp hold its numbers (slices.py). A slice consists of its scales,
one byte for each 32 numbers, padded to a multiple of 32 bytes, and then its codes, one byte each. Scales come first, so
that codes begin at the same offset in whole slices and in the short last slice of a row. One bulk copy fetches both.

A block of 128 numbers stores its scale four times, so that all formats have the same layout.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr
from cutlass.cute import arch

from . import ptx
from .formats import Form
from .quantize import decode, exact_scale, numbers_of, quantize_sum, store_codes, word_of_bytes
from .slices import Slices
from .views import Ints, Pairs, Uint8s

SCALED = 32
"""Numbers for each byte of scale."""
ALIGNMENT = 32
"""The scales of a slice are padded to a multiple of this many bytes, so that codes begin at a sector of memory."""


@dataclass(frozen=True)
class SumSlices:
    """Rows of sums in a format, cut into slices as `plain` cuts rows of the dtype."""

    plain: Slices
    form: Form

    @property
    def numbers(self) -> int:
        """Numbers of a lane in a vector: those in 16 bytes of a row of the dtype."""
        return numbers_of(self.plain.dtype)

    @property
    def codes(self) -> int:
        """Number of codes in a whole slice."""
        return 32 * self.plain.values

    @property
    def scale_bytes(self) -> int:
        """Bytes of a slice's scales with their padding."""
        return -(-self.codes // SCALED // ALIGNMENT) * ALIGNMENT

    @property
    def slice_bytes(self) -> int:
        """Bytes of a whole slice."""
        return self.scale_bytes + self.codes

    @property
    def row_bytes(self) -> int:
        return self.plain.slices * self.scale_bytes + self.form.hidden_size

    @property
    def short(self) -> int:
        """Numbers of the last slice if it is shorter than the others, else 0."""
        return self.form.hidden_size % self.codes

    def end_of(self, last: Int32) -> Int32:
        """Return how many numbers a slice has. `last` is not 0 for the last slice of a row."""
        missing = self.codes - self.short if self.short else 0
        return self.codes - Int32(last != 0) * missing


@cute.jit
def requantize_slice(wire: cutlass.Constexpr[SumSlices], acc: Any) -> None:
    """By a whole warp: replace the slice of a sum in the lanes' registers by what another rank would add of it."""
    n = wire.numbers
    for u in range_constexpr(wire.plain.vectors):
        stored, codes = quantize_sum(wire.form, [acc[n * u + i] for i in range(n)])
        values = decode(codes, exact_scale("mx", stored))
        for i in range_constexpr(n):
            acc[n * u + i] = ptx.add_rn(values[i], Float32(0.0))


@cute.jit
def store_slice(wire: cutlass.Constexpr[SumSlices], acc: Any, to: Int64, last: Int32) -> None:
    """By a whole warp: quantize the slice of a sum in the lanes' registers, and store it at `to`. `last` is not 0 for
    the last slice of the row. The numbers of lanes after the end of the row are undefined, but form whole blocks: their
    codes are not stored, and their scales are stored in the padding."""
    n, vectors = wire.numbers, wire.plain.vectors
    lane = arch.lane_idx()
    end = wire.end_of(last)
    # `same` neighboring lanes share a byte of scale, and `among` lanes a word of four bytes. Lane u of these keeps the
    # word of vector u.
    same, among = SCALED // n, 4 * SCALED // n
    words = Int32(0)
    for u in range_constexpr(vectors):
        stored, codes = quantize_sum(wire.form, [acc[n * u + i] for i in range(n)])
        number = u * 32 * n + lane * n
        if number < end:
            store_codes(to + wire.scale_bytes + u * 32 * n, lane, codes)
        word = word_of_bytes(stored, same)
        if lane % among == u:
            words = word
    at, of_slice = lane % among * (32 // among) + lane // among, Ints(to)
    if lane % among < vectors:
        of_slice[at] = words


@cute.jit
def add_slice(wire: cutlass.Constexpr[SumSlices], at: Int64, last: Int32, acc: Any) -> None:
    """By a whole warp: add the slice at a global address. Lanes after the end of the row add its last numbers."""
    n, vectors = wire.numbers, wire.plain.vectors
    lane = arch.lane_idx()
    end = wire.end_of(last)
    words, scales = [], []
    for u in range_constexpr(vectors):
        number = cutlass.min(u * 32 * n + lane * n, end - n)
        scales.append(Uint8s(at)[number // SCALED])
        codes = at + wire.scale_bytes + number
        words.append([Ints(codes)[0]] if n == 4 else Pairs(codes)[0])
    for u in range_constexpr(vectors):
        values = decode(words[u], exact_scale("mx", scales[u]))
        for i in range_constexpr(n):
            acc[n * u + i] = ptx.add_rn(acc[n * u + i], values[i])


def numbers_at(wire: SumSlices, stage: Any, u: int) -> list[Float32]:
    """Return a lane's numbers of vector `u` of the slice in a stage: codes times their scale."""
    n = wire.numbers
    scale = exact_scale("mx", ptx.ld_shared_u8(stage + u * n + arch.lane_idx() * n // SCALED))
    at = stage + wire.scale_bytes + u * 32 * n + arch.lane_idx() * n
    return decode([ptx.ld_shared(at)] if n == 4 else ptx.ld_shared_pair(at), scale)
