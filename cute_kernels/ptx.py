"""The instructions that kernels here are built from, as one-line functions on 64-bit global addresses.

All are volatile inline PTX: the compiler neither drops, merges nor reorders them. Order between threads, GPUs and
proxies is the caller's affair (sync.py).
"""

from collections.abc import Sequence
from typing import Any

from cutlass import AddressSpace, Float32, Int32, Int64, Uint8, Uint32, inttoptr
from cutlass.cute import arch
from cutlass.experimental import primitives as prims


def ld_i32(addr: Int64) -> Int32:
    return arch.inline_ptx("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[addr])


def ld_f32(addr: Int64) -> Float32:
    return arch.inline_ptx("ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[addr])


def ld_u64(addr: Int64) -> Int64:
    """A load that is not served from L1: for words that earlier kernels or other SMs write."""
    return arch.inline_ptx("ld.relaxed.gpu.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[addr])


def ld_relaxed_sys(addr: Int64) -> Int64:
    """A word that peers write, which orders nothing."""
    return arch.inline_ptx("ld.relaxed.sys.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[addr])


def ld_u64_pair(addr: Int64) -> tuple[Int64, Int64]:
    """`ld_u64` of two words at a multiple of 16 bytes."""
    return arch.inline_ptx(
        "ld.relaxed.gpu.global.v2.b64 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int64, Int64], read_only_args=[addr]
    )


def ld_pair(addr: Int64) -> tuple[Int32, Int32]:
    """Two ints at a multiple of 8 bytes."""
    return arch.inline_ptx(
        "ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32, Int32], read_only_args=[addr]
    )


def ld_constant(addr: Int64) -> Int64:
    """A word that nobody writes while the kernel runs."""
    return arch.inline_ptx("ld.global.nc.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[addr])


def st_i32(addr: Int64, value: Int32) -> None:
    arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[addr, value])


def st_pair(addr: Int64, first: Int32, second: Int32) -> None:
    """Two ints at a multiple of 8 bytes."""
    arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[addr, first, second])


def st_f32(addr: Int64, value: Float32) -> None:
    arch.inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[addr, value])


def st_u64(addr: Int64, value: Int64) -> None:
    arch.inline_ptx("st.relaxed.gpu.global.b64 [{$r0}], {$r1};", read_only_args=[addr, value])


def ld_v4(addr: Int64) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """16 bytes, read once: they do not displace what L1 holds."""
    return arch.inline_ptx(
        "ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[addr],
    )


def st_v4(addr: Int64, words: Sequence[Any]) -> None:
    """16 bytes, not read again here."""
    arch.inline_ptx(
        "st.global.L1::no_allocate.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[addr, *words],
    )


def ld_acquire_sys(addr: Int64) -> Int64:
    """Whose result is to be used. In a kernel that calls functions (those of a device library) one whose result is not
    makes the assembler (of CUDA 13.0, among others) forget what every access to global memory needs, and some of them
    are then illegal instructions. On the left of `and` or `or` the DSL computes a call twice, and one result is not
    used: give it a name first."""
    return arch.inline_ptx("ld.acquire.sys.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[addr])


def st_release_sys(addr: Int64, value: Int64) -> None:
    arch.inline_ptx("st.release.sys.global.b64 [{$r0}], {$r1};", read_only_args=[addr, value])


def st_relaxed_sys(addr: Int64, value: Int64) -> None:
    arch.inline_ptx("st.relaxed.sys.global.b64 [{$r0}], {$r1};", read_only_args=[addr, value])


def ld_acquire_gpu(addr: Int64) -> Int64:
    return arch.inline_ptx("ld.acquire.gpu.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[addr])


def st_release_gpu(addr: Int64, value: Int64) -> None:
    arch.inline_ptx("st.release.gpu.global.b64 [{$r0}], {$r1};", read_only_args=[addr, value])


def ld_acquire_shared(ptr: Any) -> Int32:
    return arch.inline_ptx(
        "ld.acquire.cta.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Int32(ptr.toint())]
    )


def st_release_shared(ptr: Any, value: Int32) -> None:
    arch.inline_ptx("st.release.cta.shared.b32 [{$r0}], {$r1};", read_only_args=[Int32(ptr.toint()), value])


def add_shared(ptr: Any, value: Int32) -> None:
    """Adds to a word of shared memory that other threads of the block add to as well."""
    arch.inline_ptx("red.relaxed.cta.shared.add.u32 [{$r0}], {$r1};", read_only_args=[Int32(ptr.toint()), value])


def ld_shared_v4(ptr: Any) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    return arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[Int32(ptr.toint())],
    )


def atom_inc_acq_rel(addr: Int64) -> Int32:
    return arch.inline_ptx(
        "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[addr]
    )


def atom_inc(addr: Int64) -> Int32:
    return arch.inline_ptx(
        "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[addr]
    )


def atom_claim(addr: Int64, value: Int64 | int = 1) -> Int64:
    """Sets the word; returns what it held. At system scope: peers update the word of a failure, too, and accesses of
    one word at different scopes are not atomic to each other."""
    return arch.inline_ptx(
        "atom.relaxed.sys.global.exch.b64 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int64],
        read_only_args=[addr, Int64(value)],
    )


def red_max(addr: Int64, value: Int64) -> None:
    """The larger one of a word and a value, without an answer to wait for."""
    arch.inline_ptx("red.relaxed.gpu.global.max.u64 [{$r0}], {$r1};", read_only_args=[addr, value])


def atom_fail_by_peer(addr: Int64) -> None:
    """Sets a word of any rank that is 0 to 3, after what this thread wrote."""
    arch.inline_ptx(
        "{ .reg .b64 before; atom.release.sys.global.cas.b64 before, [{$r0}], 0, 3; }", read_only_args=[addr]
    )


def barrier_count(value: Int32) -> Int32:
    """A barrier of the whole block: the number of its threads whose value is not 0."""
    return arch.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r0}, 0; barrier.cta.red.popc.aligned.u32 {$w0}, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[value],
    )


def mul_rn(a: Float32, b: Float32) -> Float32:
    """a*b rounded to fp32. The explicit rounding keeps the compiler from fusing it into a following addition."""
    return arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def add_rn(a: Float32, b: Float32) -> Float32:
    return arch.inline_ptx("add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def div_rn(a: Float32, b: Float32) -> Float32:
    return arch.inline_ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def sigmoid(a: Float32) -> Float32:
    """1 / (1 + exp(-a)), to 5e-7 of it: 0 from a = -88 down, and for NaN.

    exp(z) = 2^t (1 + r ln 2) with t = z log2(e) rounded to fp32, and r what rounding (and a log2(e) of 24 bits) left
    out.
    """
    return arch.inline_ptx(
        "{ .reg .f32 z, t, r, e; neg.f32 z, {$r0}; min.f32 z, z, 0f42B00000; max.f32 z, z, 0fC2D00000; "
        "mul.rn.f32 t, z, 0f3FB8AA3B; neg.f32 r, t; fma.rn.f32 r, z, 0f3FB8AA3B, r; fma.rn.f32 r, z, 0f32A57060, r; "
        "mul.rn.f32 r, r, 0f3F317218; ex2.approx.ftz.f32 e, t; fma.rn.f32 e, e, r, e; add.rn.f32 e, e, 0f3F800000; "
        "rcp.approx.ftz.f32 {$w0}, e; }",
        write_only_types=[Float32],
        read_only_args=[a],
    )


def as_float(bits: Int32) -> Float32:
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def as_int(value: Float32) -> Int32:
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


_UNPACK = {
    "bf16": "{ shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000; }",
    "fp16": "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.f32.f16 {$w0}, lo; cvt.f32.f16 {$w1}, hi; }",
}
_PACK = {
    "bf16": "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
    "fp16": "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};",
}


def unpack(words: Sequence[Any], dtype: str) -> list[Float32]:
    """The numbers in 32-bit words, in memory order."""
    out = []
    for word in words:
        if dtype == "fp32":
            out.append(arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word]))
        else:
            out.extend(arch.inline_ptx(_UNPACK[dtype], write_only_types=[Float32, Float32], read_only_args=[word]))
    return out


