"""benchmarks/host.py on CPUs: its steps, their limits, the file it writes, and what it compiles before."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from benchmarks import host
from ep_ops import Config
from ep_ops.bench import decode, latency, throughput
from ep_ops.bench.ranks import Run
from ep_ops.group.exchange import Exchange

SCRIPT = """
import json, subprocess, sys, time
kind, out = sys.argv[1:3]
result = {"op": "pair", "tokens": 8, "us": 12.5, "correct": kind != "wrong"}
open(out, "w").write("{" if kind == "torn" else json.dumps({"results": [result]}))
print("output of", kind)
if kind == "fails":
    sys.exit(3)
if kind == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(sys.argv[3], "w").write(str(child.pid))
    time.sleep(600)
"""


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_every_step_is_recorded_and_none_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails, returns wrong results, hangs or writes no file is recorded, with what it wrote until then. The
    processes of one that hangs end. Steps for which no time is left are not started."""
    script, child, out = tmp_path / "script.py", tmp_path / "child", tmp_path / "host.json"
    script.write_text(SCRIPT)

    class Process(subprocess.Popen):
        """A process whose 5 seconds are over when it hangs, however long it takes to start."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == 5.0:
                while self.poll() is None and not (child.exists() and child.read_text()):
                    time.sleep(0.01)
                timeout = 0.0
            return super().wait(timeout)

    kinds = {"passes": 60.0, "fails": 60.0, "wrong": 60.0, "hangs": 6.0, "torn": 60.0, "passes-again": 60.0}
    steps = [host.Step(kind, 2, f"{script} {kind} {{out}} {child}", limit) for kind, limit in kinds.items()]
    steps.append(host.Step("late", 2, f"{script} late {{out}}", 1.0))
    monkeypatch.setattr(host, "KINDS", (*kinds, "late"))
    monkeypatch.setattr(host, "plan", lambda *_: steps)
    monkeypatch.setattr(host.subprocess, "Popen", Process)
    monkeypatch.setattr(host, "GRACE", 1.0)
    monkeypatch.setattr(host, "LEAST", 2.0)
    before = signal.getsignal(signal.SIGINT)
    assert host.main(["--device", "cpu", "--out", str(out)]) == 1
    signal.signal(signal.SIGINT, before)
    found = json.loads(out.read_text())
    assert found["machine"]["torch"] == torch.__version__ and found["commit"]
    outcomes = {step["name"]: step["outcome"] for step in found["steps"]}
    assert outcomes == {
        "passes": "passed", "fails": "exit code 3", "wrong": "wrong results", "hangs": "did not end in 5 s",
        "torn": "passed", "passes-again": "passed", "late": "not run: the time is over",
    }  # fmt: skip
    steps_by_name = {step["name"]: step for step in found["steps"]}
    assert steps_by_name["hangs"]["found"]["results"][0]["us"] == 12.5 and "found" not in steps_by_name["torn"]
    assert "output of fails" in steps_by_name["fails"]["text"]
    pid, end = int(child.read_text()), time.monotonic() + 100
    while not ended(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert ended(pid)


def test_growth_shows_what_was_measured_on_several_numbers_of_ranks() -> None:
    def step(name: str, count: int, *results: dict[str, Any]) -> dict[str, Any]:
        return {"name": name, "ranks": count, "found": {"results": list(results)}}

    pair = {"op": "pair", "tokens": 8, "us": 10.0, "us_median": 9.0}
    layer = {"tokens": 8, "memory": 40.0, "pair": 10.0, "gemms": 30.0}
    steps = [
        step("latency", 4, pair, {"op": "combine", "tokens": 8, "us": 5.0}),
        step("latency", 2, pair | {"us_median": 7.0}),
        step("decode qwen3-30b", 4, layer), step("decode qwen3-30b", 2, layer | {"memory": 60.0}),
        {"name": "tests", "ranks": 4, "outcome": "passed"},
    ]  # fmt: skip
    heading, *rows = host.growth(steps)
    assert heading[3:] == ["2", "4"]
    assert rows == [
        ["latency", "pair", "8", "7.0", "9.0"],
        ["decode qwen3-30b", decode.NAMES["memory"], "8", "60.0", "40.0"],
        ["decode qwen3-30b", decode.NAMES["pair"], "8", "10.0", "10.0"],
    ]
    assert len(host.growth(steps[:1])) == 3  # one number of ranks: everything


def test_steps_of_each_number_of_ranks() -> None:
    """Benchmarks of all ranks come before those of subsets, and tests last. Where `make gpu-test` runs no file but
    test_many.py on so many ranks, that file comes first."""
    assert [host.sizes(most) for most in (1, 2, 3, 4, 8)] == [[1], [2], [2, 3], [2, 4], [2, 4, 8]]
    for most in (1, 2, 8):
        steps = host.plan("cuda", most, 4)
        measured = [step.ranks for step in steps if step.name.split()[0] in ("latency", "throughput", "decode")]
        assert measured == sorted(measured, reverse=True) and set(measured) == set(host.sizes(most))
        assert steps[-1].command.endswith(f"--ranks {most} --groups 4")
        assert (f"--many {most}" in steps[-2].command) == (most == 8)


def test_arguments_that_contradict_the_host_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for given, text in (
        ("--compile", "--compile needs --ranks"),
        ("--device cpu --only warm", "warm is unknown; allowed: "),
        ("--device cuda", "--device is cuda, but torch sees no GPU"),
    ):
        if "cuda" in given and torch.cuda.is_available():
            continue
        with pytest.raises(SystemExit) as stop:
            host.main(given.split())
        assert stop.value.code == 2 and text in capsys.readouterr().err


class Asked(Exception):
    """Ends a benchmark when it has compiled its kernels."""


class Planned:
    """Stands for a communicator of the cute backend."""

    def __init__(self, options: dict[str, Any], wanted: list[Any]) -> None:
        from ep_ops.commands.compile import checked_config

        given = {key: value for key, value in options.items() if key not in ("device", "timeout", "backend")}
        self.config = checked_config(Config(backend="cute", **given), 1)
        self.num_local_experts, self.world_size = self.config.num_experts, 1
        self.exchange = Exchange(None, torch.device("cpu"))
        self.backend, self.wanted = type("Backend", (), {"name": "cute"}), wanted

    def warmup(self, formats: Any = ()) -> None:
        from ep_ops.backends.cute.backend import all_kernels

        self.wanted += all_kernels(self.config, formats)

    @property
    def device(self) -> torch.device:
        """The first thing that measurements ask for."""
        raise Asked

    def __enter__(self) -> Planned:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def asked_by(kind: str, argv: list[str]) -> list[Any]:
    """Kernels that a benchmark of `plan` compiles on one rank."""
    from cute_kernels import prepare
    from ep_ops.bench import ranks

    wanted: list[Any] = []

    def measure(function: Any, args: Any) -> int:
        with pytest.raises(Asked):
            function(torch.device("cpu"), args)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "Communicator", lambda **options: Planned(options, wanted))
        patch.setattr(prepare, "prepare_all", lambda kernels, *_: wanted.extend(kernels))
        patch.setattr(decode, "arch_of", lambda device: "sm_90a")
        patch.setattr(Run, "__exit__", lambda *_: None)
        module = {"latency": latency, "throughput": throughput, "decode": decode}[kind]
        patch.setattr(module, "on_every_rank", measure)
        assert module.main(argv) == 0
    return wanted


def test_kernels_of_all_benchmarks_are_compiled_before() -> None:
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    compiled, checked = set(host.kernels(1)), 0
    for step in host.plan("cuda", 1):
        words = shlex.split(step.command.format(out=os.devnull, seconds=1))
        if "bench" in words:
            argv = [*words[words.index("bench") + 2 :], "--device", "cpu", "--backend", "reference"]
            (wanted,) = run_ranks(1, asked_by, words[words.index("bench") + 1], argv)
            assert wanted and compiled >= set(wanted), step.name
            checked += 1
    assert checked == 4


@pytest.mark.parametrize(("given", "written"), [("abc", "abc"), ("", "unknown")])
def test_the_commit_without_git(given: str, written: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("EP_OPS_COMMIT", given)
    assert host.commit() == written
