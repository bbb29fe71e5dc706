"""The kernels' own source, run on a CPU thread by thread (tests/emulator says what that proves and what not)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import fresh_seed

pytest.importorskip("greenlet", reason="needs greenlet, whose threads stand for those of a GPU")

from emulator.main import CHECKS

TESTS = Path(__file__).parents[1]
BY_HAND = (
    "latency_34_ranks",
    "throughput_four_ranks",
    "death_dispatch",
    "death_known",
    "death_combine",
    "death_few_combine",
)  # take long, and show little more than others


@pytest.mark.parametrize("name", [name for name in CHECKS if name not in BY_HAND])
def test_check(name: str) -> None:
    """In a process of its own, since fakes stand there in the places of the DSL's modules."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-W", "ignore", "-m", "emulator.main", name, str(fresh_seed())]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{' '.join(command[3:])} says\n{done.stderr}"
