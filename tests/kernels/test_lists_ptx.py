"""The kernels that make lists, and routes of their places, compile to the expected instructions, for Hopper and
Blackwell. Needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import built, compiled_ptx, count

from cute_kernels.local.expert_lists import MakeExpertLists
from cute_kernels.local.places_route import PlacesRoute
from ep_ops.nn.list_operators import MOST_EXPERTS

KERNELS = [MakeExpertLists(3), MakeExpertLists(64), MakeExpertLists(MOST_EXPERTS), PlacesRoute()]
ARCHES = ("sm_90a", "sm_100a")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_entries(kernel: Any, arch: str) -> None:
    """All entries are counted 16 bytes at a time; one warp goes through a share of them, 32 at a time."""
    ptx = compiled_ptx(kernel, arch)
    assert ".local" not in ptx and count(ptx, "ld.global.L1::no_allocate.v4") == 1
    assert ("match.any.sync" in ptx) == isinstance(kernel, MakeExpertLists)
    assert "red.relaxed.cta.shared.add.u32" in ptx and "atom." not in ptx
    if isinstance(kernel, MakeExpertLists):  # between reading, counting on, and reading again
        place = ptx[ptx.index("match.any.sync") :]
        assert place.count("bar.warp.sync") >= 2


def test_registers() -> None:
    """A block of 1024 threads fits on a multiprocessor; nothing is spilled."""
    for kernel in KERNELS:
        for arch in ARCHES:
            made = built(kernel, arch)
            assert made.registers <= 64 and made.stack_bytes == 0, (kernel, made.registers)
