"""`ep-ops bench overlap` on CPUs: it measures all it names, and notices results that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from ep_ops.bench import overlap, overlap_variants

SMALL = (
    "--device cpu --backend reference --tokens 6 --hidden 64 --experts 4 --top-k 2 --width 16 --shared-width 16"
    " --iterations 1"
)
SOME = [
    overlap_variants.Variant(turns=False),
    overlap_variants.Variant(dispatch=3, combine=6, whole_ends=True, leave=8, layers=2),
]


def measured(wrong: bool) -> dict[str, Any]:
    session = overlap.Session(torch.device("cpu"), overlap.options().parse_args([*SMALL.split(), "--variants"]))
    # In a process of the test's own: few, and the one that has everything.
    overlap_variants.HOT_ROW, overlap_variants.LAYERS = 1, 2
    overlap_variants.SHARED_SMS, overlap_variants.TRAINED_SMS = (), (32,)
    overlap_variants.variants = lambda products: SOME
    if wrong:
        run = overlap.Layer.in_turns
        overlap.Layer.in_turns = lambda *args: run(*args)[::-1]  # type: ignore[method-assign]
    try:
        session.measure()
    finally:
        if wrong:
            overlap.Layer.in_turns = run  # type: ignore[method-assign]
        session.close()
    return session.found


def test_figures() -> None:
    found, other = run_ranks(2, measured, False)
    took = {result["what"]: result["us"] for result in found["results"]}
    assert len(took) == 12 and found["results"] == other["results"], "the slowest rank's, on all of them"
    figures = found["figures"]
    assert figures["in turns / gemms"] == took["in turns"] / took["gemms"]
    # All of the smaller one is hidden where both together take as long as the larger one.
    least = min(took["dispatch"], took["shared"])
    hidden = took["dispatch"] + took["shared"] - took["shared in dispatch"]
    assert figures["hidden in dispatch"] == pytest.approx(hidden / least)
    variants = {one["what"]: one for one in found["variants"]}
    assert {str(variant) for variant in SOME} < set(variants)
    assert variants["grouped: GEMMs"]["of its GEMMs"] == variants["grouped: GEMMs"]["of its GEMMs, hot"] == 1
    assert "shared in dispatch_tokens, default SMs" in variants and "in turns, forward + backward, 32 SMs" in variants
    assert len(overlap_variants.table(found["variants"])) == 1 + len(variants)


def test_variants_that_leave_multiprocessors() -> None:
    """Only while the block lasts, whatever it raises."""
    before = torch._C._get_sm_carveout_experimental()
    with pytest.raises(KeyError), overlap_variants.leaving(8):
        assert torch._C._get_sm_carveout_experimental() == 8
        raise KeyError
    assert torch._C._get_sm_carveout_experimental() == before


def test_wrong_results() -> None:
    with pytest.raises(RuntimeError, match="results are wrong by"):
        run_ranks(2, measured, True)


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kernels = [[0.0, 900.0, "nvjet_gemm"], [100.0, 500.0, "kernel_ep_pull_0"], [900.0, 950.0, "ep_combine"]]
    run = {
        "world_size": 2, "machine": {"device": "GPU"}, "workload": {"dtype": "bf16"},
        "timelines": {"serial": kernels, "in turns": kernels},
    }  # fmt: skip
    text = overlap.picture(run, tmp_path / "overlap.svg").read_text()
    assert all(word in text for word in ("computation", "communication", "serial", "in turns"))
    assert [overlap.Kernel(*kernel).lane for kernel in kernels] == ["computation", "communication", "communication"]
