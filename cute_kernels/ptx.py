"""The instructions that kernels here are built from, as one-line functions on 64-bit global addresses.

All are volatile inline PTX: the compiler neither drops, merges nor reorders them. Order between threads, GPUs and
proxies is the caller's affair (sync.py).
"""

from collections.abc import Sequence
from typing import Any

from cutlass import AddressSpace, Float32, Int32, Int64, Uint8, Uint32, inttoptr
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute import arch
from cutlass.experimental import primitives as prims


def _run(text: str, *given: Any) -> None:
    """Run an instruction without a result; `given` are {$r0}, {$r1}, ..."""
    arch.inline_ptx(text, read_only_args=[*given])


def _get(kinds: Any, text: str, *given: Any) -> Any:
    """Run an instruction with results {$w0}, ...; `kinds`: the type of the result, or a list of types."""
    return arch.inline_ptx(
        text, write_only_types=kinds if isinstance(kinds, list) else [kinds], read_only_args=[*given]
    )


def ld_i32(addr: Int64) -> Int32:
    return _get(Int32, "ld.global.b32 {$w0}, [{$r0}];", addr)


def ld_f32(addr: Int64) -> Float32:
    return _get(Float32, "ld.global.f32 {$w0}, [{$r0}];", addr)


def ld_u8(addr: Int64) -> Int32:
    return _get(Int32, "ld.global.u8 {$w0}, [{$r0}];", addr)


def ld_u64(addr: Int64) -> Int64:
    """Load a word that earlier kernels or other SMs write; not served from L1."""
    return _get(Int64, "ld.relaxed.gpu.global.b64 {$w0}, [{$r0}];", addr)


def ld_relaxed_sys(addr: Int64) -> Int64:
    """Load a word that peers write (relaxed, system scope); it orders nothing."""
    return _get(Int64, "ld.relaxed.sys.global.b64 {$w0}, [{$r0}];", addr)


def ld_u64_pair(addr: Int64) -> tuple[Int64, Int64]:
    """Load two words at a multiple of 16 bytes, as `ld_u64` does."""
    return _get([Int64, Int64], "ld.relaxed.gpu.global.v2.b64 {{$w0}, {$w1}}, [{$r0}];", addr)


def prefetch(addr: Int64) -> None:
    """Fetch the line at an address into L2."""
    _run("prefetch.global.L2 [{$r0}];", addr)


def ld_pair(addr: Int64) -> tuple[Int32, Int32]:
    """Load two ints at a multiple of 8 bytes."""
    return _get([Int32, Int32], "ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", addr)


def ld_constant(addr: Int64) -> Int64:
    """Load a word that nothing writes while the kernel runs."""
    return _get(Int64, "ld.global.nc.b64 {$w0}, [{$r0}];", addr)


def ld_v4(addr: Int64) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """Load 16 bytes that are read once, without displacing lines in L1."""
    return _get([Uint32] * 4, "ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", addr)


def st_i32(addr: Int64, value: Int32) -> None:
    _run("st.global.b32 [{$r0}], {$r1};", addr, value)


def st_f32(addr: Int64, value: Float32) -> None:
    _run("st.global.f32 [{$r0}], {$r1};", addr, value)


def st_u8(addr: Int64, value: Int32) -> None:
    _run("st.global.b8 [{$r0}], {$r1};", addr, value)


def st_pair(addr: Int64, words: Sequence[Any]) -> None:
    """Store two ints at a multiple of 8 bytes."""
    _run("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", addr, *words)


def st_u64(addr: Int64, value: Int64) -> None:
    _run("st.relaxed.gpu.global.b64 [{$r0}], {$r1};", addr, value)


def st_v4(addr: Int64, words: Sequence[Any]) -> None:
    """Store 16 bytes that are not read again here."""
    _run("st.global.L1::no_allocate.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", addr, *words)


