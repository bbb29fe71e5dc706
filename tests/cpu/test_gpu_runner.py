"""The runner of the GPU tests (tests/gpu/run.py), on tests that need no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

FIRST = """
import os, sys, time
import pytest

RANK = int(os.environ["RANK"])

def test_passes(): pass

def test_fails_on_one_rank():
    assert RANK == 0, "only rank 1"

@pytest.mark.skip(reason="needs something")
def test_skipped(): pass

def test_ends_its_process():
    if RANK == 1:
        os._exit(7)
    time.sleep(60)

def test_behind(): pass
"""
SECOND = """
import time
import pytest

@pytest.fixture(scope="module", autouse=True)
def made():
    yield
    print("torn down")

@pytest.mark.parametrize("i", range(40))
def test_many(i): pass

def test_hangs():
    time.sleep(300)

def test_last(): pass
"""
THIRD = """
import lockstep

def test_uses_up_the_time():
    lockstep.END = 0.0

def test_not_run(): pass
"""


def run(folder: Path, *options: str) -> tuple[int, dict, str]:
    out = folder / "out.json"
    command = [sys.executable, str(ROOT / "tests/gpu/run.py"), "--folder", str(folder), "--out", str(out), *options]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "EP_OPS_COMMIT": "abc"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    return ended.returncode, json.loads(out.read_text()), ended.stdout + ended.stderr


def test_what_fails_dies_or_hangs_is_told_and_the_rest_runs(tmp_path: Path) -> None:
    """Both ranks run every test in the same order. Tests behind one that ends a process, or hangs, run in new ones.
    When the time is over, the rest is left out."""
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    (tmp_path / "test_third.py").write_text(THIRD)
    code, found, said = run(tmp_path, "--ranks", "2", "--patience", "8")
    assert code == 1, said
    (stage,) = found["stages"]
    by_name = {test["test"].split("::")[1]: test for test in stage["tests"]}
    assert len(by_name) == 5 + 42 + 2, said
    outcomes = {name: test["outcome"] for name, test in by_name.items() if not name.startswith("test_many")}
    assert outcomes == {
        "test_passes": "passed", "test_fails_on_one_rank": "failed", "test_skipped": "skipped",
        "test_ends_its_process": "failed", "test_behind": "passed", "test_hangs": "failed", "test_last": "passed",
        "test_uses_up_the_time": "passed", "test_not_run": "not run",
    }, said  # fmt: skip
    assert {test["outcome"] for name, test in by_name.items() if name.startswith("test_many")} == {"passed"}
    assert "only rank 1" in by_name["test_fails_on_one_rank"]["text"]
    assert "rank 1 ended with 7" in by_name["test_ends_its_process"]["text"]
    assert "no news for 8 s" in by_name["test_hangs"]["text"]
    assert by_name["test_skipped"]["reason"] == "needs something"
    assert found["commit"] == "abc" and "| test_first.py | 2, 1, 2, 0, " in said, said
    assert "skipped, 2, test_first.py: 1 × needs something" in said
