"""`benchmarks/wire.py` without a GPU: its kernels compile, and it says what it needs."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import ARCHS, DRAWN_ARCHS, compiled_ptx, count
from test_linked import LIBRARY, needs_library

from benchmarks import wire as bench
from cute_kernels.heap import Problem
from cute_kernels.internode import wire


def problem(made: wire.Wire) -> Problem:
    return Problem(2, (1, 1), 1, 2**15 + 8, "bf16", 12, ((0,), (1,)), made)


@pytest.mark.parametrize("arch", DRAWN_ARCHS)
@pytest.mark.parametrize("by_warp", [False, True])
@pytest.mark.parametrize("filled", [False, True])
def test_a_word_is_released_behind_its_batch(filled: bool, by_warp: bool, arch: str) -> None:
    ptx = compiled_ptx(bench.Puts(problem(wire.Nvlink()), filled, by_warp), arch)
    assert count(ptx, "st.release.sys.global.b64") == 1
    stores = [found.start() for found in re.finditer(r"st\.global\S*v4", ptx)]
    barrier = "bar.warp.sync" if by_warp else "bar.sync"
    last = max(found.start() for found in re.finditer(re.escape(barrier), ptx))
    assert stores and stores[-1] < last < ptx.index("st.release.sys.global.b64")
    if not by_warp:  # where it is put together first there is one loop of copies more
        assert len(stores) == wire.VECTORS * (2 if filled else 1)


@pytest.mark.parametrize("arch", DRAWN_ARCHS)
def test_an_answer_waits_for_a_word(arch: str) -> None:
    ptx = compiled_ptx(bench.Answers(problem(wire.Nvlink())), arch)
    assert count(ptx, "ld.acquire.sys.global.b64") >= 1 and count(ptx, "st.release.sys.global.b64") == 2


@needs_library
@pytest.mark.drawn
def test_over_nvshmem() -> None:
    assert LIBRARY is not None
    fences = {}
    for by_warp in (False, True):
        ptx = compiled_ptx(bench.Puts(problem(wire.Nvshmem(LIBRARY)), False, by_warp), ARCHS[0])
        assert "nvshmemi_device_state_d" in ptx and count(ptx, "st.release.sys.global.b64") == 0
        body = ptx[ptx.index(".entry") :]
        fences[by_warp] = count(body, "fence.acq_rel.sys")
    assert fences == {False: 1, True: 1}


def test_what_it_rejects(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2 and "torch sees no GPU" in capsys.readouterr().err
    for given in (["--bytes", "100"], ["--batches", "0"], ["--blocks", "4,0"], ["--wires", "carrier pigeons"]):
        with pytest.raises(SystemExit):
            bench.main(given)
        assert given[0] in capsys.readouterr().err