def ld_acquire_sys(addr: Int64) -> Int64:
    """Load-acquire at system scope. The result must be used.

    In a kernel that calls functions of a device library, an acquire whose result is unused makes the assembler (CUDA
    13.0 among others) forget what later accesses to global memory need, and some of them become illegal instructions.
    The DSL evaluates the left operand of `and` and `or` twice and drops one of the results: assign it to a name first.
    """
    return _get(Int64, "ld.acquire.sys.global.b64 {$w0}, [{$r0}];", addr)


def st_release_sys(addr: Int64, value: Int64) -> None:
    _run("st.release.sys.global.b64 [{$r0}], {$r1};", addr, value)


def st_relaxed_sys(addr: Int64, value: Int64) -> None:
    _run("st.relaxed.sys.global.b64 [{$r0}], {$r1};", addr, value)


def ld_acquire_gpu(addr: Int64) -> Int64:
    return _get(Int64, "ld.acquire.gpu.global.b64 {$w0}, [{$r0}];", addr)


def st_release_gpu(addr: Int64, value: Int64) -> None:
    _run("st.release.gpu.global.b64 [{$r0}], {$r1};", addr, value)


def ld_shared(ptr: Any) -> Int32:
    return _get(Int32, "ld.shared.b32 {$w0}, [{$r0}];", Int32(ptr.toint()))


def ld_shared_u8(ptr: Any) -> Int32:
    return _get(Int32, "ld.shared.u8 {$w0}, [{$r0}];", Int32(ptr.toint()))


def ld_shared_pair(ptr: Any) -> tuple[Uint32, Uint32]:
    """Load two words of shared memory at a multiple of 8 bytes."""
    return _get([Uint32, Uint32], "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", Int32(ptr.toint()))


def ld_shared_v4(ptr: Any) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    return _get([Uint32] * 4, "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", Int32(ptr.toint()))


def st_shared(ptr: Any, value: Int32) -> None:
    _run("st.shared.b32 [{$r0}], {$r1};", Int32(ptr.toint()), value)


def ld_acquire_shared(ptr: Any) -> Int32:
    return _get(Int32, "ld.acquire.cta.shared.b32 {$w0}, [{$r0}];", Int32(ptr.toint()))


def st_release_shared(ptr: Any, value: Int32) -> None:
    _run("st.release.cta.shared.b32 [{$r0}], {$r1};", Int32(ptr.toint()), value)


def add_shared(ptr: Any, value: Int32) -> None:
    """Adds to a word of shared memory that other threads of the block add to as well."""
    _run("red.relaxed.cta.shared.add.u32 [{$r0}], {$r1};", Int32(ptr.toint()), value)


def atom_inc_acq_rel(addr: Int64) -> Int32:
    return _get(Int32, "atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], 1;", addr)


def atom_inc(addr: Int64) -> Int32:
    return _get(Int32, "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1;", addr)


def atom_claim(addr: Int64, value: Int64 | int = 1) -> Int64:
    """Sets the word and returns what it held. At system scope, because peers update the word of a failure, too, and
    accesses of one word at different scopes are not atomic to each other."""
    return _get(Int64, "atom.relaxed.sys.global.exch.b64 {$w0}, [{$r0}], {$r1};", addr, Int64(value))


def red_max(addr: Int64, value: Int64) -> None:
    """Replace a word by the maximum of it and a value, without waiting for a result."""
    _run("red.relaxed.gpu.global.max.u64 [{$r0}], {$r1};", addr, value)


def atom_fail_by_peer(addr: Int64) -> None:
    """Sets a word of any rank that is 0 to 3: a release at system scope of what this thread wrote before."""
    _run("{ .reg .b64 before; atom.release.sys.global.cas.b64 before, [{$r0}], 0, 3; }", addr)


def barrier_count(value: Int32) -> Int32:
    """Run a barrier of the whole block; return the number of its threads whose value is not 0."""
    text = "{ .reg .pred p; setp.ne.b32 p, {$r0}, 0; barrier.cta.red.popc.aligned.u32 {$w0}, 0, p; }"
    return _get(Int32, text, value)


