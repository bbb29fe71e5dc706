"""The kernel that sums rows compiles to the expected instructions, for Hopper and Blackwell. Needs no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import built, compiled_ptx, count

from cute_kernels.jit import object_name
from cute_kernels.local.sum_rows import SumRows

LOADS, STORES = "ld.global.L1::no_allocate.v4", "st.global.L1::no_allocate.v4"
KERNELS = [
    SumRows(7168, "bf16"), SumRows(7168, "bf16", weighted=True), SumRows(7168, "bf16", alone=True),
    SumRows(7168, "bf16", alone=True, bounded=True),
    SumRows(264, "fp16"), SumRows(2048, "fp32", weighted=True),
]  # fmt: skip
ARCHES = ("sm_90a", "sm_100a")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_sums(kernel: SumRows, arch: str) -> None:
    """16 bytes at a time, a row's before the first is added; each product and each sum rounded."""
    ptx = compiled_ptx(kernel, arch)
    assert ".local" not in ptx and "fma.rn.f32" not in ptx
    assert count(ptx, LOADS) == kernel.slices.vectors and count(ptx, STORES) == kernel.slices.vectors
    assert ptx.count("add.rn.f32") == (0 if kernel.alone else kernel.slices.values)
    assert ptx.count("mul.rn.f32") == (kernel.slices.values if kernel.weighted else 0)
    if not kernel.alone:
        assert ptx.rindex(LOADS) < ptx.index("add.rn.f32")


def test_registers() -> None:
    """Four blocks fit on a multiprocessor; nothing is spilled."""
    for kernel in KERNELS:
        for arch in ARCHES:
            made = built(kernel, arch)
            assert made.registers <= 64 and made.stack_bytes == 0, (kernel, made.registers)


def test_each_has_a_file_of_its_own() -> None:
    assert len({object_name(kernel, "sm_90a") for kernel in KERNELS}) == len(KERNELS)
