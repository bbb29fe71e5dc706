"""Kernels never write outside, whatever route they are given: rows behind the last one are reported."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from built import compiled_ptx

from cute_kernels import marks, sync
from cute_kernels.heap import Problem
from cute_kernels.latency import combine as latency_combine
from cute_kernels.latency import dispatch as latency_dispatch
from cute_kernels.latency.packets import WARPS
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.gather import Gather
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.publish_tokens import PublishTokens
from cute_kernels.throughput.pull import Pull
from cute_kernels.throughput.pull_scaled import PullScaled
from ep_ops.backends.cute.report import Report


def guarded(problem: Problem) -> list[Any]:
    """A kernel of each class that goes along a route which its caller gives."""
    return [
        Pull(problem, True, False, False),
        PullScaled(problem, False),
        Combine(problem, True, True, False),
        Combine(problem, False, False, True),
        Combine(problem, True, False, True, False, True),
        Gather(problem),
        latency_combine.LatencyCombine(problem, 16, True),
    ]


@pytest.mark.drawn
def test_only_given_routes_are_looked_at() -> None:
    """Kernels whose route was placed in the same operation do not check rows. 72 ranks, because test_ptx.py compiles
    fewer, for sm_100a as well."""
    problem = Problem(72, (2,) * 72, 4, 512, "bf16", 64)
    # The reason, and behind it the flag, of which there is none.
    word = r"st\.relaxed\.gpu\.global\.b64 \[%rd\d+\], "
    reason = rf"{word}{sync.BAD_ROW};(?:\s|//.*|add.*|cvt.*)*{word}0;"
    for kernel in guarded(problem):
        assert re.search(reason, compiled_ptx(kernel, "sm_90a")), kernel
    assert not re.search(reason, compiled_ptx(Pull(problem, True, False, True), "sm_90a"))


@pytest.mark.parametrize("kind", [Publish, PublishTokens])
def test_publish_compiles_at_72_ranks(kind: type) -> None:
    """Kernels that publish rows and weights along a known route compile."""
    problem = Problem(72, (2,) * 72, 4, 512, "bf16", 64)
    assert ".target sm_90a" in compiled_ptx(kind(problem, False, True, True, False), "sm_90a")


@pytest.mark.parametrize("world_size", [WARPS + 1, pytest.param(72, marks=pytest.mark.drawn)])
def test_latency_dispatch_places_rows_for_every_rank(world_size: int) -> None:
    """A warp for each destination: with more of them than warps they take turns, and no rank is left out."""
    problem = Problem(world_size, (2,) * world_size, 4, 512, "bf16", 64)
    ptx = compiled_ptx(latency_dispatch.LatencyDispatch(problem, 16, False), "sm_90a")
    # The prefix sum over a rank's experts: five steps, in a loop over 32 experts at a time, that one in a loop over
    # destinations (however often the compiler unrolls them).
    steps = [found.start() for found in re.finditer(r"shfl\.sync\.up\.b32", ptx)]
    assert len(steps) % 5 == 0
    assert len(steps) >= 5 * -(-world_size // WARPS) or all(loops_around(ptx, at) == 2 for at in steps)


def loops_around(ptx: str, at: int) -> int:
    """How many loops hold what stands there: branches behind it go back to labels before it."""
    labels = {found[1]: found.start() for found in re.finditer(r"^(\$\w+):", ptx, re.MULTILINE)}
    branches = re.finditer(r"\bbra(?:\.uni)?\s+(\$\w+);", ptx)
    return len({found[1] for found in branches if labels[found[1]] < at < found.start()})


def test_report_names_row_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    made = object.__new__(Report)
    made._num_experts, made._lost_experts = 8, 0
    mark = 7 << marks.SHIFT | marks.pack("combine", 64)
    made._words = [0] * 16 + [1, sync.BAD_ROW, 0, 1, 1, 40, mark, 32] + [0] * 24
    assert made.pending()
    text = made.rejected()
    assert text is not None
    assert text.startswith("the route of rank 1 fills row 40, but only 32 rows were given (ep::combine, operation 7)")
    assert made.rejected() is None and not made.pending(), "it is told once"
    made._words = [0] * 16 + [1, sync.BAD_EXPERT, 0, 0, 0, 5, mark, 9] + [0] * 24
    assert "topk_idx holds 9 at flat index 5 on rank 0" in str(made.rejected())
    made._lost_experts = 2  # the text has the model's ids
    for value, named in ((8, 10), (-2, -2)):
        made._words = [0] * 16 + [1, sync.BAD_EXPERT, 0, 0, 0, 5, mark, value] + [0] * 24
        text = str(made.rejected())
        assert f"topk_idx holds {named} at flat index 5" in text and "expert ids from -1 (none) to 9." in text
    made._words = [0] * 16 + [1, sync.BAD_EXPERT, 0, 0, 0, 5, mark, 3] + [0] * 24
    text = str(made.rejected())
    assert text.startswith("topk_idx names an expert again at flat index 5 on rank 0") and "pad with -1" in text
