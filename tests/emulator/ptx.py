"""The module that kernels import as `cute_kernels.ptx`. Rows are fp32 or bf16, those of matrix instructions bf16 or
fp16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from .arch import Phases, mbarrier_wait, phases, start_store, sync_threads
from .machine import memory
from .numbers import Int32, Int64, Uint32, float_of, word_of
from .threads import look_again, me, pause
from .warps import cp_async as cp_async
from .warps import cp_async_commit as cp_async_commit
from .warps import cp_async_some as cp_async_some
from .warps import cp_async_wait as cp_async_wait
from .warps import fence_async_shared as fence_async_shared
from .warps import ldmatrix as ldmatrix
from .warps import mma as mma
from .warps import movmatrix as movmatrix
from .warps import shared_address as shared_address
from .warps import wgmma_e4m3 as wgmma_e4m3
from .warps import wgmma_wait as wgmma_wait


def ld_i32(addr: Any) -> Int32:
    return Int32(memory().load(addr))


ld_relaxed_i32 = ld_i32


def ld_f32(addr: Any) -> Any:
    return float_of(memory().load(addr))


def ld_u64(addr: Any) -> Int64:
    return memory().load_long(addr)


def ld_relaxed_sys(addr: Any) -> Int64:
    return memory().load_long(addr)


def ld_u64_pair(addr: Any) -> tuple[Int64, Int64]:
    return memory().load_long(addr), memory().load_long(addr + 8)


def prefetch(addr: Any) -> None:
    memory().load(addr)


def ld_pair(addr: Any) -> tuple[Int32, Int32]:
    first, second = memory().load_words(addr, 2, 8)
    return Int32(first), Int32(second)


def ld_v4(addr: Any) -> tuple[Uint32, ...]:
    return tuple(Uint32(word) for word in memory().load_words(addr, 4, 16))


def st_i32(addr: Any, value: Any) -> None:
    memory().store(addr, value)


def st_f32(addr: Any, value: Any) -> None:
    memory().store(addr, word_of(value))


def st_u64(addr: Any, value: Any) -> None:
    memory().store_long(addr, value)


def st_pair(addr: Any, words: Sequence[Any]) -> None:
    memory().store_words(addr, words, 8)


def st_v4(addr: Any, words: Sequence[Any]) -> None:
    memory().store_words(addr, words[:4], 16)


def ld_acquire_sys(addr: Any) -> Int64:
    """A look at a flag: others go on before what it showed is used."""
    value = memory().load_long(addr)
    look_again()
    return value


ld_constant = ld_u64
ld_acquire_gpu = ld_acquire_sys
st_release_sys = st_relaxed_sys = st_release_gpu = st_u64


def ld_acquire_shared(ptr: Any) -> Any:
    look_again()
    return ptr[0]


def st_release_shared(ptr: Any, value: Any) -> None:
    ptr[0] = value


def add_shared(ptr: Any, value: Any) -> None:
    at = ptr.at(0)
    ptr.view[at] += int(value)


def ld_shared_v4(ptr: Any) -> tuple[Uint32, ...]:
    raw = ptr.raw(16).cast("I")
    return tuple(Uint32(word) for word in raw)


def atom_inc(addr: Any) -> Int32:
    before = memory().load(addr)
    memory().store(addr, before + 1)
    return Int32(before)


atom_inc_acq_rel = atom_inc


def red_max(addr: Any, value: Any) -> None:
    memory().store_long(addr, max(int(memory().load_long(addr)), int(value)))


def atom_fail_by_peer(addr: Any) -> None:
    if memory().load_long(addr) == 0:
        memory().store_long(addr, 3)


def atom_claim(addr: Any, value: Any = 1) -> Int64:
    before = memory().load_long(addr)
    memory().store_long(addr, value)
    return before


def barrier_count(value: Any) -> Int32:
    block = me().block
    block.counted.append(int(value) != 0)
    sync_threads()
    total = sum(block.counted)
    sync_threads()
    block.counted.clear()
    sync_threads()
    return Int32(total)


def mul_rn(a: Any, b: Any) -> Any:
    return numpy.float32(a) * numpy.float32(b)


def add_rn(a: Any, b: Any) -> Any:
    return numpy.float32(a) + numpy.float32(b)


def fma_rn(a: Any, b: Any, c: Any) -> Any:
    return numpy.float32(numpy.float64(a) * numpy.float64(b) + numpy.float64(c))


def unpack(words: Sequence[Any], dtype: str) -> list[Any]:
    if dtype == "bf16":
        return [float_of(half) for word in words for half in (int(word) << 16, int(word) & 0xFFFF0000)]
    assert dtype == "fp32"
    return [float_of(word) for word in words]


def pack(values: Sequence[Any], dtype: str) -> list[Uint32]:
    if dtype == "bf16":
        halves = torch.tensor([float(value) for value in values]).bfloat16().view(torch.int16).tolist()
        return [Uint32(low & 0xFFFF | high << 16) for low, high in zip(halves[::2], halves[1::2], strict=True)]
    if dtype == "fp16":
        with numpy.errstate(over="ignore"):
            words = numpy.array(values, numpy.float32).astype(numpy.float16).view(numpy.uint32)
        return [Uint32(int(word)) for word in words]
    assert dtype == "fp32"
    return [word_of(value) for value in values]


def div_rn(a: Any, b: Any) -> Any:
    return numpy.float32(a) / numpy.float32(b)


def sigmoid(a: Any) -> Any:
    return numpy.float32(1 / (1 + math.exp(min(max(-float(a), -104.0), 88.0)))) if a == a else numpy.float32(0)


def as_float(bits: Any) -> Any:
    return float_of(bits)


def as_int(value: Any) -> Int32:
    return Int32(int(word_of(value)))


def largest_of_halves(words: Sequence[Any], dtype: str) -> Int32:
    assert dtype == "bf16"
    halves = [half for word in words for half in (int(word) & 0x7FFF, int(word) >> 16 & 0x7FFF)]
    return Int32(max(halves) << 16)


def encode(values: Sequence[Any], by: Any) -> Uint32:
    """Through torch, which saturates where it is told to, and rounds as the instruction does."""
    products = [float(mul_rn(value, by)) for value in values]
    codes = torch.tensor(products).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    return Uint32(
        sum((0x7F if math.isnan(f) else c) << 8 * i for i, (f, c) in enumerate(zip(products, codes, strict=True)))
    )


def decode(word: Any) -> list[Any]:
    codes = torch.tensor([int(word) >> 8 * i & 0xFF for i in range(4)], dtype=torch.uint8)
    return [numpy.float32(value) for value in codes.view(torch.float8_e4m3fn).float().tolist()]


_FP16 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half().view(torch.int16).tolist()
"""The bits of each code as fp16."""


def as_fp16(words: Sequence[Any]) -> list[list[Uint32]]:
    def two(word: Any, at: int) -> Uint32:
        low, high = (_FP16[int(word) >> at + 8 * i & 0xFF] & 0xFFFF for i in range(2))
        return Uint32(low | high << 16)

    return [[two(word, at) for word in words] for at in (0, 16)]


def ld_u8(addr: Any) -> Int32:
    at = int(addr)
    return Int32(memory().load(at // 4 * 4) >> at % 4 * 8 & 0xFF)


def st_u8(addr: Any, value: Any) -> None:
    at, by = int(addr) // 4 * 4, int(addr) % 4 * 8
    memory().store(at, memory().load(at) & ~(0xFF << by) | (int(value) & 0xFF) << by)


def ld_shared(ptr: Any) -> Int32:
    at = ptr.at(0, 4)  # of bytes
    return Int32(int.from_bytes(bytes(ptr.view[at : at + 4]), "little", signed=True))


def st_shared(ptr: Any, value: Any) -> None:
    at = ptr.at(0, 4)  # of bytes
    ptr.view[at : at + 4] = (int(value) & 0xFFFFFFFF).to_bytes(4, "little")


def ld_shared_pair(ptr: Any) -> tuple[Uint32, Uint32]:
    at = ptr.at(0, 8)  # of bytes
    assert at % 8 == 0, f"ld.shared.v2 at {at}"
    return ld_shared_word(ptr, at), ld_shared_word(ptr, at + 4)


def ld_shared_word(ptr: Any, at: int) -> Uint32:
    return Uint32(int.from_bytes(bytes(ptr.view[at : at + 4]), "little"))


def ld_shared_u8(ptr: Any) -> Int32:
    return Int32(ptr[0])


look_then_wait = mbarrier_wait


def bulk_load(smem_ptr: Any, addr: Any, nbytes: Any, mbarrier: Any) -> None:
    count, phase = int(nbytes), phases(mbarrier)
    assert isinstance(phase, Phases)
    to = smem_ptr.raw(count).cast("I")
    for i, word in enumerate(memory().load_words(addr, count // 4, 16)):
        to[i] = word
    phase.came(count)


def bulk_store(addr: Any, smem_ptr: Any, nbytes: Any) -> None:
    start_store(addr, smem_ptr.raw(int(nbytes)).cast("I"))


def behind_a_pause(access: Any) -> Any:
    def call(*values: Any) -> Any:
        pause()
        return access(*values)

    return call


ACCESSES = ("ld_", "st_", "atom_", "red_", "add_shared", "bulk_", "cp_async")
globals().update(
    {name: behind_a_pause(access) for name, access in list(globals().items()) if name.startswith(ACCESSES)}
)
