"""The scripts in benchmarks/ on CPUs: each measures everything it names and rejects wrong results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from benchmarks import (
    charts,
    combine_error,
    combine_speeds,
    concurrent_gemm,
    late_gradients,
    layers,
    moe,
    overlap,
    report,
    scale_model,
    training,
)
from ep_ops import Communicator
from ep_ops.bench import timeline
from ep_ops.bench.timing import Timer
from ep_ops.moe import MoECommunicator
from ep_ops.nn import TORCH

SMALL = "--device cpu --backend reference --hidden 64 --experts 4 --top-k 2 --iterations 1"


def measured(session: Any) -> dict[str, Any]:
    with session:
        session.everything()
    return session.found


def overlapped() -> tuple[dict[str, Any], str]:
    """Results of one run, and the error of a run whose micro-batches come back in the wrong order."""
    args = overlap.options().parse_args([*SMALL.split(), *"--tokens 6 --width 16 --shared-width 16".split()])
    found = measured(overlap.Session(torch.device("cpu"), args))
    run = overlap.Layer.in_turns
    overlap.Layer.in_turns = lambda *given: run(*given)[::-1]  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError, match="results are wrong by") as error:
            overlap.Session(torch.device("cpu"), args).everything()
    finally:
        overlap.Layer.in_turns = run  # type: ignore[method-assign]
    return found, str(error.value)


def test_overlap() -> None:
    found, error = run_ranks(1, overlapped)[0]
    took = {result["what"]: result["us"] for result in found["results"]}
    assert len(took) == 12
    figures = found["figures"]
    assert figures["in turns / gemms"] == took["in turns"] / took["gemms"]
    # Everything is hidden if both together take as long as the longer one.
    least = min(took["dispatch"], took["shared"])
    hidden = took["dispatch"] + took["shared"] - took["shared in dispatch"]
    assert figures["hidden in dispatch"] == pytest.approx(hidden / least)
    assert "'shared in dispatch': 0.0" in error and "'in turns': 0.0" not in error


def test_timeline_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kernels = [
        [0.0, 900.0, "nvjet_gemm"],
        [100.0, 500.0, "kernel_ep_pull_0"],
        [900.0, 950.0, "ep_combine"],
        [950.0, 960.0, "ep_swiglu"],
    ]
    run, timelines = {"world_size": 2, "machine": {"device": "GPU"}}, {"serial": kernels, "in turns": kernels}
    text = timeline.picture(run, "bf16", timelines, tmp_path / "overlap.svg").read_text()
    assert all(word in text for word in (*timeline.LANES, "serial", "in turns"))
    assert [timeline.KernelSpan(*kernel).lane for kernel in kernels] == ["GEMMs", *["communication"] * 2, "other"]


def test_timeline_begins_after_the_sleep() -> None:
    kernels = [(0.0, 2.0, "fill"), (2.0, 9.0, "at::cuda::spin_kernel"), (10.0, 12.0, "gemm"), (11.0, 13.0, "ep_pull")]
    found = timeline.after_sleep([timeline.KernelSpan(*kernel) for kernel in kernels])
    assert found == [(0.0, 2.0, "gemm"), (1.0, 3.0, "ep_pull")]
    assert timeline.after_sleep([]) == []


def concurrent() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    save = concurrent_gemm.Run.save
    concurrent_gemm.Run.save = lambda run: found.append(run.found)  # type: ignore[method-assign]
    text = "--device cpu --backend reference --hidden 64 --top-k 2 --tokens 6 --shapes 4x16 --rounds 3 --row 2"
    try:
        concurrent_gemm.measure(
            torch.device("cpu"), concurrent_gemm.options().parse_args([*text.split(), "--gemms", "torch"])
        )
    finally:
        concurrent_gemm.Run.save = save  # type: ignore[method-assign]
    return found[-1]["results"]


def test_concurrent_gemm() -> None:
    results = run_ranks(2, concurrent)[0]
    assert len(results) == 2 * 2 * 2  # calls, operations, leads
    assert {one["lead_us"] for one in results} == {0.0, 20.0}
    for one in results:
        assert one["hidden"] == pytest.approx(one["gain_ms"] / one["operation_ms"])
        assert one["hidden_without_lead"] - one["hidden"] == pytest.approx(one["lead_ms"] / one["operation_ms"])


def combines_timed(out: Path) -> None:
    text = "--backend reference --tokens 6 --hidden 64 --experts 4 --top-k 2 --heaps 2 --inputs 2 --sms 3,4"
    args = combine_speeds.options().parse_args([*text.split(), "--out", str(out)])
    combine_speeds.measure(torch.device("cpu"), args)


@pytest.mark.drawn
def test_combine_speeds(tmp_path: Path) -> None:
    run_ranks(2, combines_timed, tmp_path / "speeds.json")
    lines = json.loads((tmp_path / "speeds.json").read_text())["lines"]
    starts = [f"communicator {heap}, y {y}:" for heap in (0, 1) for y in (0, 1)]
    starts += ["ranks meet before each call:", "3 SMs:", "4 SMs:", "the default again:"]
    assert [line.partition(" grouped")[0] for line in lines] == starts


def compared_layers() -> tuple[dict[str, Any], str]:
    """Results of one run, and the error of a run in which sort+NCCL doubles its output."""
    args = layers.options().parse_args("--device cpu --backend reference --models tiny --tokens 16 --rounds 1".split())
    found = measured(layers.Session(torch.device("cpu"), args))
    combine = layers.eager_combine
    layers.eager_combine = lambda *given: 2 * combine(*given)
    try:
        with pytest.raises(RuntimeError, match="results are wrong by") as error:
            layers.Session(torch.device("cpu"), args).everything()
    finally:
        layers.eager_combine = combine
    return found, str(error.value)


def test_layers() -> None:
    found, error = run_ranks(2, compared_layers)[0]
    results = {one["variant"]: one for one in found["results"]}
    assert {"serial, torch", "late, torch", "GEMMs, torch", "sort+NCCL", "communication"} <= results.keys()
    assert "torchtitan" in results or "torchtitan" in found["missing"]
    assert results["late, torch"]["error"] == 0.0 and results["communication"]["forward_backward"] is None
    assert "tiny, sort+NCCL" in error and "late" not in error


def test_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    charts.main(tmp_path)
    for name, (_, what) in charts.CHARTS.items():
        text = (tmp_path / f"{name}.svg").read_text()
        assert what in text and "@media (prefers-color-scheme: dark)" in text
        for selector in charts.DARK:
            assert selector == "text" or selector[9:-2] in text.partition("</style>")[2]


def test_chart_of_decode_layers(tmp_path: Path) -> None:
    """A panel for each model and number of GPUs, and a line for each layer that a run of them has measured with all
    numbers of tokens."""
    pytest.importorskip("matplotlib")
    results = [
        {"tokens": tokens, "floor_us": 100.0, "torch": 150.0, "memory": 104.0, "triton": 108.0, "pair": 8.0}
        for tokens in (1, 8)
    ]
    run = {"model": "qwen3-30b", "experts": 128, "machine": {"device": "NVIDIA H100 80GB HBM3"}, "results": results}
    runs = [{**run, "world_size": ranks} for ranks in (1, 2, 4)]
    other = [{"tokens": tokens, "floor_us": 100.0, "memory": 99.0, "vllm": 120.0} for tokens in (1, 8)]
    texts = []
    for more in ([], [{**run, "world_size": 1, "results": other}]):
        charts.draw_decode([*more, *runs], tmp_path / "decode.svg")
        texts.append((tmp_path / "decode.svg").read_text())
        drawn = re.findall(r"(\d+) experts a GPU, (\d) × H100", texts[-1])
        assert sorted(drawn) == [("128", "1"), ("32", "4"), ("64", "2")]
    assert all("plain Triton kernels" in text and "flashinfer" not in text for text in texts)
    assert ["vLLM" in text for text in texts] == [False, True]
    assert "@media (prefers-color-scheme: dark)" in texts[0]


def paired() -> tuple[dict[str, Any], str]:
    """Results of one run, and the error of a run in which MoECommunicator doubles what it combines."""
    args = moe.options().parse_args([*SMALL.split(), "--tokens", "3"])
    found = measured(moe.Session(torch.device("cpu"), args))
    combine = MoECommunicator.combine
    MoECommunicator.combine = lambda *given: 2 * combine(*given)  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError, match="results are wrong by") as error:
            moe.Session(torch.device("cpu"), args).everything()
    finally:
        MoECommunicator.combine = combine  # type: ignore[method-assign]
    return found, str(error.value)


def test_moe_communicator() -> None:
    found, error = run_ranks(1, paired)[0]
    assert [(one["tokens"], one["what"]) for one in found["results"]] == [(3, how) for how in moe.HOW]
    assert all(one["host_us"] > 0 and one["eager_us"] > 0 for one in found["results"])
    assert "'operators': 0.0" in error and "'MoECommunicator': 0.0" not in error
    assert len(moe.table(found)) == 1 + len(found["results"])


def test_late_gradients() -> None:
    args = late_gradients.options().parse_args("--tokens 8 --hidden 16 --experts 3 --top-k 2 --width 8".split())
    sizes = dict(num_experts=3, hidden_size=16, top_k=2, max_tokens_per_rank=8)
    with Communicator(**sizes, device="cpu", dtype=torch.bfloat16) as comm:
        doubled = TORCH._replace(weights_gradient=lambda *given: 2 * TORCH.weights_gradient(*given))
        step = late_gradients.steps(comm, args, TORCH)
        step(True)
        with pytest.raises(RuntimeError, match="the orders differ in the gradients of w_in, w_out"):
            late_gradients.compare(late_gradients.steps(comm, args, doubled), 1, Timer(comm.device, lambda: None))


@pytest.mark.parametrize(
    ("script", "options", "text"),
    [
        (overlap, "--routing warm", "--routing: 'warm' is none of balanced, skewed, nor as 'hot 0.2'"),
        (overlap, "--routing hot", "--routing: 'hot' is none of"),
        (training, "--hidden 100", "--hidden: 100 is not a multiple of 128"),
    ],
)
def test_options_are_checked_first(script: Any, options: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        script.main(["--device", "cpu", *options.split()])
    assert stop.value.code == 2 and text in capsys.readouterr().err


NO_RUN = "none.json is not a run that --out has written"


@pytest.mark.parametrize(
    ("script", "options", "text"),
    [
        (report, "none.json", NO_RUN),
        (report, f"{charts.RESULTS}/layers-2.json", "is a run of layers; allowed: a run of throughput or latency"),
        (report, f"--ratio unused.svg {charts.RESULTS}/latency-4.json", "a run of latency; allowed: a run of through"),
        (layers, "--draw none.json", NO_RUN),
        (layers, f"--draw {charts.RESULTS}/latency-4.json", "is not a run that --out has written: 'timelines'"),
        (scale_model, "--runs none", "--runs: none/throughput-4.json is not a run that --out has written"),
        (combine_error, "--ranks 0", "--ranks: 0 is not an int of at least 1"),
        (combine_error, "--hidden 100", "--hidden: 100 is not a multiple of 128"),
    ],
)
def test_files_and_sizes_that_cannot_be_used(
    script: Any, options: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        script.main(options.split())
    assert stop.value.code == 2 and text in capsys.readouterr().err


def test_the_chart_of_decode_layers_is_that_of_all_recorded_runs() -> None:
    runs = [json.loads(path.read_text()) for path in charts.RESULTS.glob("decode-*.json")]
    panels = {(run["experts"] // run["world_size"], int(run["world_size"])) for run in runs}
    drawn = re.findall(r"(\d+) experts a GPU, (\d+) × H100", (charts.RESULTS / "decode.svg").read_text())
    assert sorted(panels) == sorted((int(experts), int(ranks)) for experts, ranks in drawn)
