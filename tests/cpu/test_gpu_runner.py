"""The runner of the GPU tests (tests/gpu/run.py), on tests that need no GPU."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/gpu"))

import result_table  # noqa: E402
import sanitize  # noqa: E402

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

def test_behind():
    assert not os.environ["EP_OPS_GPU_GROUP"].endswith(".1"), "without its peer"
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

def test_last(): pass
"""
THIRD = """
import lockstep

def test_uses_up_the_time():
    lockstep.END = 0.0

def test_not_run(): pass
"""
INTERRUPTED = """
import os, signal, time

def test_passes(): pass

def test_interrupts_the_run():
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)

def test_not_run(): pass
"""

HANGS = """
import os, threading, time

import torch.distributed as dist

def never():
    print("what a test writes is captured")
    time.sleep(600)

def test_one_rank_hangs():
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        never()
    dist.barrier()
"""

TOOL = """
import os, subprocess, sys, time

path, *command = sys.argv[1:]
left = {name: value for name, value in os.environ.items() if value}  # as compute-sanitizer does
child = subprocess.Popen(command, env=left)
child.wait()
time.sleep(2)
with open(path.replace("%p", str(child.pid)), "w") as log:
    log.write("========= COMPUTE-SANITIZER\\n========= Invalid __global__ read of size 4 bytes\\n")
    log.write("========= ERROR SUMMARY: 1 error\\n")
sys.exit(child.returncode)
"""


def run(folder: Path, *options: str) -> tuple[int, dict, str]:
    out = folder / "out.json"
    command = [sys.executable, str(ROOT / "tests/gpu/run.py"), "--folder", str(folder), "--out", str(out), *options]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "EP_OPS_COMMIT": "abc"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    return ended.returncode, json.loads(out.read_text()), ended.stdout + ended.stderr


@pytest.mark.drawn
def test_what_fails_or_dies_is_told_and_the_rest_runs(tmp_path: Path) -> None:
    """Both ranks run every test in the same order. Tests behind one that ends a process run in new ones, also those
    that another rank has begun alone. When the time is over, the rest is left out."""
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    (tmp_path / "test_third.py").write_text(THIRD)
    code, found, said = run(tmp_path, "--ranks", "2")
    assert code == 1, said
    (stage,) = found["stages"]
    by_name = {test["test"].split("::")[1]: test for test in stage["tests"]}
    assert len(by_name) == 5 + 41 + 2, said
    outcomes = {name: test["outcome"] for name, test in by_name.items() if not name.startswith("test_many")}
    assert outcomes == {
        "test_passes": "passed", "test_fails_on_one_rank": "failed", "test_skipped": "skipped",
        "test_ends_its_process": "failed", "test_behind": "passed", "test_last": "passed",
        "test_uses_up_the_time": "passed", "test_not_run": "not run",
    }, said  # fmt: skip
    assert {test["outcome"] for name, test in by_name.items() if name.startswith("test_many")} == {"passed"}
    assert "only rank 1" in by_name["test_fails_on_one_rank"]["text"]
    assert "rank 1 ended with 7" in by_name["test_ends_its_process"]["text"]
    assert by_name["test_skipped"]["reason"] == "needs something"
    assert found["commit"] == "abc" and "| test_first.py | 2, 1, 2, 0, " in said, said
    assert "skipped, 2, test_first.py: 1 × needs something" in said
    assert (tmp_path / "out.txt").read_text() in said


@pytest.mark.drawn
def test_an_interrupted_run_has_a_table(tmp_path: Path) -> None:
    """SIGTERM, which `timeout` sends, ends all processes; what has run is in the results and in the table."""
    (tmp_path / "test_interrupted.py").write_text(INTERRUPTED)
    code, found, said = run(tmp_path, "--ranks", "1")
    outcomes = [test["outcome"] for test in found["stages"][0]["tests"]]
    assert code == 1 and outcomes == ["passed", "not run", "not run"], said
    assert "interrupted" in said and "| test_interrupted.py | 1, 0, 0, 2, " in said, said


