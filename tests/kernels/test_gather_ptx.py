"""The gathering combine compiles to the instructions it is meant to have, and fits into registers and shared memory."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import ARCHS, assert_in_registers, compiled_ptx, count
from test_ptx import ALONE, BULK_IN, BULK_OUT, LARGE

from cute_kernels.heap import Problem
from cute_kernels.throughput.gather import Gather

LARGEST_SHARED = 227 * 1024  # of a block, on both architectures
PROBLEMS = (LARGE, ALONE, Problem(4, (1,) * 4, 4, 7168, "bf16", 4096))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_gather(problem, arch):
    ptx = compiled_ptx(Gather(problem), arch)
    assert_in_registers(Gather(problem), arch)
    assert count(ptx, BULK_IN) == 1 and count(ptx, BULK_OUT) == 0
    assert count(ptx, "mbarrier.try_wait") == 1 and count(ptx, "mbarrier.arrive.expect_tx") == 1
    # Before the hello; behind the hellos of all, before the first bulk copy.
    assert count(ptx, "fence.proxy.async") == 2
    first, second = (i for i in range(len(ptx)) if ptx.startswith("fence.proxy.async", i))
    assert first < ptx.index("st.release.sys") < ptx.index("ld.acquire.sys") < second < ptx.index(BULK_IN)
    assert count(ptx, "st.release.sys.global") >= 2  # hello, fetched
    assert count(ptx, "fence.acq_rel.sys") == 0, "nothing is waited for row by row"
    assert count(ptx, "fma.rn") == 0 and count(ptx, "mul.rn") == 0 and count(ptx, "add.rn.f32") > 0
    assert count(ptx, "ld.shared.v4.b32") == Gather(problem).slices.vectors


def test_shared_memory():
    """Shared memory holds stages with barrier, mark and place, the order of rows, and a word, whatever the size of a
    row."""
    for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
        for row_bytes in range(16, 70_000, 16 * 3):
            kernel = Gather(Problem(4, (1,) * 4, 4, row_bytes // itemsize, dtype, 16))
            shape = kernel.ring
            assert shape.stages >= 2 and shape.pieces * shape.piece_bytes >= row_bytes
            assert Gather.WARPS * (shape.stages * (shape.stride + 20) + 32 * 8) + 256 <= LARGEST_SHARED
