"""The machine code of each kernel is as large as recorded: a change that adds instructions is seen where it is made.

`code_sizes.json` holds, for each kernel and arch, the bytes of its code section, its registers, its stack (spills) and
its shared memory, as the assembler inside the CuTe DSL makes them, and that assembler's version. For a change that is
meant to alter them, `PYTHONPATH=.:tests python tests/kernels/test_code_size.py` writes the file anew.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from built import ARCHS, DRAWN_ARCHS, built
from test_ptx import LARGE

from cute_kernels import jit
from cute_kernels.gemm.few_rows import FewRows, tile_of
from cute_kernels.latency.combine import LatencyCombine
from cute_kernels.latency.dispatch import LatencyDispatch
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.gather import Gather
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.publish_tokens import PublishTokens
from cute_kernels.throughput.pull import Pull
from cute_kernels.throughput.pull_scaled import PullScaled

PAIR = dataclasses.replace(LARGE, world_size=2, experts_per_rank=(128, 128))
"""Two ranks: owners add the rows of their own rank."""
RECORDED = Path(__file__).with_name("code_sizes.json")
TOLERANCE = 0.03
"""By which share code may differ in size. Registers and shared memory may not grow, nor may the stack."""
KERNELS: dict[str, Any] = {
    "publish": Publish(LARGE, True, True, True, False),
    "publish token-major": PublishTokens(LARGE, True, True, True, False, pushes=True),
    "pull": Pull(LARGE, True, False, True),
    "combine": Combine(LARGE, True, True, False),
    "combine of two ranks": Combine(PAIR, True, True, False),
    "combine of two ranks, sums in a format": Combine(PAIR, True, True, False, format="e4m3/32/mx"),
    "combine, sums in a format": Combine(LARGE, True, True, False, format="e4m3/32/mx"),
    "combine backward": PullScaled(LARGE, False),
    "gather": Gather(LARGE),
    "latency dispatch": LatencyDispatch(LARGE, 256, True),
    "latency dispatch token-major": LatencyDispatch(LARGE, 256, True, token_major=True),
    "latency combine": LatencyCombine(LARGE, 256, True),
    "few rows, gate and up": FewRows(128, 2048, 768, "bf16", tile_of(768, True, False, 32, 64), True, False),
    "few rows, down": FewRows(128, 768, 2048, "bf16", tile_of(2048, False, True, 16, 64), False, True),
    "latency combine, sums in a format": LatencyCombine(LARGE, 256, True, format="e4m3/32/mx"),
}


def assembler() -> str:
    return f"CUDA {jit.versions()['cuda']}, nvidia-cutlass-dsl {jit.versions()['cutlass']}"


def measured(name: str, arch: str) -> dict[str, int]:
    """All but the PTX."""
    found = built(KERNELS[name], arch)._asdict()
    del found["ptx"]
    return found


@pytest.mark.parametrize("arch", DRAWN_ARCHS)
@pytest.mark.parametrize("name", KERNELS)
def test_size(name: str, arch: str) -> None:
    recorded = json.loads(RECORDED.read_text())
    if recorded["assembler"] != assembler():
        pytest.skip(f"sizes were recorded with {recorded['assembler']}, and {assembler()} is installed")
    assert set(recorded["sizes"]) == set(KERNELS)
    before, now = recorded["sizes"][name][arch], measured(name, arch)
    change = now["code_bytes"] / before["code_bytes"] - 1
    assert abs(change) <= TOLERANCE, f"{name}, {arch}: {change:+.1%} code, {before} -> {now}; meant so? see above"
    others = set(now) - {"code_bytes"}
    assert all(now[size] <= before[size] for size in others), f"{name}, {arch}: {before} -> {now}"


def test_more_code_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = json.loads(RECORDED.read_text())
    of_gather = recorded["sizes"]["gather"]["sm_90a"]
    of_gather["code_bytes"] = round(of_gather["code_bytes"] / 1.05)
    other = tmp_path / RECORDED.name
    other.write_text(json.dumps(recorded))
    monkeypatch.setitem(globals(), "RECORDED", other)
    with pytest.raises(AssertionError, match=r"gather, sm_90a: \+5\.\d% code"):
        test_size("gather", "sm_90a")


if __name__ == "__main__":
    made = {name: {arch: measured(name, arch) for arch in ARCHS} for name in KERNELS}
    RECORDED.write_text(json.dumps({"assembler": assembler(), "sizes": made}, indent=1) + "\n")