def mul_rn(a: Float32, b: Float32) -> Float32:
    """Return a*b rounded to fp32. The explicit rounding prevents the compiler from fusing it with a following
    addition."""
    return _get(Float32, "mul.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def add_rn(a: Float32, b: Float32) -> Float32:
    return _get(Float32, "add.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def fma_rn(a: Float32, b: Float32, c: Float32) -> Float32:
    """Return a*b + c, rounded once."""
    return _get(Float32, "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", a, b, c)


def div_rn(a: Float32, b: Float32) -> Float32:
    return _get(Float32, "div.rn.f32 {$w0}, {$r0}, {$r1};", a, b)


def sigmoid(a: Float32) -> Float32:
    """Return 1 / (1 + exp(-a)) with a relative error of 5e-7: 0 from a = -88 down, and for NaN. exp(z) = 2^t (1 + r ln
    2), where t = z log2(e) is rounded to fp32, and r is what rounding (and log2(e) with 24 bits) omits."""
    return _get(
        Float32,
        "{ .reg .f32 z, t, r, e; neg.f32 z, {$r0}; min.f32 z, z, 0f42B00000; max.f32 z, z, 0fC2D00000; "
        "mul.rn.f32 t, z, 0f3FB8AA3B; neg.f32 r, t; fma.rn.f32 r, z, 0f3FB8AA3B, r; fma.rn.f32 r, z, 0f32A57060, r; "
        "mul.rn.f32 r, r, 0f3F317218; ex2.approx.ftz.f32 e, t; fma.rn.f32 e, e, r, e; add.rn.f32 e, e, 0f3F800000; "
        "rcp.approx.ftz.f32 {$w0}, e; }",
        a,
    )


def as_float(bits: Int32) -> Float32:
    return _get(Float32, "mov.b32 {$w0}, {$r0};", bits)


def as_int(value: Float32) -> Int32:
    return _get(Int32, "mov.b32 {$w0}, {$r0};", value)


_UNPACK = {
    "bf16": "{ shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000; }",
    "fp16": "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.f32.f16 {$w0}, lo; cvt.f32.f16 {$w1}, hi; }",
}
_PACK = {
    "bf16": "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
    "fp16": "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};",
}


def unpack(words: Sequence[Any], dtype: str) -> list[Float32]:
    """Return the numbers in 32-bit words, in memory order."""
    if dtype == "fp32":
        return [as_float(word) for word in words]
    return [value for word in words for value in _get([Float32, Float32], _UNPACK[dtype], word)]


def pack(values: Sequence[Float32], dtype: str) -> list[Uint32]:
    """Rounds to nearest even and packs; the reverse of `unpack`."""
    if dtype == "fp32":
        return [_get(Uint32, "mov.b32 {$w0}, {$r0};", value) for value in values]
    return [_get(Uint32, _PACK[dtype], values[i], values[i + 1]) for i in range(0, len(values), 2)]


_HALF_TO_BITS = {
    "bf16": "{ .reg .b32 lo, hi; shl.b32 lo, {$r0}, 16; and.b32 hi, {$r0}, 0xffff0000; max.u32 {$w0}, lo, hi; }",
    "fp16": "{ .reg .b16 lo, hi, most; .reg .f32 f; mov.b32 {lo, hi}, {$r0}; max.u16 most, lo, hi; cvt.f32.f16 f, most;"
    " mov.b32 {$w0}, f; }",
}


def largest_of_halves(words: Sequence[Any], dtype: str) -> Int32:
    """Return the bits, as fp32, of the largest magnitude of 16-bit numbers, two in a word. Without the sign, their bits
    have the order of the magnitudes, with Inf and NaN last."""
    most = None
    for word in words:
        size = _get(Uint32, "and.b32 {$w0}, {$r0}, 0x7fff7fff;", word)
        most = size if most is None else _get(Uint32, "max.u16x2 {$w0}, {$r0}, {$r1};", most, size)
    return _get(Int32, _HALF_TO_BITS[dtype], most)


def encode(values: Sequence[Float32], by: Float32) -> Uint32:
    """Return the codes of four numbers times `by`, each product rounded to fp32 and then to e4m3: at most 448 in
    magnitude; NaN is 0x7F."""
    return _get(
        Uint32,
        "{ .reg .f32 a, b, c, d; .reg .b16 lo, hi; mul.rn.f32 a, {$r0}, {$r4}; mul.rn.f32 b, {$r1}, {$r4}; "
        "mul.rn.f32 c, {$r2}, {$r4}; mul.rn.f32 d, {$r3}, {$r4}; cvt.rn.satfinite.e4m3x2.f32 lo, b, a; "
        "cvt.rn.satfinite.e4m3x2.f32 hi, d, c; mov.b32 {$w0}, {lo, hi}; }",
        *values,
        by,
    )


def decode(word: Int32 | Uint32) -> list[Float32]:
    """Return the numbers of four e4m3 codes."""
    return list(
        _get(
            [Float32] * 4,
            "{ .reg .b16 lo, hi, a, b, c, d; .reg .b32 first, second; mov.b32 {lo, hi}, {$r0}; "
            "cvt.rn.f16x2.e4m3x2 first, lo; cvt.rn.f16x2.e4m3x2 second, hi; mov.b32 {a, b}, first; "
            "mov.b32 {c, d}, second; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; cvt.f32.f16 {$w2}, c; "
            "cvt.f32.f16 {$w3}, d; }",
            word,
        )
    )


def as_fp16(words: Sequence[Any]) -> list[list[Uint32]]:
    """Return words of four e4m3 codes as fp16 numbers: the first two of each word, and the last two of each word."""
    text = (
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, lo; cvt.rn.f16x2.e4m3x2 {$w1}, hi; }"
    )
    pairs = [_get([Uint32, Uint32], text, word) for word in words]
    return [[pair[i] for pair in pairs] for i in range(2)]


def look_then_wait(mbarrier: Any, phase: Any) -> None:
    """Waits until the phase of an mbarrier in shared memory is over. The first try takes no time limit, hence does not
    put the warp to sleep; those behind it may sleep for up to 10 ms, and wake when the phase is over."""
    _run(
        "{ .reg .pred full; mbarrier.try_wait.parity.shared.b64 full, [{$r0}], {$r1}; @full bra DONE; "
        "WAIT: mbarrier.try_wait.parity.shared.b64 full, [{$r0}], {$r1}, 10000000; @full bra DONE; bra.uni WAIT; "
        "DONE: }",
        mbarrier,
        phase,
    )


def bulk_load(smem_ptr: Any, addr: Int64, nbytes: Any, mbarrier: Any) -> None:
    """Starts a bulk copy global -> shared by the calling thread; `mbarrier` counts its bytes on arrival."""
    prims.cp_async_bulk_shared_cluster_global(smem_ptr, inttoptr(addr, AddressSpace.gmem, Uint8), mbarrier, nbytes)


def bulk_store(addr: Int64, smem_ptr: Any, nbytes: Any) -> None:
    """Starts a bulk copy shared -> global by the calling thread, in its current bulk group."""
    prims.cp_async_bulk_global_shared_cta(inttoptr(addr, AddressSpace.gmem, Uint8), smem_ptr, nbytes)


def ld_relaxed_i32(addr: Int64) -> Int32:
    """Load an int that an earlier kernel wrote, which may still be running; not served from L1."""
    return _get(Int32, "ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", addr)


def cp_async(smem_ptr: Any, addr: Int64) -> None:
    """Start copying 16 bytes global -> shared by the calling thread, in its current group of copies."""
    _run("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", Int32(smem_ptr.toint()), addr)


def cp_async_some(smem_ptr: Any, addr: Int64, nbytes: Int32) -> None:
    """Start copying the first `nbytes` of 16 as `cp_async` does, and clear the rest of the 16 bytes."""
    _run("cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", Int32(smem_ptr.toint()), addr, nbytes)


def cp_async_commit() -> None:
    """Close the thread's current group of copies."""
    _run("cp.async.commit_group;")


def cp_async_wait(most: int) -> None:
    """Wait until all groups of the thread are complete but for the last `most`."""
    _run(f"cp.async.wait_group {most};")


def ldmatrix(smem_ptr: Any, transposed: bool) -> tuple[Uint32, Uint32, Uint32, Uint32]:
    """By a warp: load four 8x8 matrices of 16-bit numbers. Lane 8 q + r gives the address of row r of matrix q; it gets
    of each matrix the numbers 2 (lane % 4) and the next one of row lane // 4, or of that column if `transposed`."""
    how = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];"
    return _get([Uint32] * 4, text, Int32(smem_ptr.toint()))