@pytest.mark.drawn
def test_what_a_tool_reports_at_the_end_is_waited_for(tmp_path: Path) -> None:
    """A program that runs each rank writes what it has found when the rank has ended."""
    (tmp_path / "test_second.py").write_text(SECOND)
    (tmp_path / "tool.py").write_text(TOOL)
    under = f"{sys.executable} {tmp_path}/tool.py {tmp_path}/found-%p.txt"
    code, found, said = run(tmp_path, "--ranks", "2", "--under", under)
    assert code == 0 and {test["outcome"] for test in found["stages"][0]["tests"]} == {"passed"}, said
    logs = sorted(tmp_path.glob("found-*.txt"))
    assert len(logs) == 2, said
    for log in logs:
        assert [*sanitize.unexpected(log.read_text())] == ["Invalid __global__ read of size 4 bytes"]


@pytest.mark.drawn
def test_where_each_rank_was_is_told(tmp_path: Path) -> None:
    """Ranks that are ended because there is no news from them say where they were, although pytest captures what they
    write and another program runs them."""
    (tmp_path / "test_hangs.py").write_text(HANGS)
    (tmp_path / "tool.py").write_text(TOOL)
    under = f"{sys.executable} {tmp_path}/tool.py {tmp_path}/found-%p.txt"
    code, found, said = run(tmp_path, "--ranks", "2", "--patience", "10", "--under", under)
    (test,) = found["stages"][0]["tests"]
    assert code == 1 and test["outcome"] == "failed" and "no news for 10 s" in test["text"], said
    places = [line for line in test["text"].splitlines() if " was in " in line]
    assert len(places) == 2, said
    line = 1 + HANGS.splitlines().index("    time.sleep(600)")
    assert places[1].startswith(f"-- rank 1 was in never (test_hangs.py:{line}) < test_one_rank_hangs (test_hangs.py:")
    assert places[0].startswith("-- rank 0 was in ") and "barrier (" in places[0], places[0]
    assert all(place.count("test_one_rank_hangs") == 1 and "_pytest" not in place for place in places)
    assert places[0] in (tmp_path / "out.txt").read_text()


