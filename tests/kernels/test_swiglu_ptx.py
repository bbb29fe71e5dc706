"""The kernels of SwiGLU compile to the expected instructions, for Hopper and Blackwell. Needs no GPU."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import built, compiled_ptx, count

from cute_kernels.jit import object_name
from cute_kernels.local.swiglu import SwiGLURows

LOADS, STORES = "ld.global.L1::no_allocate.v4", "st.global.L1::no_allocate.v4"
PLAIN = [SwiGLURows(hidden, dtype, backward) for hidden, dtype in ((2048, "bf16"), (768, "fp16"), (36, "fp32"))
         for backward in (False, True)]  # fmt: skip
WEIGHTED = [
    SwiGLURows(hidden, dtype, True, weighted=True) for hidden, dtype in ((2048, "bf16"), (768, "fp16"), (36, "fp32"))
]
POW2 = "e4m3/128/pow2"
QUANTISED = [
    *(SwiGLURows(2048, "bf16", False, POW2, layout) for layout in ("rows", "columns", "packed")),
    SwiGLURows(640, "fp16", False, POW2, "packed"), SwiGLURows(768, "fp32", False, "e4m3/128/fp32", "columns"),
    SwiGLURows(160, "bf16", False, "e4m3/32/mx", "rows"), SwiGLURows(2048, "bf16", False, "e4m3/32/mx", "packed"),
]  # fmt: skip


def compiled(kernels: list[SwiGLURows]) -> list[tuple[SwiGLURows, str]]:
    """For Blackwell those of bf16 whose scales, if any, are packed."""
    on_blackwell = [kernel for kernel in kernels if kernel.dtype == "bf16" and kernel.layout in ("", "packed")]
    return [*((kernel, "sm_90a") for kernel in kernels), *((kernel, "sm_100a") for kernel in on_blackwell)]


@pytest.mark.parametrize(("kernel", "arch"), compiled(PLAIN), ids=str)
def test_plain(kernel: SwiGLURows, arch: str) -> None:
    """16 bytes at a time, each operand and each result once; one exponential a number and no division."""
    ptx = compiled_ptx(kernel, arch)
    assert ".local" not in ptx and not re.search(r"\bdiv\.\w+\.f32", ptx)
    operands, results = (3, 2) if kernel.backward else (2, 1)
    vectors = kernel.slices.vectors
    assert count(ptx, LOADS) == operands * vectors and count(ptx, STORES) == results * vectors
    numbers = vectors * (4 if kernel.dtype == "fp32" else 8)
    assert ptx.count("ex2.approx") == numbers
    assert not re.search(r"\bst\.global\.b(8|32)\b", ptx)
    # All operands of a piece are under way before the first is looked at.
    assert ptx.rindex(LOADS) < ptx.index("ex2.approx")


@pytest.mark.parametrize(("kernel", "arch"), compiled(WEIGHTED), ids=str)
def test_weighted(kernel: SwiGLURows, arch: str) -> None:
    """Each operand and each result once, by 16 bytes, and one number a row of the dot products."""
    ptx = compiled_ptx(kernel, arch)
    assert ".local" not in ptx and not re.search(r"\bdiv\.\w+\.f32", ptx)
    assert count(ptx, LOADS) == 3 * kernel.slices.vectors and 3 <= count(ptx, STORES) / kernel.slices.vectors <= 4
    assert len(re.findall(r"\bst\.global\.f32", ptx)) == 1 and ptx.count("shfl.sync.bfly") == 5


@pytest.mark.parametrize(("kernel", "arch"), compiled(QUANTISED), ids=str)
def test_quantized(kernel: SwiGLURows, arch: str) -> None:
    """Quantized rows are not stored in their own dtype; only padding is stored by 16 bytes."""
    ptx = compiled_ptx(kernel, arch)
    assert ".local" not in ptx
    assert count(ptx, LOADS) == 2 * kernel.slices.vectors and count(ptx, STORES) == 1
    assert ptx.count("cvt.rn.satfinite.e4m3x2") == kernel.slices.vectors * (2 if kernel.dtype == "fp32" else 4)
    assert ("div.rn.f32" in ptx) == (kernel.delivery.form.kind == "fp32")


def test_registers() -> None:
    """Four blocks fit on a multiprocessor; nothing is spilled."""
    for kernel, arch in compiled([*PLAIN, *WEIGHTED, *QUANTISED, SwiGLURows(2048, "fp32", True)]):
        made = built(kernel, arch)
        assert made.registers <= 64 and made.stack_bytes == 0, (kernel, made.registers)


def test_each_has_a_file_of_its_own() -> None:
    kernels = (*PLAIN, *WEIGHTED, *QUANTISED)
    assert len({object_name(kernel, "sm_90a") for kernel in kernels}) == len(kernels)
