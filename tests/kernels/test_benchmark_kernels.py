"""The benchmark without a GPU: its kernels compile, its bytes are counted right, it runs on CPU processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ep_ops
from benchmarks import report as recorded
from ep_ops import Communicator, arrivals
from ep_ops.bench import decode, ranks, report, workloads
from ep_ops.bench.operators import Calls
from ep_ops.bench.presets import FORMATS, MEASURABLE, OPERATORS, PRESETS, SUMS, Case
from ep_ops.bench.session import Session
from ep_ops.bench.timing import CHAIN, Timer, leaves
from ep_ops.bench.workloads import Workload, draw_route, rows_by_expert, rows_by_rank, traffic_of
from ep_ops.group.exchange import Exchange

ROOT = Path(ep_ops.__file__).parent.parent
CPU = torch.device("cpu")


def ep_ops_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ep_ops", "bench", "throughput", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=ROOT)


# ---------------------------------------------------------------------- kernels


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("world_size, row_bytes", [(2, 4096), (4, 14336), (8, 16400)])
@pytest.mark.parametrize("push", [True, False])
def test_link_kernels_move_rows_by_bulk_copies(arch: str, world_size: int, row_bytes: int, push: bool) -> None:
    pytest.importorskip("cutlass")
    from cute_kernels.jit import compile_kernel
    from ep_ops.bench.link import LinkCopy

    ptx = compile_kernel(LinkCopy(world_size, row_bytes, push), arch, keep_ptx=True).__ptx__
    assert ptx.count("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes") == 1
    assert ptx.count("cp.async.bulk.global.shared::cta.bulk_group") == 1
    assert "cp.async.bulk.wait_group 	0" in ptx
    # Where the peers' memory lies is read from a table; no row passes through registers.
    assert set(re.findall(r"\bld\.global[.\w]*", ptx)) == {"ld.global.nc.b64"} and "st.global" not in ptx
    assert ".local" not in ptx


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_barrier_releases_and_acquires(arch: str) -> None:
    pytest.importorskip("cutlass")
    from cute_kernels.jit import compile_kernel
    from ep_ops.bench.link import Barrier

    ptx = compile_kernel(Barrier(4), arch, keep_ptx=True).__ptx__
    assert "st.release.sys.global" in ptx and "ld.acquire.sys.global" in ptx and "globaltimer" in ptx


# ---------------------------------------------------------------------- rows and bytes


@pytest.mark.parametrize("routing", workloads.ROUTINGS)
def test_routes_name_distinct_experts(routing: str) -> None:
    workload = Workload(tokens=300, experts=24, top_k=5, routing=routing)
    route = draw_route(workload, rank=1, seed=3, device=CPU)
    assert route.dtype == torch.int32 and route.shape == (300, 5)
    assert route.min() >= 0 and route.max() < 24
    assert all(len(set(experts)) == 5 for experts in route.tolist())
    assert torch.equal(route, draw_route(workload, rank=1, seed=3, device=CPU))
    assert not torch.equal(route, draw_route(workload, rank=0, seed=3, device=CPU))


@pytest.mark.parametrize(("part", "world_size"), [("0.2", 4), ("0.93", 4), ("0.5", 2)])
def test_a_hot_rank_gets_as_many_rows_as_it_is_said(part: str, world_size: int) -> None:
    workload = Workload(tokens=3000, experts=64, top_k=4, routing=f"hot {part}")
    rows = sum(rows_by_expert(draw_route(workload, r, 1, CPU, world_size), 64) for r in range(world_size))
    first = rows[: 64 // world_size].sum() / (rows.sum() / world_size)
    assert abs(first - (float(part) * world_size + 1 - float(part))) < 0.1
    with pytest.raises(ValueError, match="routing is 'warm'"):
        draw_route(Workload(routing="warm"), 0, 0, CPU)


def test_skewed_routing_prefers_the_same_experts_on_all_ranks() -> None:
    draw = {
        routing: [
            rows_by_expert(draw_route(Workload(tokens=2000, routing=routing), rank, 0, CPU), 256) for rank in range(2)
        ]
        for routing in workloads.ROUTINGS
    }
    for routing, (least, most) in {"balanced": (1.0, 1.6), "skewed": (6.0, 30.0)}.items():
        for counts in draw[routing]:
            assert least < counts.max() / counts.float().mean() < most
    first, second = draw["skewed"]
    assert first.argmax() == second.argmax()


def test_rows_are_counted_once_per_token_and_rank() -> None:
    # Experts 0 1 2 | 3 4 on two ranks.
    route = torch.tensor([[0, 2], [3, 0], [4, 3], [-1, 4], [-1, -1]], dtype=torch.int32)
    assert rows_by_rank(route, experts=5, world_size=2).tolist() == [2, 3]
    assert rows_by_expert(route, experts=5).tolist() == [2, 0, 1, 2, 2]


def test_traffic_counts_what_crosses() -> None:
    traffic = traffic_of(torch.tensor([[7, 3], [5, 9]]), torch.tensor([20, 0, 3, 17]))
    assert traffic.crossing == 5  # the busiest direction of the busiest rank
    assert traffic.sends == [[0, 3], [5, 0]]
    assert traffic.expanded == (20, 20)
    assert traffic.capacity == 48  # 16 + 32 rows on the second rank, 32 on the first


# ---------------------------------------------------------------------- the command and its report


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_made_of_known_measurements(preset: str) -> None:
    made = PRESETS[preset]()
    assert made.cases and all(set(case.measure) <= set(MEASURABLE) for case in made.cases)


@pytest.mark.drawn
def test_tiny_run_on_two_cpu_processes(tmp_path: Path) -> None:
    out = tmp_path / "tiny.json"
    done = ep_ops_bench(
        "--preset", "tiny", "--device", "cpu", "--iterations", "1", "--domain-size", "1", "--out", str(out),
        "--only", ",".join(name for name in MEASURABLE if name != "pair"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = json.loads(out.read_text())
    assert run["domain_size"] == 1 and run["staging_bytes"] is None
    assert run["world_size"] == 2 and run["machine"]["backend"] == "reference"
    found = [(result["op"], result["routing"]) for result in run["results"]]
    operators = list(OPERATORS)
    others = ["host_dispatch", "nccl_dispatch", "nccl_combine", "eager_dispatch", "eager_combine"]
    assert found == [(op, "balanced") for op in (*operators, *others)] + [(op, "skewed") for op in operators]
    assert all(result["us"] > 0 and result.get("correct", True) for result in run["results"])
    assert done.stdout.splitlines()[-1].startswith("combine, token-major, gathered")


@pytest.mark.drawn
@pytest.mark.parametrize("op", [*OPERATORS, "pair_forward", "pair_forward_backward"])
def test_what_a_replay_leaves_is_compared_with_an_eager_call(op: str) -> None:
    """All defined results of a replay are compared with an eager call's, and none of the inputs."""
    hidden = 128 if op in FORMATS or op in SUMS else 16
    workload = Workload(tokens=24, hidden=hidden, experts=8, top_k=2, dtype="fp32")
    shape = dict(
        num_experts=8, hidden_size=hidden, top_k=2, max_tokens_per_rank=24, dtype=torch.float32, symmetric_rows=26
    )
    with Communicator(**shape, device="cpu", backend="reference", alignment=4) as comm:
        comm.backend.rows.unused = float("nan")
        calls = Calls(comm, workload)
        given = [t.clone() for s in calls.sets for t in leaves(dataclasses.astuple(s))]
        if op in OPERATORS:
            with torch.no_grad():
                found_on_replay(calls, calls.call(op))
        else:
            found_on_replay(calls, calls.compiled()[op == "pair_forward_backward"])
        for tensor, before in zip(leaves([dataclasses.astuple(s) for s in calls.sets]), given, strict=True):
            assert torch.equal(tensor.nan_to_num(), before.nan_to_num())


