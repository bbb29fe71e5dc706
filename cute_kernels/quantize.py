"""Numbers as codes and scales, and back, in registers: docs/formats.md to the bit.

Magnitudes are compared as the bits of fp32 without their sign, whose order is that of the numbers: Inf and NaN are the
largest, so a block that holds one is found by its largest magnitude.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute import arch

from . import ptx
from .formats import Form
from .sync import BAD_SCALE, Ranks, reject
from .views import Ints, Pairs, Records, Uint8s

FLOOR = 0x38D1B717
"""Bits of 1e-4: the least magnitude that scales are made for, but in MX."""
INFINITE = 0x7F800000
NO_NUMBER = 0x7FC00000
LARGEST = 448.0
"""Largest e4m3 number."""
ABOVE = 0x600000
"""The mantissa of 448: what is above it times a power of two needs the next one."""


def numbers_of(dtype: str) -> int:
    """Return how many numbers 16 bytes contain."""
    return 4 if dtype == "fp32" else 8


def largest(words: Sequence[Any], dtype: str) -> Int32:
    """Return the bits, as fp32, of the largest magnitude of the numbers in words."""
    if dtype != "fp32":
        return ptx.largest_of_halves(words, dtype)
    found = Int32(0)
    for word in words:
        found = cutlass.max(found, Int32(word) & 0x7FFFFFFF)
    return found


@cute.jit
def of_group(bits: Int32, lanes: cutlass.Constexpr[int]) -> Int32:
    """By the whole warp: the largest of each group of so many lanes (a power of two), in all of them."""
    step = lanes // 2
    while const_expr(step > 0):
        bits = cutlass.max(bits, arch.shuffle_sync_bfly(bits, step))
        step = step // 2
    return bits


def word_of_bytes(byte: Int32, lanes: int) -> Int32:
    """By the whole warp: return the word of the bytes of four neighboring groups of so many lanes (a power of two). All
    lanes of a group have its byte."""
    word = byte << (8 * ((arch.lane_idx() // lanes) & 3))
    word = word | arch.shuffle_sync_bfly(word, lanes)
    return word | arch.shuffle_sync_bfly(word, 2 * lanes)


@cute.jit
def scale_of(kind: cutlass.Constexpr[str], bits: Int32) -> tuple[Int32, Float32]:
    """Return the scale of a block from its largest magnitude, as fp32 bits (for "mx": the exponent), and the factor
    that numbers are multiplied by."""
    bad = bits >= INFINITE
    if const_expr(kind == "fp32"):
        amax = ptx.as_float(cutlass.max(bits, Int32(FLOOR)))
        scale = ptx.div_rn(amax, Float32(LARGEST))
        inverse = ptx.as_int(ptx.div_rn(Float32(1.0), scale))
        stored = ptx.as_int(scale)
        if bad:
            stored = Int32(INFINITE)
            inverse = Int32(NO_NUMBER)
        return stored, ptx.as_float(inverse)
    if const_expr(kind == "pow2"):
        bits = cutlass.max(bits, Int32(FLOOR))
    exponent = (bits >> 23) - 8
    if (bits & 0x7FFFFF) > ABOVE:
        exponent += 1
    exponent = cutlass.max(exponent, Int32(0))
    inverse = (254 - exponent) << 23
    if exponent == 0:
        inverse = Int32(0)
    if bad:
        exponent = Int32(255)
        inverse = Int32(NO_NUMBER)
    if const_expr(kind == "pow2"):
        exponent = exponent << 23
    return exponent, ptx.as_float(inverse)


def encode(numbers: Sequence[Float32], inverse: Float32) -> list[Uint32]:
    """Return the codes of numbers, four in each word."""
    return [ptx.encode(numbers[i : i + 4], inverse) for i in range(0, len(numbers), 4)]


def decode(words: Sequence[Any], scale: Float32) -> list[Float32]:
    """Return the numbers of codes, four in each word."""
    return [ptx.mul_rn(number, scale) for word in words for number in ptx.decode(word)]


@cute.jit
def quantize_sum(form: cutlass.Constexpr[Form], sums: Any) -> tuple[Int32, Any]:
    """By a whole warp: quantize a lane's consecutive numbers of a sum. Return the exponent of their block's scale, and
    their codes."""
    amax = largest(ptx.pack(sums, "fp32"), "fp32")
    stored, inverse = scale_of(form.kind, of_group(amax, form.block // len(sums)))
    if const_expr(form.kind != "mx"):
        stored = stored >> 23
    return stored, encode(sums, inverse)


@cute.jit
def exact_scale(kind: cutlass.Constexpr[str], stored: Int32) -> Float32:
    """Return the number that `scale_of` returned as bits or as an exponent."""
    if const_expr(kind == "mx"):
        bits = stored << 23
        if stored == 0:
            bits = Int32(0x400000)
        stored = bits
    return ptx.as_float(stored)


@cute.jit
def store_codes(row: Int64, vector: Int32, codes: Any) -> None:
    if const_expr(len(codes) == 1):
        Ints(row)[vector] = codes[0]
    else:
        Pairs(row)[vector] = codes[0], codes[1]


@cute.jit
def given_word(form: cutlass.Constexpr[Form], ranks: Ranks, scales: Int64, token: Int32, i: Int32) -> Int32:
    """Return the i-th 4 bytes of the scales that were passed with a token's row."""
    word = Int32(0)
    if const_expr(form.in_bytes):
        for j in range_constexpr(4):
            if 4 * i + j < form.scales:
                word = word | (Uint8s(Records(scales, form.scales).at(token))[4 * i + j] << (8 * j))
    else:
        word = Ints(scales)[Int64(token) * form.scales + i]
        if const_expr(form.kind == "pow2"):
            if (word & ~INFINITE) != 0:
                reject(ranks, BAD_SCALE, token * form.scales + i, word)
    return word
