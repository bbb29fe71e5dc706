"""The grouped GEMMs for few rows compile to the expected instructions, for Hopper and Blackwell. Needs no GPU."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import DRAWN_ARCHS, assert_in_registers, built, compiled_ptx, count

from cute_kernels.gemm.few_rows import ROWS, FewRows, rows_of, tile_of
from cute_kernels.gemm.few_rows_e4m3 import FewRowsE4M3
from cute_kernels.gemm.few_rows_e4m3 import tile_of as tile_of_e4m3
from cute_kernels.gemm.few_rows_wgmma import FewRowsWgmma
from cute_kernels.jit import object_name

SHARED = 227 * 1024
"""Bytes of shared memory that a block can have."""
SIZES = {"qwen3-30b": (128, 2048, 768), "deepseek-v3": (32, 7168, 2048), "odd": (37, 72, 40)}
"""Experts, hidden size, width."""


def kernels(sizes: str, rows: int, transposed: bool, named: int = 32, dtype: str = "bf16") -> list[FewRows]:
    """Both GEMMs."""
    experts, hidden, width = SIZES[sizes]
    return [
        FewRows(experts, depth, made, dtype, tile_of(made, gated, transposed, rows, named), gated, transposed)
        for depth, made, gated in ((hidden, width, True), (width, hidden, False))
    ]


CASES = [
    *kernels("qwen3-30b", 16, False), *kernels("qwen3-30b", 8, False, named=8), *kernels("deepseek-v3", 128, False),
    *kernels("deepseek-v3", 32, True), *kernels("odd", 64, True, dtype="fp16"), *kernels("odd", 96, False),
]  # fmt: skip


@pytest.mark.parametrize("arch", DRAWN_ARCHS)
@pytest.mark.parametrize("kernel", CASES, ids=str)
def test_instructions(kernel: FewRows, arch: str) -> None:
    """Copies of 16 bytes, matrices loaded once a stage, tensor cores, and nothing kept in local memory."""
    ptx, tile = compiled_ptx(kernel, arch), kernel.tile
    assert_in_registers(kernel, arch)
    made = built(kernel, arch)
    assert made.shared_bytes == tile.stages * tile.stage_bytes <= SHARED
    assert made.registers * tile.columns <= 65536
    form = {"bf16": "bf16", "fp16": "f16"}[kernel.dtype]
    product = f"mma.sync.aligned.m16n8k16.row.col.f32.{form}.{form}.f32"
    loops = count(ptx, product) // (2 * kernel.groups * tile.depth // 16)  # the compiler may unroll the stages
    assert loops >= 1 and count(ptx, product) == loops * 2 * kernel.groups * tile.depth // 16
    steps = loops * tile.depth // 16
    plain, turned = (count(ptx, f"ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16") for how in ("", ".trans"))
    of_rows = kernel.groups * steps // 2
    assert (plain, turned) == ((of_rows + 2 * steps, 0) if kernel.transposed else (of_rows, 2 * steps))
    assert "cp.async.ca" not in ptx and count(ptx, "cp.async.cg.shared.global") > 0
    assert ("], 16, %r" in ptx) == (kernel.depth % tile.depth != 0)  # partial copies only where K has a tail


def of_codes(sizes: str, rows: int) -> list[FewRowsE4M3]:
    """Both GEMMs with e4m3 weights."""
    experts, hidden, width = SIZES[sizes]
    return [
        FewRowsE4M3(experts, depth // 2, made, "bf16", tile_of_e4m3(gated, rows), gated, True)
        for depth, made, gated in ((hidden, width, True), (width, hidden, False))
    ]


QUANTIZED = [*of_codes("qwen3-30b", 8), *of_codes("deepseek-v3", 64), *of_codes("deepseek-v3", 96)]
SOME_DRAWN = [*QUANTIZED[:4], *(pytest.param(kernel, marks=pytest.mark.drawn) for kernel in QUANTIZED[4:])]


def ptx_of_codes(kernel: FewRowsE4M3, arch: str) -> str:
    """The PTX of a GEMM with e4m3 weights: copies of 16 bytes, and nothing kept in local memory."""
    ptx, tile = compiled_ptx(kernel, arch), kernel.tile
    assert_in_registers(kernel, arch)
    made = built(kernel, arch)
    assert made.shared_bytes == tile.stages * tile.stage_bytes <= SHARED
    assert made.registers * tile.columns <= 65536
    assert "cp.async.ca" not in ptx and count(ptx, "cp.async.cg.shared.global") > 0
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == kernel.gated
    return ptx


@pytest.mark.parametrize("kernel", SOME_DRAWN, ids=str)
def test_instructions_of_e4m3(kernel: FewRowsE4M3) -> None:
    """Blackwell: weights are converted once a stage for all rows."""
    ptx, tile = ptx_of_codes(kernel, "sm_100a"), kernel.tile
    products = 2 * 2 * kernel.groups * tile.depth // 16  # of a stage: halves, groups, pairs and steps of 32 codes
    loops = count(ptx, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32") // products
    assert loops >= 1 and count(ptx, "mma.sync") == loops * products
    # Two conversions for each word of four codes: 4 words of weights for each step of 32 codes and half, and for each
    # group of rows 2 words a step.
    converted = 2 * (4 * 2 * 4 + kernel.groups * 4 * 2) * tile.depth // 64
    assert ptx.count("cvt.rn.f16x2.e4m3x2") == loops * converted


@pytest.mark.parametrize("kernel", SOME_DRAWN, ids=str)
def test_instructions_of_wgmma(kernel: FewRowsE4M3) -> None:
    """Hopper: codes are multiplied as they are, from shared memory. A thread orders what it has copied there before
    reads of the tensor cores, and only then comes to the barrier."""
    ptx, tile = ptx_of_codes(kernel, "sm_90a"), kernel.tile
    assert isinstance(kernel.on("sm_90a"), FewRowsWgmma)
    assert all(kernel.on(arch) is kernel for arch in ("sm_100a", "sm_103a", "sm_120a"))
    rows = tile.rows if tile.rows <= 64 else 32
    groups = 2 * tile.depth * 2 // 128 * tile.rows // rows  # of a stage: halves, blocks of K, instructions for all rows
    loops = ptx.count("wgmma.commit_group") // groups
    assert loops >= 1 and ptx.count("wgmma.commit_group") == ptx.count("wgmma.fence") == loops * groups
    form = f"wgmma.mma_async.sync.aligned.m64n{rows}k32.f32.e4m3.e4m3"
    assert ptx.count("wgmma.mma_async") == ptx.count(form) == 4 * loops * groups
    waits = [count(ptx, f"wgmma.wait_group.sync.aligned {most};") for most in (0, 1)]
    assert waits == [loops, loops * (groups - 1)]
    assert not any(other in ptx for other in ("mma.sync", "ldmatrix", "cvt.rn.f16x2.e4m3x2"))
    assert ".shared .align 1024 .b8" in ptx
    order = re.findall(r"cp\.async\.wait_group|fence\.proxy\.async\.shared::cta|bar\.sync|wgmma\.fence", ptx)
    first = order.index("wgmma.fence")
    assert order[first - 3 : first] == ["cp.async.wait_group", "fence.proxy.async.shared::cta", "bar.sync"]


@pytest.mark.parametrize("kernel", [*CASES[:2], *QUANTIZED[:2]], ids=str)
def test_dependent_launch(kernel: FewRows) -> None:
    """The first GEMM waits before it reads anything; the second fetches weights before it waits. Both let the next
    kernel start."""
    ptx = compiled_ptx(kernel, "sm_90a")
    assert count(ptx, "griddepcontrol.wait") == 1
    assert count(ptx, "griddepcontrol.launch_dependents") >= 1
    assert kernel.options["use_pdl"]
    wait, reads, copies = (ptx.index(what) for what in ("griddepcontrol.wait", "ld.relaxed.gpu", "cp.async.cg"))
    assert wait < reads < copies if kernel.gated else reads < copies < wait < ptx.rindex("cp.async.cg")


def test_every_tile_fits() -> None:
    for rows in ROWS:
        for transposed in (False, True):
            for gated in (False, True):
                for named in (1, 8, 64):
                    tile = tile_of(2048, gated, transposed, rows, named)
                    assert tile.stages * tile.stage_bytes <= SHARED and tile.rows == rows
                    assert tile.half >= 32 and tile.depth % 32 == 0
        for gated in (False, True):
            tile = tile_of_e4m3(gated, rows)
            assert tile.stages * tile.stage_bytes <= SHARED and tile.rows == rows
            assert tile.columns == (256 if gated else 128) and tile.depth % 64 == 0


def test_rows_of_a_tile() -> None:
    """Tiles hold the rows that experts can have, or probably have."""
    assert [rows_of(most, mean) for most, mean in ((1, 1.0), (8, 0.5), (64, 2.0), (512, 16.0), (512, 64.0))] == [
        8, 8, 16, 32, 96,
    ]  # fmt: skip
    assert rows_of(10**6, 10**6) == 128


def test_each_has_a_file_of_its_own() -> None:
    assert len({object_name(kernel, "sm_90a") for kernel in (*CASES, *QUANTIZED)}) == len(CASES + QUANTIZED)