def found_on_replay(calls: Calls, call) -> None:
    _, left = Timer(CPU, lambda: None).graph(call, 1)
    again = call(CHAIN - 1)
    assert leaves(left) and calls.same(CHAIN - 1, left, again)
    for tensor in leaves(left):
        kept = tensor.clone()
        for row in is_defined(calls, tensor).nonzero():
            tensor[tuple(row)] += 1
            assert not calls.same(CHAIN - 1, left, again)
            tensor.copy_(kept)


def is_defined(calls: Calls, tensor: torch.Tensor) -> torch.Tensor:
    """Rows that nobody may read are not a number, of codes and of exponents neither; lists of arrivals end with their
    last copy."""
    defined = tensor == tensor
    if tensor.shape == calls.token_rows.shape and tensor.dtype == torch.uint8:
        defined = tensor != 0x7F
    if tensor.dim() == 2 and tensor.shape[0] == calls.capacity and not tensor.is_floating_point():
        defined = tensor != (0x7F if tensor.dtype == torch.uint8 else -1)
    for room in (calls.capacity, calls.room):
        if tensor.shape != (arrivals.size(room, calls.comm.world_size),):
            continue
        lists, places = (arrivals.views(t, room) for t in (tensor, defined))
        copies = int(lists.sources[-1])
        places.copies[copies, 1] = False
        places.copies[copies + 1 :] = False
        places.owned[int(lists.copies[copies, 0]) :] = False
        assert 0 < copies <= int(lists.copies[copies, 0]) < room
    return defined


