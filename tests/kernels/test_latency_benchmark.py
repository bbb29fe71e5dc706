"""`ep-ops bench latency` without a GPU: its kernels compile, it runs on CPUs, its report reads what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ep_ops
from benchmarks import report
from ep_ops import Communicator
from ep_ops.bench import latency, latency_report
from ep_ops.bench.timing import Timing

ROOT = Path(ep_ops.__file__).parent.parent
SMALL = ["--tokens", "1,3", "--hidden", "128", "--experts", "8", "--top-k", "2", "--pairs", "2", "--replays", "3"]


def bench(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, "-m", "ep_ops", "bench", "latency", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=ROOT)


# ---------------------------------------------------------------------- kernels


def test_kernels_of_both_communicators_are_known_beforehand() -> None:
    pytest.importorskip("cutlass")
    from cute_kernels.latency.dispatch import LatencyDispatch
    from ep_ops.backends.cute.ahead import throughput_kernels
    from ep_ops.backends.cute.backend import all_kernels

    def kernels(latency_max_tokens: int | None) -> list:
        with Communicator(
            num_experts=8, hidden_size=64, top_k=2, max_tokens_per_rank=256, device="cpu",
            latency_max_tokens=latency_max_tokens,
        ) as comm:  # fmt: skip
            return all_kernels(comm.config)

    fast, slow = kernels(None), kernels(0)
    assert set(throughput_kernels(slow[0].problem)) < set(slow)
    assert set(slow) < set(fast) and any(isinstance(kernel, LatencyDispatch) for kernel in set(fast) - set(slow))


# ---------------------------------------------------------------------- figures


def test_spread_of_a_timing() -> None:
    timing = Timing(tuple(float(us) for us in range(1, 201))).each(2).less(0.5)
    spread = timing.spread()
    assert (spread["us_min"], spread["us"], spread["us_median"], spread["us_max"]) == (0.0, 49.75, 49.75, 99.5)
    assert spread["us_p99"] == 99.0  # of 200, two are not below it
    assert Timing((3.0,)).p99 == 3.0


# ---------------------------------------------------------------------- the command and its report


@pytest.mark.drawn
def test_run_on_two_cpu_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "latency.json"
    done = bench("--device", "cpu", *SMALL, "--out", str(out))
    assert done.returncode == 0, done.stderr
    run = json.loads(out.read_text())
    assert run["world_size"] == 2 and run["machine"]["backend"] == "reference" and run["few"] == 1
    ops = set(latency_report.NAMES) - {"host"}
    assert {(result["op"], result["tokens"]) for result in run["results"]} == {(op, t) for op in ops for t in (1, 3)}
    assert all(result.get("correct", True) for result in run["results"])
    assert {result["op"]: result["calls"] for result in run["results"]}["pair"] == 3
    assert [entry["op"] for entry in run["host"]] == ["dispatch", "combine"]
    assert report.main(["--no-plots", str(out)]) == 0
    assert f"| {latency_report.NAMES['pair_padded']} |" in capsys.readouterr().out


@pytest.mark.drawn
def test_one_rank_under_torchrun_measures_what_was_asked_for() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    done = bench("--device", "cpu", *SMALL, "--only", "pair,pair_nccl,dispatch,combine", launcher=launcher)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = [latency_report.NAMES[op] for op in ("pair", "dispatch", "combine")]
    assert [line.split("  ")[0] for line in lines[-3:]] == names  # alone, there is nobody to exchange with


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_says_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    for given, text in (
        (["--device", "cuda"], "torch sees no GPU"),
        (["--only", "pair,pear"], "pear is unknown; allowed: pair pair_padded"),
        (["--tokens", "8,0"], "--tokens: 0 is not an int of at least 1"),
        (["--hidden", "7"], "--hidden is 7; allowed: a multiple of 8"),
        (["--top-k", "9", "--experts", "8"], "--top-k is 9; allowed: 1..8"),
        (["--ranks", "2", "--domain-size", "3"], "--domain-size is 3; it must divide the 2 ranks"),
        (["--out", f"{__file__}/found.json"], "found.json cannot be written: "),
    ):
        with pytest.raises(SystemExit):
            latency.main(given)
        assert text in capsys.readouterr().err


def made_up_run() -> dict:
    """Return a run as one on GPUs writes it."""

    def result(op: str, tokens: int) -> dict:
        us = 8.0 + 0.25 * tokens
        return {"op": op, "tokens": tokens, "us": us, "us_p99": 1.1 * us, "correct": tokens != 2}

    ops = [op for op in latency_report.NAMES if op != "host"]
    machine = {"device": "GPU", "torch": "2", "cuda": "13", "nccl": "2", "driver": "5", "backend": "cute"}
    return {
        "benchmark": "latency", "world_size": 4, "machine": machine, "dtype": "bf16", "hidden": 7168, "experts": 256,
        "top_k": 8, "pairs": 16, "replays": 2000, "few": 200, "host": [{"op": "dispatch", "us": 9.0}],
        "results": [result(op, t) for t in (1, 2, 64) for op in reversed(ops)],
    }  # fmt: skip


def test_table_has_a_row_for_each_measurement() -> None:
    text = latency_report.table(made_up_run())
    assert text[1].split() == ["µs,", "mean", "(p99),", "at", "T", "=", "1", "2", "64"]
    assert text[2].startswith("dispatch + combine WRONG  ") and text[2].endswith("24.0 (26.4)")
    assert text[3].startswith("dispatch + combine, [experts, slots] rows WRONG  ")
    assert len({len(line) for line in text[1:-1]}) == 1
    assert text[-1] == "host time of an eager dispatch: 9.0 µs"


def test_report_plots_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (written,) = report.latency_plot(made_up_run(), tmp_path / "latency-4")
    assert written.name == "latency-4-tokens.svg" and 10_000 < written.stat().st_size < 300_000
    assert report.latency_plot(made_up_run() | {"results": []}, tmp_path / "none") == []