def pack(values: Sequence[Float32], dtype: str) -> list[Uint32]:
    """Rounds to nearest even and packs; the reverse of `unpack`."""
    if dtype == "fp32":
        return [arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[v]) for v in values]
    return [
        arch.inline_ptx(_PACK[dtype], write_only_types=[Uint32], read_only_args=[values[i], values[i + 1]])
        for i in range(0, len(values), 2)
    ]


_HALF_TO_BITS = {
    "bf16": "{ .reg .b32 lo, hi; shl.b32 lo, {$r0}, 16; and.b32 hi, {$r0}, 0xffff0000; max.u32 {$w0}, lo, hi; }",
    "fp16": "{ .reg .b16 lo, hi, most; .reg .f32 f; mov.b32 {lo, hi}, {$r0}; max.u16 most, lo, hi; cvt.f32.f16 f, most;"
    " mov.b32 {$w0}, f; }",
}


def largest_of_halves(words: Sequence[Any], dtype: str) -> Int32:
    """Bits, as fp32, of the largest magnitude of 16-bit numbers, two in a word. Their bits without the sign have the
    order of the magnitudes, Inf and NaN last."""
    most = None
    for word in words:
        size = arch.inline_ptx("and.b32 {$w0}, {$r0}, 0x7fff7fff;", write_only_types=[Uint32], read_only_args=[word])
        if most is not None:
            size = arch.inline_ptx(
                "max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[most, size]
            )
        most = size
    return arch.inline_ptx(_HALF_TO_BITS[dtype], write_only_types=[Int32], read_only_args=[most])


