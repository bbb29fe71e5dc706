"""tests/gpu/sanitize.py reads the reports of compute-sanitizer right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

import sanitize

SUMMARY = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n"
AT = [f"0x{at:x}" for at in range(0x840, 0x1840, 0x100)]


def name(kind: str, rest: str = "") -> str:
    return f"ep_{kind.lower()}_kernel_kernel_{kind}problemProblemworld_size2_experts_per_rank4_4_{rest}_0"


def race(kernel: str, one: str, at: str, *others: str, to: str = "0x11a0", severity: str = "Error") -> str:
    behind = "".join(f"=========     and {other} access at {kernel}+{to} [840 hazards]\n" for other in others)
    return f"========= {severity}: Race reported between {one} access at {kernel}+{at}\n{behind}========= \n"


def told(*reports: str, summary: str = SUMMARY) -> list[str]:
    return [*sanitize.unexpected("========= COMPUTE-SANITIZER\n" + "".join(reports) + summary)]


def each(kernel: str, accesses: str, number: int) -> list[str]:
    """Reports of pairs that so many instructions begin, each of them twice."""
    one, other = accesses.split(", ")
    return [race(kernel, one, at, other, other, to=to) for at in AT[:number] for to in ("0x12f0", "0x1450")]


CASES = [(kind, pair, most) for kind, pairs in sanitize.EXPECTED.items() for pair, most in pairs.items()]


@pytest.mark.parametrize(("kind", "accesses", "most"), CASES)
def test_expected_races_pass_and_one_more_fails(kind: str, accesses: str, most: int) -> None:
    """Kernels of different names do not count together, however their names begin."""
    kernel = name(kind)
    assert told() == told(*each(kernel, accesses, most)) == []
    assert told(*each(kernel, accesses, most), *each(name(kind, "other"), accesses, most)) == []
    (line,) = told(*each(kernel, accesses, most), *each(name(kind, "other"), accesses, most + 1))
    assert line == f"race of {accesses} in {name(kind, 'other')} at {', '.join(sorted(AT[: most + 1]))}"


@pytest.mark.parametrize("kernel", [name("Pull"), name("CombineAcross"), name("Publish"), name("Gather"), "ep_pull_0"])
def test_other_races_fail(kernel: str) -> None:
    """Pairs of other accesses, also behind an expected one in the same report, and races of other kernels."""
    assert told(race(kernel, "Write", AT[0], "Write")) == [f"race of Write, Write in {kernel} at {AT[0]}"]
    found = told(race(kernel, "Write", AT[0], "Read", "Read", "Write"))
    assert f"race of Write, Write in {kernel} at {AT[0]}" in found
    known = "Pull" in kernel or "Across" in kernel or "Publish" in kernel
    assert len(found) == (1 if known else 2), found


def test_each_class_is_a_kernel() -> None:
    """So nothing is expected of a class that was renamed, and names have no part in front of the class."""
    text = "".join(path.read_text() for path in (Path(sanitize.HERE).parents[1] / "cute_kernels").rglob("*.py"))
    for kind in sanitize.EXPECTED:
        assert f"class {kind}(" in text


def test_races_in_another_form_are_told() -> None:
    kernel = name("Pull")
    report = race(kernel, "Write", AT[0], "Read")
    assert told(report.replace("+0x840", "+0x840 in pull.py:160").replace("+0x11a0", "+0x11a0 in pull.py:182")) == []
    assert told(race(kernel, "Write", AT[0], "Read", severity="Warning")) == []
    unread = race(kernel, "Write", AT[0])  # the other access is not told
    assert told(unread) == [unread.splitlines()[0].removeprefix("========= ")]
    unnamed = race("void kernel(int *, int *)", "Write", AT[0], "Read")
    assert told(report, unnamed) == [unnamed.splitlines()[0].removeprefix("========= ")]


def test_reports_of_other_tools_and_a_tool_that_dies() -> None:
    invalid = (
        "========= Invalid __global__ read of size 4 bytes\n=========     at ep_gather_kernel_0+0x40\n"
        "=========     by thread (0,0,0) in block (0,0,0)\n========= \n"
    )
    assert told(invalid, summary="========= ERROR SUMMARY: 1 error\n") == ["Invalid __global__ read of size 4 bytes"]
    assert told(summary="========= ERROR SUMMARY: 0 errors\n") == []
    assert told(summary="") == ["the tool has not ended"]
    assert told(summary="========= Error: process didn't terminate successfully\n")[0].startswith("Error: process")
