"""Benchmarks on ranks that share a GPU, and the comparison of a run with an earlier one."""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from benchmarks import by_turns
from ep_ops.bench import against, latency, options, ranks, throughput
from ep_ops.bench.figures import machine_line
from ep_ops.bench.timing import HostMark, Timer, largest
from ep_ops.commands import arguments, launch

MACHINE = dict.fromkeys(("device", "torch", "cuda", "nccl", "driver", "backend"), "x")
SIZES = {"hidden": 7168, "experts": 256, "top_k": 8, "pairs": 16}


def result(op: str, tokens: int, us: float, **more: Any) -> dict[str, Any]:
    return {"op": op, "tokens": tokens, "us": 2 * us, "us_median": us, **more}


def run(*results: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "machine": dict(MACHINE), "world_size": 2, "benchmark": "latency", **SIZES, "results": list(results), **more
    }  # fmt: skip


def test_ratios_are_of_the_same_measurements_and_of_medians() -> None:
    earlier = run(result("pair", 1, 10.0), result("pair", 8, 20.0), result("combine", 1, 3.0), path="earlier.json")
    now = run(result("pair", 8, 30.0), result("pair", 1, 8.0), result("dispatch", 1, 5.0))
    assert {key[:2]: ratio for key, ratio in against.ratios(now, earlier).items()} == {
        ("pair", "8"): 1.5, ("pair", "1"): 0.8
    }  # fmt: skip
    lines = against.lines(now, earlier)
    assert [line.split() for line in lines[2:4]] == [
        ["pair", "8", "30.0", "20.0", "1.500"], ["pair", "1", "8.0", "10.0", "0.800"]
    ]  # fmt: skip
    assert lines[-1] == "geometric mean of 2 ratios: 1.095"
    assert not any("GPUs differ" in line for line in lines)
    other = copy.deepcopy(earlier)
    other["machine"]["device"] = "y"
    assert any("GPUs differ" in line for line in against.lines(now, other))
    graph = run(result("dispatch", 1, 4.0, graph_us=2.0), path="earlier.json")
    assert [*against.ratios(run(result("dispatch", 1, 9.0, graph_us=1.0)), graph).values()] == [0.5]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"world_size": 4}, "world_size is 2 in this run and 4 in"),
        ({"hidden": 64}, "hidden is 7168 in this run and 64 in"),
        ({"benchmark": None, "preset": "quick"}, "benchmark is latency in this run and None in"),
        ({"sharing": {"ranks": 2, "sms": 66, "mps": True}}, "ranks share a GPU in"),
    ],
)
def test_a_run_of_another_kind_is_rejected_before_any_process_starts(
    more: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "on_every_rank", lambda *_: pytest.fail("it runs"))
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(run(**more)))
    with pytest.raises(SystemExit) as stop:
        latency.main(["--device", "cpu", "--ranks", "2", "--against", str(path)])
    assert stop.value.code == 2 and text in capsys.readouterr().err
    path.write_text("[]")
    with pytest.raises(SystemExit):
        throughput.main(["--device", "cpu", "--against", str(path)])
    assert "is not a run that --out has written" in capsys.readouterr().err


def test_more_ranks_than_gpus_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (options, arguments):
        monkeypatch.setattr(module, "gpu_count", lambda: 2)
    read = lambda *argv: options.read(latency.parser(), argv)  # noqa: E731
    assert (read().ranks, read().sharing, read().backend) == (2, 1, "auto")
    four = read("--ranks", "4")
    assert (four.ranks, four.sharing, four.backend) == (4, 2, "cute")
    assert read("--ranks", "4", "--backend", "reference").backend == "reference"
    monkeypatch.setenv("WORLD_SIZE", "8")  # of two hosts
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (read().ranks, read().sharing) == (8, 2)


def test_the_group_of_ranks_that_share_is_gloos(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(launch, "gpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.append(device.index))
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(launch.dist, name, lambda: None)
    monkeypatch.setattr(launch.dist, "init_process_group", lambda backend, **_: asked.append(backend))
    with launch.process_group(3, None, 4, "cuda", 10.0, sharing=True) as device:
        assert device == torch.device("cuda", 1)
    assert asked == [1, "gloo"]


def test_the_result_says_that_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    args = argparse.Namespace(sharing=1)
    assert ranks.sharing_of(args) == {} and "share" not in machine_line(run())
    args.sharing = 2
    facts = ranks.sharing_of(args)
    assert facts == {"sharing": {"ranks": 2, "sms": 0, "mps": True}}
    facts["sharing"]["sms"] = 66
    assert "2 ranks share a GPU, at the same time under MPS, with 66 SMs each" in machine_line(run(**facts))


def _times() -> tuple[list[float], tuple[float, ...]]:
    rank, cpu = dist.get_rank(), torch.device("cpu")
    marks = [HostMark() for _ in range(2)]
    marks[0].at, marks[1].at = 0.0, 1e-6 * (1 + rank)  # rank 1 takes longer
    return largest([1.0 - rank, 5.0 + rank], cpu), Timer(cpu, lambda: None)._timing([(marks[0], marks[1])]).calls


def test_a_time_is_that_of_the_slowest_rank() -> None:
    for values, calls in run_ranks(2, _times):
        assert values == [1.0, 6.0] and calls == pytest.approx((2.0,))


def test_rounds_of_two_checkouts_alternate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cute_kernels").mkdir()
    order: list[Path] = []
    times = iter([10.0, 20.0, 30.0, 20.0, 9.0, 10.0])  # this, other; other, this; this, other

    def timed(checkout: Path, args: argparse.Namespace) -> dict[str, Any]:
        assert args.kind == "latency" and args.rest == ["--ranks", "2", "--tokens", "1"]
        order.append(checkout)
        return run(result("pair", 1, next(times)))

    monkeypatch.setattr(by_turns, "run", timed)
    out = tmp_path / "turns.json"
    command = ["--other", str(tmp_path), "--rounds", "3", "--out", str(out), "latency", "--ranks", "2", "--tokens", "1"]
    assert by_turns.main(command) == 0
    this, other = by_turns.ROOT, tmp_path
    assert order == [this, other, other, this, this, other]
    said = capsys.readouterr().out.splitlines()
    assert said[-2].split() == ["pair", "1", "10.0", "20.0", "0.667", "0.500", "0.900"]
    assert said[-1] == "geometric mean of 1 ratios: 0.667"
    assert len(json.loads(out.read_text())["rounds"]) == 3
    with pytest.raises(SystemExit, match="allowed: a checkout"):
        by_turns.main(["--other", str(tmp_path / "none"), "latency"])


def test_the_group_of_an_earlier_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """`process_group` of checkouts that do not know `sharing`."""
    started: list[Any] = []

    @contextlib.contextmanager
    def process_group(rank: int, store: str | None, world_size: int, kind: str, timeout: float) -> Iterator[str]:
        yield kind

    monkeypatch.setattr(ranks, "process_group", process_group)
    args = argparse.Namespace(device="cpu", sharing=1)
    ranks._process(0, None, 1, lambda device, _: started.append(device), args)
    assert started == ["cpu"]


def test_a_round_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cute_kernels").mkdir()
    for error in (subprocess.CalledProcessError(2, "a command"), subprocess.TimeoutExpired("a command", 5)):
        monkeypatch.setattr(by_turns.subprocess, "run", mock.Mock(side_effect=error))
        with pytest.raises(SystemExit, match=r"the run with .* failed: Command 'a command' "):
            by_turns.main(["--other", str(tmp_path), "latency"])