@pytest.mark.parametrize("works", [True, False])
def test_a_graph_that_does_nothing_is_called_wrong(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(tokens=24, hidden=16, experts=8, top_k=2, dtype="fp32")
    shape = dict(num_experts=8, hidden_size=16, top_k=2, max_tokens_per_rank=24, dtype=torch.float32)
    captured = Timer.captured

    def captured_once(self, call, count):
        captured(self, call, count)(0)
        return lambda i: None

    if not works:
        monkeypatch.setattr(Timer, "captured", captured_once)
    run = object.__new__(Session)
    run.args, run.world_size, run.rank, run.device = SimpleNamespace(iterations=1, out=None), 1, 1, CPU
    run.timer, run.found, run.errors = Timer(CPU, lambda: None), {"results": [], "link": []}, {"combine": 0.0}
    with Communicator(**shape, device="cpu", backend="reference", alignment=4) as comm, torch.no_grad():
        calls = Calls(comm, workload)
        monkeypatch.setattr(comm.backend, "name", "cute")
        for op in ("dispatch", "combine"):
            run.operator(Case(workload, (op,)), calls, op, calls.call(op))
    assert [result["graph_same"] for result in run.found["results"]] == [works, works]
    assert [result["correct"] for result in run.found["results"]] == [works, works]


@pytest.mark.parametrize("weights", ["bf16", "e4m3"])
def test_decode_kernels_are_compiled_together(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ranks run decode layers, they compile all that they launch, also for rows in a format."""
    prepare = pytest.importorskip("cute_kernels.prepare")
    backend = SimpleNamespace(name="cute")
    asked: list[Any] = []
    comm: Any = SimpleNamespace(
        backend=backend, num_local_experts=4, world_size=2, warmup=asked.extend, exchange=Exchange(None, CPU)
    )  # fmt: skip
    run = object.__new__(decode.DecodeLayers)
    run.args = SimpleNamespace(tokens=(1, 8), hidden=256, width=128, experts=8, top_k=2, weights=weights, only=())
    run.world_size, run.rank, run.device, run.has_triton = 2, 0, CPU, False
    run.communicator = lambda workload: contextlib.nullcontext(comm)  # type: ignore[method-assign]

    class Compiled(Exception):
        """Carries the kernels that are compiled."""

    def compiled(wanted: list[Any], arch: str, processes: int) -> None:
        raise Compiled(wanted)

    monkeypatch.setattr(prepare, "prepare_all", compiled)
    monkeypatch.setattr(decode, "arch_of", lambda device: "sm_90a")
    with pytest.raises(Compiled) as found:
        run.everything()
    assert asked == ([(decode.FORMAT, "rows")] if weights == "e4m3" else [])
    gemms = "FewRows" if weights == "bf16" else "FewRowsE4M3"
    assert {type(kernel).__name__ for kernel in found.value.args[0]} == {gemms}


def made_up_run() -> dict:
    """Return a run as a full one writes it, with times in graphs at 80 % of the link's speed, and 50 % below 24 SMs."""
    results = []
    for case in PRESETS["full"]().cases:
        w = case.workload
        for op in recorded.SWEPT:
            missed = math.comb(192, w.top_k) / math.comb(256, w.top_k)  # of the tokens: they name no expert of a rank
            nbytes = 3 * round(w.tokens * (1 - missed)) * w.row_bytes
            speed = 400e3 * (0.5 if (case.dispatch_sms or 24) < 24 else 0.8)
            results.append(
                {
                    "op": op, "tokens": w.tokens, "hidden": w.hidden, "experts": w.experts, "top_k": w.top_k,
                    "routing": w.routing, "dtype": w.dtype, "row_bytes": w.row_bytes, "given_sms": case.dispatch_sms,
                    "dispatch_sms": case.dispatch_sms, "combine_sms": case.combine_sms, "nvlink_bytes": nbytes,
                    "us": nbytes / speed * 1.2, "steady_us": nbytes / speed * 1.1, "graph_us": nbytes / speed,
                }
            )  # fmt: skip
    link = [
        {"direction": direction, "row_bytes": row_bytes, "sms": sms, "gbs": min(400.0, 15.0 * sms)}
        for direction in ("push", "pull")
        for row_bytes in (14336, 4096)
        for sms in (8, 24, 64)
    ]
    machine = {"device": "GPU", "torch": "2", "cuda": "13", "nccl": "2", "driver": "5", "backend": "cute"}
    return {"world_size": 4, "machine": machine, "link": link, "results": results}


def test_report_compares_with_the_link() -> None:
    run = report.complete(made_up_run())
    first = run["results"][0]
    assert report.best_link(run) == 400.0
    assert first["ratio"] == pytest.approx(0.8) and first["gbs"] == pytest.approx(320)
    assert first["limit_us"] == pytest.approx(0.8 * first["graph_us"])
    text = "\n".join(report.table(run))
    assert "link push, rows of 14336 bytes, GB/s (SMs): 120 (8), 360 (24), 400 (64)" in text
    assert "80 %" in text and "50 %" in text
    assert recorded.markdown(run).count("\n|") == len(run["results"]) + 2


def test_results_are_written_one_a_line(tmp_path: Path) -> None:
    run = made_up_run()
    ranks.write(run, tmp_path / "new" / "run.json")
    text = (tmp_path / "new" / "run.json").read_text()
    assert text.count("\n") == len(run["results"]) + len(run["link"]) + 2 + 2 + 4
    read = json.loads(text)
    assert read["machine"] == run["machine"] and read["link"] == run["link"]
    assert read["results"][-1]["us"] == pytest.approx(run["results"][-1]["us"], rel=1e-4)
    assert len(report.table(read)) == len(report.table(run))


def test_report_command_prints_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.write(made_up_run(), tmp_path / "run.json")
    assert recorded.main(["--no-plots", str(tmp_path / "run.json")]) == 0
    line = "| dispatch, reused route | 4096 | 7168 | 8 | balanced |  | 596.9 | 547.2 | 497.4 | 320 | 80 % |"
    assert line in capsys.readouterr().out
    assert recorded.main(["--no-plots", "--summary", str(tmp_path / "run.json")]) == 0
    short = capsys.readouterr().out
    assert line in short and short.count("\n|") == len(recorded.SWEPT) + 2


def test_report_plots_every_sweep(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = recorded.plot(report.complete(made_up_run()), tmp_path / "full")
    assert [path.name for path in written] == ["full-tokens.svg", "full-sms.svg", "full-shapes.svg"]
    assert all(10_000 < path.stat().st_size < 300_000 for path in written)


def test_sweeps_show_whether_time_follows_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.json"
    ranks.write(made_up_run(), path)
    assert recorded.main([str(path), "--ratio", str(tmp_path / "ratio.svg")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "4 ranks"
    # Budgets balanced only; tokens, hidden size and top-k for both routings.
    assert len(told) == 1 + len(recorded.SWEPT) * (1 + 3 * 2)
    (line,) = (line for line in told if line.startswith("dispatch, skewed, µs (of link) over tokens: "))
    assert line.count(" (80%)") == len(line.split(", ")) - 2 == 7
    (line,) = (line for line in told if line.startswith("combine, weighted, balanced, µs (of link) over SMs: "))
    assert "20: 795.9 (50%)" in line and "24: 497.4 (80%)" in line


def test_sweeps_plot_runs_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one.json", "two.json"):
        ranks.write(made_up_run(), tmp_path / name)
    plot = tmp_path / "ratio.svg"
    assert recorded.main([str(tmp_path / "one.json"), str(tmp_path / "two.json"), "--ratio", str(plot)]) == 0
    assert 10_000 < plot.stat().st_size < 300_000
