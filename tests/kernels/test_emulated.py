"""The kernels' own source, run on a CPU thread by thread (tests/emulator says what that proves and what not)."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from cases import fresh_seed

pytest.importorskip("greenlet", reason="needs greenlet, whose threads stand for those of a GPU")

from emulator.main import CHECKS

TESTS = Path(__file__).parents[1]
ALWAYS = (
    "latency",
    "latency_roles",
    "latency_split",
    "throughput",
    "throughput_absent",
    "death_few_dispatch",
    "wire_nvshmem",
    "wire_adversary",
    "domains_nvshmem",
)
DRAWN = 3
"""How many of the other checks are run, others each time: together they take minutes. EP_OPS_ALL_CHECKS=1: all."""


def some() -> list[str]:
    others = [name for name in CHECKS if name not in ALWAYS]
    if os.environ.get("EP_OPS_ALL_CHECKS") == "1":
        return [*ALWAYS, *others]
    # All workers of a run must draw the same.
    draw = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID", secrets.token_hex(8)))
    return [*ALWAYS, *draw.sample(others, DRAWN)]


@pytest.mark.parametrize("name", some())
def test_check(name: str) -> None:
    """In a process of its own, since fakes stand there in the places of the DSL's modules."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-W", "ignore", "-m", "emulator.main", name, str(fresh_seed())]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{' '.join(command[3:])} says\n{done.stderr}"