def encode(values: Sequence[Float32], by: Float32) -> Uint32:
    """Four numbers times `by`, each product rounded to fp32 and then to e4m3: at most 448 in magnitude; NaN is 0x7F."""
    return arch.inline_ptx(
        "{ .reg .f32 a, b, c, d; .reg .b16 lo, hi; mul.rn.f32 a, {$r0}, {$r4}; mul.rn.f32 b, {$r1}, {$r4}; "
        "mul.rn.f32 c, {$r2}, {$r4}; mul.rn.f32 d, {$r3}, {$r4}; cvt.rn.satfinite.e4m3x2.f32 lo, b, a; "
        "cvt.rn.satfinite.e4m3x2.f32 hi, d, c; mov.b32 {$w0}, {lo, hi}; }",
        write_only_types=[Uint32],
        read_only_args=[*values, by],
    )


def decode(word: Uint32) -> list[Float32]:
    """The numbers of four e4m3 codes."""
    return list(
        arch.inline_ptx(
            "{ .reg .b16 lo, hi, a, b, c, d; .reg .b32 first, second; mov.b32 {lo, hi}, {$r0}; "
            "cvt.rn.f16x2.e4m3x2 first, lo; cvt.rn.f16x2.e4m3x2 second, hi; mov.b32 {a, b}, first; "
            "mov.b32 {c, d}, second; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; cvt.f32.f16 {$w2}, c; "
            "cvt.f32.f16 {$w3}, d; }",
            write_only_types=[Float32] * 4,
            read_only_args=[word],
        )
    )


def ld_u8(addr: Int64) -> Int32:
    return arch.inline_ptx("ld.global.u8 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[addr])


def st_u8(addr: Int64, value: Int32) -> None:
    arch.inline_ptx("st.global.b8 [{$r0}], {$r1};", read_only_args=[addr, value])


def ld_shared(ptr: Any) -> Int32:
    return arch.inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Int32(ptr.toint())]
    )


def look_then_wait(mbarrier: Any, phase: Any) -> None:
    """Waits until the phase of an mbarrier in shared memory is over. The first try takes no time limit, hence does not
    put the warp to sleep; those behind it may sleep for up to 10 ms, and wake when the phase is over."""
    arch.inline_ptx(
        "{ .reg .pred full; mbarrier.try_wait.parity.shared.b64 full, [{$r0}], {$r1}; @full bra.uni DONE; "
        "WAIT: mbarrier.try_wait.parity.shared.b64 full, [{$r0}], {$r1}, 10000000; @full bra.uni DONE; bra.uni WAIT; "
        "DONE: }",
        read_only_args=[mbarrier, phase],
    )


def bulk_load(smem_ptr: Any, addr: Int64, nbytes: Any, mbarrier: Any) -> None:
    """Starts a bulk copy global -> shared by the calling thread; `mbarrier` counts its bytes on arrival."""
    prims.cp_async_bulk_shared_cluster_global(smem_ptr, inttoptr(addr, AddressSpace.gmem, Uint8), mbarrier, nbytes)


def bulk_store(addr: Int64, smem_ptr: Any, nbytes: Any) -> None:
    """Starts a bulk copy shared -> global by the calling thread, in its current bulk group."""
    prims.cp_async_bulk_global_shared_cta(inttoptr(addr, AddressSpace.gmem, Uint8), smem_ptr, nbytes)
