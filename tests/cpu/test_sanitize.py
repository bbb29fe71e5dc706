"""tests/gpu/sanitize.py reads the reports of compute-sanitizer right."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

import sanitize

PULL = "ep_pull_kernel_kernel_PullproblemProblemworld_size1_experts_per_rank4_0"
COMBINE = "ep_combine_kernel_kernel_CombineproblemProblemworld_size1_0"
SUMMARY = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"


def race(kernel: str, one: str, at: str, other: str, to: str = "0x11a0") -> str:
    return (
        f"========= Error: Race reported between {one} access at {kernel}+{at}\n"
        f"=========     and {other} access at {kernel}+{to} [840 hazards]\n========= \n"
    )


def told(*reports: str, summary: str = SUMMARY) -> list[str]:
    return [*sanitize.unexpected("========= COMPUTE-SANITIZER\n" + "".join(reports) + summary)]


def test_known_races_are_expected() -> None:
    assert told() == []
    assert told(race(PULL, "Write", "0xf00", "Read"), race(PULL, "Write", "0xf00", "Read", "0x12f0")) == []
    assert told(*(race(COMBINE, "Read", at, "Write", to) for at in ("0xb90", "0xd20") for to in ("0x1", "0x2"))) == []


def test_new_ones_are_not() -> None:
    (line,) = told(race(PULL, "Write", "0xf00", "Write"))
    assert line == f"race of Write, Write in {PULL} at 0xf00"
    (line,) = told(*(race(PULL, "Write", at, "Read") for at in ("0xf00", "0xf10", "0xf20", "0xf30", "0xf40")))
    assert line == f"race of Write, Read in {PULL} at 0xf00, 0xf10, 0xf20, 0xf30, 0xf40"
    (line,) = told(race("ep_publish_kernel_kernel_0", "Write", "0x10", "Read"))
    assert "ep_publish" in line


def test_reports_of_other_tools_and_a_tool_that_dies() -> None:
    invalid = (
        "========= Invalid __global__ read of size 4 bytes\n=========     at ep_gather_kernel_0+0x40\n"
        "=========     by thread (0,0,0) in block (0,0,0)\n========= \n"
    )
    assert told(invalid, summary="========= ERROR SUMMARY: 1 error\n") == ["Invalid __global__ read of size 4 bytes"]
    assert told(summary="========= ERROR SUMMARY: 0 errors\n") == []
    assert told(summary="") == ["the tool has not ended"]
    assert told(summary="========= Error: process didn't terminate successfully\n")[0].startswith("Error: process")
