"""Kernels of rows in a format: what they compile to, for Hopper and Blackwell, without a GPU."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import test_ptx
from test_ptx import ARCHS, assembled, compiled_ptx, count, needs_assembler

from cute_kernels.heap import Problem
from cute_kernels.latency.dispatch import Dispatch
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.pull import Pull

dumps_elsewhere = test_ptx.dumps_elsewhere
LARGE = {dtype: Problem(4, (64,) * 4, 8, 7168, dtype, 4096) for dtype in ("bf16", "fp16", "fp32")}
SMALL = Problem(3, (3, 0, 5), 4, 384, "fp32", 100)
POW2, FP32, MX, ROW = "e4m3/128/pow2", "e4m3/128/fp32", "e4m3/32/mx", "e4m3/row/fp32"
FORMATS = (POW2, FP32, MX, ROW)
ARRIVING = [(POW2, "rows"), (POW2, "columns"), (POW2, "packed"), (FP32, "rows"), (FP32, "columns"), (MX, "rows"),
            (MX, "packed"), (ROW, "rows"), *((form, "") for form in FORMATS)]  # fmt: skip


def staging(problem: Problem, form: str, given: bool = False) -> Any:
    return Publish(problem, True, True, True, False, form, given)


def pulling(problem: Problem, form: str, layout: str) -> Any:
    return Pull(problem, True, False, True, False, form, layout)


def few(problem: Problem, form: str, layout: str, given: bool = False, part: tuple[bool, bool] = (True, True)) -> Any:
    return Dispatch(problem, 64, True, *part, form, layout, given)


def resources(kernel: Any, arch: str, tmp_path: Path) -> tuple[int, int]:
    """Registers, and bytes of spill stores."""
    account = assembled(compiled_ptx(kernel, arch), arch, tmp_path)
    spilled = re.search(r"(\d+) bytes spill stores", account)
    registers = re.search(r"Used (\d+) registers", account)
    assert spilled and registers, account
    return int(registers[1]), int(spilled[1])


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", FORMATS)
def test_staging(form: str, arch: str) -> None:
    """Four codes at a time, of blocks whose largest magnitude the lanes find among themselves; a row is read once,
    unless its one scale must be known first."""
    ptx = compiled_ptx(staging(LARGE["bf16"], form), arch)
    passes = 2 if form == ROW else 1
    assert count(ptx, "ld.global.L1::no_allocate.v4.b32") == 4 * passes
    assert count(ptx, "cvt.rn.satfinite.e4m3x2.f32") == 4 * 4  # of four vectors of eight numbers
    assert count(ptx, "max.u16x2") == (4 * 4 - 1 if form == ROW else 4 * 3)
    assert count(ptx, "div.rn.f32") == (0 if form in (POW2, MX) else 2 * (1 if form == ROW else 4))
    # A chunk is marked when all its lanes' stores are done.
    assert count(ptx, "st.release.gpu") == 1


@pytest.mark.parametrize("dtype", LARGE)
def test_staging_of_other_rows(dtype: str) -> None:
    for form in (POW2, MX):
        ptx = compiled_ptx(staging(LARGE[dtype], form), "sm_90a")
        assert count(ptx, "cvt.rn.satfinite.e4m3x2.f32") == (8 if dtype == "fp32" else 16)
    given = compiled_ptx(staging(LARGE[dtype], POW2, given=True), "sm_90a")
    assert "e4m3x2" not in given


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("form", "layout"), ARRIVING)
def test_pulling(form: str, layout: str, arch: str) -> None:
    """Codes leave by bulk copies and never pass through registers, unless they are to become numbers."""
    ptx = compiled_ptx(pulling(LARGE["bf16"], form, layout), arch)
    assert count(ptx, "cp.async.bulk.global.shared::cta") == (1 if layout else 0)
    assert count(ptx, "cvt.rn.f16x2.e4m3x2") == (0 if layout else 2 * 2)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("form", "layout"), [way for way in ARRIVING if way[0] != ROW])
def test_few_tokens(form: str, layout: str, arch: str) -> None:
    ptx = compiled_ptx(few(LARGE["bf16"], form, layout), arch)
    assert count(ptx, "cvt.rn.satfinite.e4m3x2.f32") >= 2 * 8  # where a rank sends, and of its own rows
    assert ("cvt.rn.f16x2.e4m3x2" in ptx) == (layout == "")
    assert "e4m3x2.f32" not in compiled_ptx(few(LARGE["bf16"], form, layout, given=layout != ""), arch) or not layout


@needs_assembler
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("problem", [*LARGE.values(), SMALL], ids=[*LARGE, "small"])
def test_registers(problem: Problem, arch: str, tmp_path: Path) -> None:
    """Two blocks of a latency kernel fit on a multiprocessor; next to nothing is spilled."""
    forms = (POW2, MX) if problem.dtype == "bf16" else (FP32,)
    for form, layout in itertools.product(forms, ("rows", "packed", "")):
        if (form, layout) in ARRIVING:
            for kernel in (few(problem, form, layout), pulling(problem, form, layout), staging(problem, form)):
                registers, spilled = resources(kernel, arch, tmp_path)
                assert spilled <= 64 and registers <= (168 if isinstance(kernel, Pull) else 64), (kernel, spilled)
