"""Kernels of rows in a format: what they compile to, for Hopper and Blackwell, without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import built, compiled_ptx, count

from cute_kernels.heap import Problem
from cute_kernels.latency.dispatch import LatencyDispatch
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.pull import Pull
from cute_kernels.throughput.stage_quantized import TEAM
from ep_ops.backends.cute.latency import PARTS

LARGE = {dtype: Problem(4, (64,) * 4, 8, 7168, dtype, 4096) for dtype in ("bf16", "fp16", "fp32")}
POW2, FP32, MX, ROW = "e4m3/128/pow2", "e4m3/128/fp32", "e4m3/32/mx", "e4m3/row/fp32"
FORMATS = (POW2, FP32, MX, ROW)
ARRIVING = [(POW2, "rows"), (POW2, "columns"), (POW2, "packed"), (FP32, "rows"), (FP32, "columns"), (MX, "rows"),
            (MX, "packed"), (MX, "swizzled/quack"), (ROW, "rows"), *((form, "") for form in FORMATS)]  # fmt: skip
BLACKWELL = [(MX, "swizzled/torch", "sm_100a"), (MX, "", "sm_100a")]


def staging(problem: Problem, form: str, given: bool = False, route: bool = False) -> Any:
    """Return a publish kernel, by default along a known route: the code that stages rows is the same."""
    return Publish(problem, route, True, True, False, form, given)


def pulling(problem: Problem, form: str, layout: str) -> Any:
    return Pull(problem, True, False, True, False, form, layout)


def few(problem: Problem, form: str, layout: str, given: bool = False, part: tuple[bool, bool] = (True, True)) -> Any:
    return LatencyDispatch(problem, 64, True, *part, form, layout, given)


ENCODES, DECODES = "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2"


@pytest.mark.parametrize(("form", "arch"), [*((form, "sm_90a") for form in FORMATS), (MX, "sm_100a")])
def test_staging(form: str, arch: str) -> None:
    """16-bit magnitudes are compared by twos; only scales that are no powers of two are divided for. A chunk is marked
    when all its team's stores are done, in one place, behind the team's barrier."""
    ptx = compiled_ptx(staging(LARGE["bf16"], form), arch)
    assert ENCODES in ptx and "max.u16x2" in ptx and ".local" not in ptx
    assert ("div.rn.f32" in ptx) == (form in (FP32, ROW))
    assert count(ptx, "st.release.gpu") == 1
    stores, barrier, behind = ptx.partition(next(re.finditer(rf"bar\.sync\s+%r\d+, {32 * TEAM};", ptx))[0])
    assert "st.global" not in behind.partition("st.release.gpu")[0] and "st.release.gpu" not in stores


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_staging_of_other_rows(dtype: str) -> None:
    ptx = compiled_ptx(staging(LARGE[dtype], MX), "sm_90a")
    assert ENCODES in ptx and ("max.u16x2" in ptx) == (dtype != "fp32")


def test_staging_of_what_is_quantized_already() -> None:
    assert ENCODES not in compiled_ptx(staging(LARGE["bf16"], MX, True), "sm_90a")


@pytest.mark.parametrize(("form", "layout", "arch"), [*((*way, "sm_90a") for way in ARRIVING), *BLACKWELL])
def test_pulling(form: str, layout: str, arch: str) -> None:
    """Codes leave by bulk copies and never pass through registers, unless they are to become numbers."""
    ptx = compiled_ptx(pulling(LARGE["bf16"], form, layout), arch)
    assert count(ptx, "cp.async.bulk.global.shared::cta") == (1 if layout else 0)
    assert (DECODES in ptx) == (layout == "") and ".local" not in ptx


@pytest.mark.parametrize(
    ("form", "layout", "arch"),
    [(POW2, "columns", "sm_90a"), (POW2, "", "sm_90a"), (MX, "rows", "sm_90a"), (FP32, "rows", "sm_90a"), *BLACKWELL],
)
def test_few_tokens(form: str, layout: str, arch: str) -> None:
    """Packed ones are below, by halves and by registers."""
    ptx = compiled_ptx(few(LARGE["bf16"], form, layout), arch)
    assert ENCODES in ptx and ".local" not in ptx
    assert (DECODES in ptx) == (layout == "")


@pytest.mark.drawn
@pytest.mark.parametrize(("form", "layout"), [(POW2, "packed"), (MX, "")])
def test_few_tokens_by_halves(form: str, layout: str) -> None:
    """A start sends what a wait makes something of; rows that stay are quantized by the wait."""
    for part in PARTS[1:]:
        ptx = compiled_ptx(few(LARGE["bf16"], form, layout, part=part), "sm_90a")
        assert ENCODES in ptx and ".local" not in ptx
        assert (DECODES in ptx) == (layout == "" and part[1])
    if layout:
        assert ENCODES not in compiled_ptx(few(LARGE["bf16"], form, layout, given=True), "sm_90a")


@pytest.mark.drawn
@pytest.mark.parametrize(("dtype", "form", "layout", "arch"), [
    ("bf16", POW2, "packed", "sm_90a"), ("fp32", FP32, "columns", "sm_90a"), ("fp16", MX, "", "sm_90a"),
    ("bf16", MX, "swizzled/torch", "sm_100a"),
])  # fmt: skip
def test_registers(dtype: str, form: str, layout: str, arch: str) -> None:
    """Two blocks of a latency kernel fit on a multiprocessor; next to nothing is spilled."""
    problem = LARGE[dtype]
    for kernel in (few(problem, form, layout), pulling(problem, form, layout), staging(problem, form, route=True)):
        made = built(kernel, arch)
        most = 168 if isinstance(kernel, Pull) else 64
        assert made.stack_bytes <= 64 and made.registers <= most, (kernel, made.registers, made.stack_bytes)