def test_processes_that_run_no_test_say_why(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import a_module_that_is_missing")
    code, found, said = run(tmp_path, "--ranks", "1")
    assert code == 1 and found["stages"][0]["tests"] == [], said
    assert "1: rank 0 ended with " in said and "No module named 'a_module_that_is_missing'" in said, said


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """tests/gpu/run.py as a module."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("gpu_runner", ROOT / "tests/gpu/run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_runner", module)
    spec.loader.exec_module(module)
    folders = types.SimpleNamespace(mkdtemp=lambda prefix: str(tmp_path_factory.mktemp(prefix)))
    monkeypatch.setattr(module, "tempfile", folders)
    return module


def test_a_group_that_hangs_is_replaced(runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After too long without news the test that runs has failed, and new processes run those behind it."""
    now, popen = [1000.0], subprocess.Popen
    clock = types.SimpleNamespace(time=lambda: now[0], sleep=lambda seconds: None)
    idle = functools.partial(popen, ["sleep", "600"], start_new_session=True)
    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(runner, "gpus", lambda: ([], None, "no GPU"))
    (tmp_path / "test_x.py").write_text("")
    made = runner.Run(runner.read(["--folder", str(tmp_path), "--ranks", "2", "--patience", "20"]))
    monkeypatch.setattr(runner, "subprocess", types.SimpleNamespace(Popen=lambda *a, **k: idle()))
    (stage,) = made.stages
    group = runner.Group(made, stage, 0)
    made.groups.append(group)

    def say(rank: int, **line: Any) -> None:
        with open(made.folder / f"{group.label}-{rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    try:
        for rank in range(2):
            say(rank, collected=["first", "hangs", "behind"])
            say(rank, begin="first")
            say(rank, test="first", outcome="passed")
            say(rank, begin="hangs")
        group.poll()
        first = group.processes
        now[0] += 19.0
        group.poll()
        assert group.processes is first and stage.tests["first"]["outcome"] == "passed"
        now[0] += 2.0
        group.poll()
        assert stage.tests["hangs"]["outcome"] == "failed" and "no news for 20 s" in stage.tests["hangs"]["text"]
        assert all(process.poll() is not None for process in first) and group.starts == 2
        assert json.loads(made.begun_file(stage).read_text()) == ["first", "hangs"]  # not run again
        now[0] += 100.0  # processes that start have more time
        group.poll()
        assert group.starts == 2
    finally:
        group.kill()


LISTED = """0, GPU-aa, NVIDIA H100, 9.0, 580.1
1, GPU-bb, NVIDIA H100, 9.0, 580.1
2, GPU-cc, NVIDIA H100, 9.0, 580.1
3, GPU-dd, NVIDIA H100, 9.0, 580.1
"""


@pytest.mark.parametrize(("visible", "ids"), [
    (None, "aa bb cc dd"), ("2,0", "cc aa"), ("GPU-bb", "bb"), ("", ""),
])  # fmt: skip
def test_only_visible_gpus_are_used(
    runner: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, ids: str
) -> None:
    listed = types.SimpleNamespace(stdout=LISTED)
    monkeypatch.setattr(runner.subprocess, "run", lambda *args, **options: listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found, arch, machine = runner.gpus()
    assert found == [f"GPU-{name}" for name in ids.split()]
    assert arch == ("sm_90a" if found else None)
    assert machine == (f"{len(found)} × NVIDIA H100, driver 580.1" if found else "no GPU")


class FakeMps:
    """A daemon that always starts."""

    def __init__(self, folder: Path, gpu: str = "") -> None:
        self.folder, self.problem = folder, ""

    def env(self, percentage: int, queues: int = 0) -> dict[str, str]:
        return {"pipe": self.folder.name, "share": str(percentage)}


def test_groups_on_several_gpus(runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With --gpus the ranks of a group share a GPU, and groups are spread over the GPUs, each with its own daemon."""
    monkeypatch.setattr(runner, "gpus", lambda: (["GPU-aa", "GPU-bb", "GPU-cc"], "sm_90a", "three"))
    monkeypatch.setattr(runner, "Mps", FakeMps)
    for name in ("test_x.py", *runner.ALONE):
        (tmp_path / name).write_text("")
    given = ["--folder", str(tmp_path), "--ranks", "1 2 4"]
    made = runner.Run(runner.read([*given, "--gpus", "2"]))
    assert [(stage.name, stage.groups, stage.percentage) for stage in made.stages] == [
        ("1", 8, 20), ("1 alone", 2, 0), ("2", 4, 20), ("2 alone", 2, 50), ("4", 2, 20), ("4 alone", 2, 20),
    ]  # fmt: skip
    assert [place.env(25) for place in made.places] == [
        {"CUDA_VISIBLE_DEVICES": f"GPU-{name}", "pipe": f"mps{i}", "share": "25"} for i, name in enumerate(("aa", "bb"))
    ]
    assert made.places[1].env() == {"CUDA_VISIBLE_DEVICES": "GPU-bb"}
    made = runner.Run(runner.read(given))
    assert [(stage.name, stage.groups) for stage in made.stages if "alone" not in stage.name] == [
        ("1", 4), ("2", 1), ("4", 2),
    ]  # fmt: skip
    assert made.places[0].env() == {}
    with pytest.raises(SystemExit, match="--gpus is 4; allowed: at most 3"):
        runner.Run(runner.read([*given, "--gpus", "4"]))


def test_a_table_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A test counts with its last result, by the number of ranks; the table of a page is replaced, not its text."""

    def run_of(ranks: int, **outcomes: str) -> Path:
        tests = [{"test": f"tests/gpu/test_{name[0]}.py::test_{name}", "outcome": of} for name, of in outcomes.items()]
        facts = {"machine": "1 × H100", "commit": "abc", "seed": 1, "seconds": 9.0}
        path = tmp_path / f"{len([*tmp_path.glob('*.json')])}.json"
        path.write_text(json.dumps({**facts, "stages": [{"name": str(ranks), "ranks": ranks, "tests": tests}]}))
        return path

    runs = [
        run_of(4, a1="failed", a2="passed", a3="not run", b1="skipped"),
        run_of(4, a1="passed", a2="not run"),
        run_of(1, a1="passed", c1="failed"),
        run_of(0, d1="passed"),
    ]
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n| test | x |\n|---|---|\n\n| file | 1 rank |\n|---|---|\n| old | old |\n\nBehind.\n")
    result_table.main([*map(str, runs), "--into", str(page)])
    assert page.read_text().splitlines() == [
        "Before.", "", "| test | x |", "|---|---|", "",
        "| file | 1 rank | 4 ranks | own processes |", "|---|---|---|---|",
        "| `test_a.py` | 1 passed | 2 passed, 1 not run |  |",
        "| `test_b.py` |  | – |  |",
        "| `test_c.py` | 1 failed |  |  |",
        "| `test_d.py` |  |  | 1 passed |",
        "", "Behind.",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "1 ranks: FAILED test_c.py::test_c1" in said and "4 ranks: 1 not run, 2 passed, 1 skipped" in said