def mma(sums: Sequence[Any], a: Sequence[Any], b: Sequence[Any], dtype: str) -> tuple[Float32, ...]:
    """By a warp: return sums [16, 8] + a [16, 16] b [16, 8] in fp32, in the layouts of mma.m16n8k16."""
    form = {"bf16": "bf16", "fp16": "f16"}[dtype]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{form}.{form}.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
    )
    return _get([Float32] * 4, text, *a, *b, *sums)


def movmatrix(word: Uint32) -> Uint32:
    """By a warp: transpose an 8x8 matrix of 16-bit numbers, of which a lane has two of row lane // 4."""
    return _get(Uint32, "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", word)


def shared_address(smem_ptr: Any) -> Int32:
    """Return the address of a place in shared memory."""
    return Int32(smem_ptr.toint())


def fence_async_shared() -> None:
    """Order what the thread has written to shared memory before reads of the async proxy, such as those of `wgmma`,
    that come behind a barrier. Copies of `cp_async` must have been waited for."""
    _run("fence.proxy.async.shared::cta;")


def wgmma_e4m3(a: Int64, b: Int64, rows: int) -> tuple[Float32, ...]:
    """By four warps: start multiplying a [64, 128] by the transpose of b [rows, 128], e4m3 codes in shared memory, 32
    of a row at a time, from zero. Each call is a group of its own. `a`, `b`: descriptors of matrices. Return the sums
    [64, rows]: warp w has rows 16 w to 16 w + 15 in the layout of mma.m16n8k16 for each 8 columns. Nothing may touch
    them before `wgmma_wait` returns them."""
    sums = ", ".join(f"{{$w{i}}}" for i in range(rows // 2))
    product = f"wgmma.mma_async.sync.aligned.m64n{rows}k32.f32.e4m3.e4m3 {{{sums}}}, a, b, more, 1, 1; "
    advance = "add.s64 a, a, 2; add.s64 b, b, 2; "  # by 32 bytes
    text = (
        "{ .reg .b64 a, b; .reg .pred more; mov.b64 a, {$r0}; mov.b64 b, {$r1}; setp.ne.b32 more, 0, 0; "
        f"wgmma.fence.sync.aligned; {product}setp.eq.b32 more, 0, 0; {(advance + product) * 3}"
        "wgmma.commit_group.sync.aligned; }"
    )
    return _get([Float32] * (rows // 2), text, a, b)


def wgmma_wait(most: int, sums: Sequence[Any]) -> list[Float32]:
    """By four warps: wait until all groups of `wgmma_e4m3` are complete but for the last `most`. Return `sums`, whose
    group is among the complete ones."""
    count = len(sums)
    found = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>"),  # type: ignore[attr-defined]
        [value.ir_value() for value in sums],
        f"wgmma.wait_group.sync.aligned {most};",
        ",".join(["=f"] * count + [str(i) for i in range(count)]),  # results in the registers of the sums
        has_side_effects=True,
    )
    return [Float32(llvm.extractvalue(Float32.mlir_type, found, [i])) for i in range(count)]
