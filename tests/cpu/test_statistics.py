"""Statistics of a communicator: what ranks count, its text for Prometheus, and how late ranks begin."""

from __future__ import annotations

import functools
import itertools
import xml.etree.ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from moe_cases import MOST, ROWS, E, H, K, drawn
from ranks import run_ranks
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import ep_ops
from ep_ops.backends.reference import meeting
from ep_ops.moe import MoECommunicator, MoECommunicatorConfig
from ep_ops.records import Operation
from ep_ops.statistics import Statistics, plot_begun, plot_waits, prometheus
from ep_ops.statistics.lateness import lateness

CODED = "e4m3/32/mx"
SENT = "wire:e4m3/32/mx"
BYTES = {"": H * 4, CODED: H + H // 32, SENT: H + H // 32}


def communicator(**more: Any) -> ep_ops.Communicator:
    given = dict(num_experts=E, hidden_size=H, top_k=K, max_tokens_per_rank=MOST, dtype=torch.float32, alignment=1)
    return ep_ops.Communicator(**{**given, "statistics": True, **more}, device="cpu")


def counts(seed: int, layout: str) -> list[Statistics]:
    """Run whole, split and planned dispatches and combines, with rows in formats and without."""
    rank = dist.get_rank()
    room: dict[str, Any] = {"padded": {"slots": 3}}.get(layout, {"capacity": 9})
    found = []
    with communicator(name="counted") as comm, torch.no_grad():
        found.append(comm.statistics())
        x, ids, weights = (lambda given: (given.x, given.ids, given.weights))(drawn(seed, rank, MOST))
        sent = comm.dispatch(x, ids, weights, layout=layout, **room)
        y = torch.zeros(sent.route.num_rows, H)
        comm.combine(y, sent.route)
        found.append(comm.statistics())
        started = comm.dispatch_start(x, ids, weights, layout=layout, format=CODED, **room)
        split = comm.dispatch_wait(started)
        comm.combine_wait(comm.combine_start(y, split.route, format=SENT))
        found.append(comm.statistics())
        comm.dispatch_planned(x, sent.route, format=CODED)
        found.append(comm.statistics())
        assert not comm.lateness().operations
    return found


@pytest.mark.parametrize("layout", ROWS)
def test_counts(layout: str) -> None:
    """Counts equal loops over what ranks have requested."""
    seed = cases.fresh_seed()
    all_found = run_ranks(2, counts, seed, layout)
    held = ((0, 1, 2), (3, 4))
    kept, dropped = torch.zeros(E, dtype=torch.int64), torch.zeros(E, dtype=torch.int64)
    copies = torch.zeros(2, 2, dtype=torch.int64)  # there, from
    used, by_expert, at_rank = [0, 0], [0] * E, [0, 0]
    named = [
        (source, token, expert)
        for source in range(2)
        for token, own in enumerate(drawn(seed, source, MOST).ids.tolist())
        for expert in own
        if expert >= 0
    ]
    if layout == "grouped":  # segments follow each other, and what does not fit is cut at the end
        named.sort(key=lambda one: one[2])
    came: set[tuple[int, int, int]] = set()
    began: set[tuple[int, int, int]] = set()
    for source, token, expert in named:
        there = int(expert in held[1])
        row = (there, source, token)
        if layout == "token_major":
            if row not in began:
                began.add(row)
                used[there] += 1
            fits = used[there] <= 9
        elif layout == "padded":
            fits = by_expert[expert] < 3
        else:
            fits = at_rank[there] < 9
        by_expert[expert] += 1
        at_rank[there] += 1
        (kept if fits else dropped)[expert] += 1
        if fits:
            came.add(row)
    for there, source, _ in came:
        copies[there, source] += 1
    assert dropped.any() and kept.any()
    for rank, found in enumerate(all_found):
        mine = list(held[rank])
        for number, one in enumerate(found):
            assert (one.communicator, one.rank, one.first_expert) == ("counted", rank, mine[0])
            assert one.operations == (0, 2, 4, 5)[number] and one.dispatches == number
            assert torch.equal(one.rows, kept[mine] * number) and torch.equal(one.dropped, dropped[mine] * number)
            sent = sum([BYTES[""], BYTES[CODED], BYTES[CODED]][:number])
            home = sum([BYTES[""], BYTES[SENT], 0][:number])
            assert torch.equal(one.received, copies[rank] * sent) and torch.equal(one.returned, copies[rank] * home)
            assert one.waited.shape == (2,) and one.waited[rank] == 0 and (one.waited >= 0).all()
            tensors = one.rows, one.dropped, one.received, one.returned
            assert all(t.dtype == torch.int64 and t.device.type == "cpu" for t in tensors)


def late(slow: int) -> Statistics:
    """Run three layers, by a clock that all ranks share: one of them puts it forward by 0.3 s before each dispatch,
    which the others have begun."""
    rank, store, readings = dist.get_rank(), dist.distributed_c10d._get_default_store(), itertools.count()
    given = drawn(0, rank, MOST)

    def read() -> int:
        now = store.add("clock", 0)
        store.set(f"reading {next(readings)} of rank {rank}", "")
        return now

    clock = SimpleNamespace(monotonic_ns=read)
    with communicator() as comm, torch.no_grad(), mock.patch.object(meeting, "time", clock):
        for layer in range(3):
            if rank == slow:  # the clock is read at both ends of dispatch and combine
                store.wait([f"reading {4 * layer} of rank {other}" for other in range(3) if other != rank])
                store.add("clock", 300_000_000)
            sent = comm.dispatch(given.x, given.ids)
            comm.combine(sent.x, sent.route)
        return comm.statistics()


@pytest.mark.parametrize("slow", [0, 2])
def test_a_late_rank_is_named_by_the_others(slow: int) -> None:
    """All others have waited for it alone, and it has waited for nobody."""
    for rank, one in enumerate(run_ranks(3, late, slow)):
        longest = float(one.waited.max())
        assert one.waited.tolist() == pytest.approx([0.9 * (rank != slow == peer) for peer in range(3)])
        line = f'ep_ops_waited_seconds_total{{communicator="{one.communicator}",rank="{rank}",peer="{slow}"}} '
        assert f"\n{line}{longest}\n" in one.prometheus()


def test_nothing_is_counted_by_default() -> None:
    with communicator(statistics=False) as comm:
        assert comm.counts is None
        with pytest.raises(ValueError, match="statistics is False in the configuration"):
            comm.statistics()
    with pytest.raises(RuntimeError, match="was destroyed"):
        comm.statistics()
    with pytest.raises(RuntimeError, match="was destroyed"):
        comm.lateness()
    with pytest.raises(ValueError, match="statistics is 1; allowed: one of True, False"):
        communicator(statistics=1)


def differing() -> str:
    with pytest.raises(ValueError) as caught:
        communicator(statistics=dist.get_rank() == 0)
    return str(caught.value)


def test_all_ranks_count_or_none() -> None:
    assert all("statistics" in text for text in run_ranks(2, differing))


def run(comm: ep_ops.Communicator, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    sent = comm.dispatch(x, ids, weights)
    return comm.combine(sent.x * 2, sent.route, sent.weights)


def test_compiled_functions_count() -> None:
    """Compiled functions count as eager ones do, with gradients and without. Backward adds operations only."""
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    given = drawn(cases.fresh_seed(), 0, MOST)
    rows = torch.bincount(given.ids[given.ids >= 0].long(), minlength=E)
    copies = int((given.ids >= 0).any(1).sum())
    for call, grad in itertools.product((run, compiled), (False, True)):
        with communicator() as comm:
            x = given.x.clone().requires_grad_(grad)
            with torch.set_grad_enabled(grad):
                for _ in range(3):
                    call(comm, x, given.ids, given.weights)
                if grad:
                    call(comm, x, given.ids, given.weights).sum().backward()
            one, times = comm.statistics(), 3 + grad
            assert one.dispatches == times and one.operations == 2 * times + 2 * grad
            assert torch.equal(one.rows, rows * times)
            assert one.received.tolist() == one.returned.tolist() == [copies * H * 4 * times]


def written(graph: torch.fx.GraphModule) -> set[int]:
    """Return the inputs to which a graph writes."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return {inputs.index(node.args[0]) for node in graph.graph.nodes if node.target is torch.ops.aten.copy_.default}


@pytest.mark.parametrize(("grad", "dynamic"), [pytest.param(False, False, marks=pytest.mark.drawn), (True, True)])
def test_cuda_graphs_count(grad: bool, dynamic: bool) -> None:
    """Compiled functions write to inputs at static addresses only, for which Inductor captures CUDA graphs, in each
    way to count. They need no value on the host (fullgraph), and each call counts."""
    given, found = drawn(cases.fresh_seed(), 0, MOST), []

    def keep(graph: torch.fx.GraphModule, _: Any, static_input_idxs: Any = (), **more: Any) -> Any:
        found.append((written(graph), set(static_input_idxs)))
        return make_boxed_func(graph.forward)

    def moved(comm: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if isinstance(comm, ep_ops.nn.MoELayer):
            return comm(x)
        if isinstance(comm, ep_ops.Communicator):
            return run(comm, x, ids, weights)
        output, handle = comm.dispatch(x, ids, weights)
        return comm.combine(output.x * 2, handle)

    torch._dynamo.reset()
    backend: Any = functools.partial(compile_fx, inner_compile=keep)
    compiled: Any = torch.compile(moved, fullgraph=True, dynamic=dynamic, backend=backend)
    asked = torch.bincount(given.ids[given.ids >= 0].long(), minlength=E)
    sizes: Any = dict(num_experts=E, hidden_size=H, top_k=K, max_tokens_per_rank=MOST, dtype=torch.float32)
    with (
        communicator(overflow="raise") as comm,
        MoECommunicator(MoECommunicatorConfig(**sizes, statistics=True), device="cpu") as moe,
    ):
        layer = ep_ops.nn.MoELayer(comm, 8)
        for counted in comm, moe, moe.sibling(), layer:
            x = given.x.clone().requires_grad_(grad)
            before = comm.statistics().dispatches + moe.comm.statistics().dispatches
            for call in range(1, 4):
                with torch.set_grad_enabled(grad):
                    out = compiled(counted, x, given.ids, given.weights)
                    if grad:
                        out.sum().backward()
                assert comm.statistics().dispatches + moe.comm.statistics().dispatches == before + call
                if isinstance(counted, MoECommunicator):
                    assert torch.equal(counted.load(), asked * call)
    assert all(inputs <= static for inputs, static in found), found
    assert [len(inputs) for inputs, _ in found if inputs] == [3, 3, 4]  # a sibling uses the code that is there


def test_recomputed_dispatches_count_once() -> None:
    """Calls count once, also in a function that runs again as a whole because its end keeps a tensor for backward."""
    given = drawn(cases.fresh_seed(), 0, MOST, grad=True)

    def further(*args: Any) -> Tensor:
        return run(*args).sin()

    with communicator() as comm:
        checkpoint(further, comm, given.x, given.ids, given.weights, use_reentrant=False).sum().backward()
        one = comm.statistics()
        copies = int((given.ids >= 0).any(1).sum())
        assert one.dispatches == 1 and one.received.tolist() == one.returned.tolist() == [copies * H * 4]


def test_communicators_that_are_made_in_inference_mode_count() -> None:
    given = drawn(0, 0, MOST)
    with torch.inference_mode():
        comm = communicator()
    with comm:
        run(comm, given.x, given.ids, given.weights)
        with torch.inference_mode():
            run(comm, given.x, given.ids, given.weights)
        assert comm.statistics().dispatches == 2


def test_meta_tensors_do_not_count() -> None:
    """Layers and calls on the meta device compute shapes; calls on the device count afterwards."""
    given = drawn(0, 0, MOST)
    with communicator() as comm, torch.device("meta"):
        layer = ep_ops.nn.MoELayer(comm, 8)
        assert layer(given.x.to("meta")).shape == given.x.shape
        assert run(comm, given.x.to("meta"), given.ids.to("meta"), given.weights.to("meta")).is_meta
        assert comm.statistics().dispatches == int(comm.statistics().returned.sum()) == 0
        run(comm, given.x, given.ids, given.weights)
        one = comm.statistics()
        assert one.dispatches == 1 and one.received.tolist() == one.returned.tolist() != [0]


def test_checked_communicators_count_once() -> None:
    with pytest.warns(RuntimeWarning, match="EP_OPS_CHECK"), communicator(check="1", backend="reference") as comm:
        given = drawn(0, 0, MOST)
        run(comm, given.x, given.ids, given.weights)
        one = comm.statistics()
        assert one.dispatches == 1 and one.operations == 2


# ---------------------------------------------------------------------- Prometheus

TEXT = r"""# HELP ep_ops_operations_total Operations of all kinds.
# TYPE ep_ops_operations_total counter
ep_ops_operations_total{communicator="a\"b\\c\nd",rank="1"} 7
ep_ops_operations_total{communicator="e",rank="0"} 0
# HELP ep_ops_dispatches_total Dispatches.
# TYPE ep_ops_dispatches_total counter
ep_ops_dispatches_total{communicator="a\"b\\c\nd",rank="1"} 3
ep_ops_dispatches_total{communicator="e",rank="0"} 0
# HELP ep_ops_rows_total Rows received for an expert.
# TYPE ep_ops_rows_total counter
ep_ops_rows_total{communicator="a\"b\\c\nd",rank="1",expert="4"} 10
ep_ops_rows_total{communicator="a\"b\\c\nd",rank="1",expert="5"} 9007199254740993
# HELP ep_ops_dropped_rows_total Rows for an expert that did not fit.
# TYPE ep_ops_dropped_rows_total counter
ep_ops_dropped_rows_total{communicator="a\"b\\c\nd",rank="1",expert="4"} 0
ep_ops_dropped_rows_total{communicator="a\"b\\c\nd",rank="1",expert="5"} 2
# HELP ep_ops_received_bytes_total Bytes of rows received from a peer in dispatches.
# TYPE ep_ops_received_bytes_total counter
ep_ops_received_bytes_total{communicator="a\"b\\c\nd",rank="1",peer="0"} 64
ep_ops_received_bytes_total{communicator="a\"b\\c\nd",rank="1",peer="1"} 128
ep_ops_received_bytes_total{communicator="e",rank="0",peer="0"} 0
# HELP ep_ops_returned_bytes_total Bytes of rows returned to a peer in combines.
# TYPE ep_ops_returned_bytes_total counter
ep_ops_returned_bytes_total{communicator="a\"b\\c\nd",rank="1",peer="0"} 32
ep_ops_returned_bytes_total{communicator="a\"b\\c\nd",rank="1",peer="1"} 0
ep_ops_returned_bytes_total{communicator="e",rank="0",peer="0"} 0
# HELP ep_ops_waited_seconds_total Time that this rank waited for a peer.
# TYPE ep_ops_waited_seconds_total counter
ep_ops_waited_seconds_total{communicator="a\"b\\c\nd",rank="1",peer="0"} 1.5
ep_ops_waited_seconds_total{communicator="a\"b\\c\nd",rank="1",peer="1"} 2.5e-06
ep_ops_waited_seconds_total{communicator="e",rank="0",peer="0"} 0.0
"""


def test_prometheus() -> None:
    """Each family is in one piece behind its type; labels are escaped, and ints of any size are exact."""
    waited = torch.tensor([1.5, 2.5e-6], dtype=torch.float64)
    ints = [torch.tensor(values) for values in ([10, 2**53 + 1], [0, 2], [64, 128], [32, 0])]
    first = Statistics('a"b\\c\nd', 1, 4, 7, 3, *ints, waited)
    none, zero = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    second = Statistics("e", 0, 0, 0, 0, none, none, zero, zero, zero.double())
    assert prometheus(first, second) == TEXT
    lines = [line for line in TEXT.splitlines(True) if '"e"' not in line]
    assert first.prometheus() == "".join(lines)
    with pytest.raises(ValueError, match="rank 0 of communicator 'e' twice"):
        prometheus(second, first, second)


# ---------------------------------------------------------------------- lateness


def noted(number: int, begun: float, waits: tuple[float, ...], met: float | None = None) -> Operation:
    return Operation(number, "dispatch", True, True, False, 8, "", False, begun, met, waits)


def test_a_straggler_shows(tmp_path: Path) -> None:
    """Operations that all ranks have noted; rank 2 begins 30 us late in each, and is waited for, once longer. How long
    a rank waits for its own blocks does not count."""
    late = [2e-6, 0.0, 30e-6]
    waits = [(9e-5, 1e-6, 28e-6), (3e-6, 0.0, 30e-6), (0.0, 2e-6, 9e-5)]
    more = {(8, 1): (3e-6, 0.0, 50e-6)}
    ops = [
        [noted(n, 100.0 + n + own, more.get((n, r), waits[r])) for n in range(5 + r, 9 + r)]
        for r, own in enumerate(late)
    ]
    of_all = lateness([list(reversed(own)) for own in ops])
    assert of_all.operations == (7, 8) and of_all.waits.shape == (3, 3, 2)
    assert of_all.waits[1, 2].tolist() == [30e-6, 50e-6]
    assert_close(of_all.late, torch.tensor(late, dtype=torch.float64), rtol=0, atol=1e-9)
    assert_close(of_all.awaited, torch.tensor([3e-6, 2e-6, 40e-6], dtype=torch.float64), rtol=0, atol=1e-9)
    text = plot_begun(of_all, tmp_path / "begun.svg").read_text(encoding="utf-8")
    assert "latest on average: rank 2, 30.0 µs" in text
    cells = [c for c in xml.etree.ElementTree.fromstring(text).iter() if "fill-opacity" in c.attrib]
    assert [float(c.attrib["fill-opacity"]) for c in cells] == pytest.approx([1 / 15, 1 / 15, 0, 0, 1, 1], abs=2e-3)
    text = plot_waits(of_all, tmp_path / "waits.svg").read_text(encoding="utf-8")
    assert "waited for most: rank 2, 40.0 µs" in text
    cells = [c for c in xml.etree.ElementTree.fromstring(text).iter() if "fill-opacity" in c.attrib]
    shown = [0, 1 / 40, 28 / 40, 3 / 40, 0, 1, 0, 2 / 40, 0]
    assert [float(c.attrib["fill-opacity"]) for c in cells] == pytest.approx(shown, abs=2e-3)
    alone = plot_begun(lateness(ops[:1]), tmp_path / "alone.svg").read_text(encoding="utf-8")
    assert "latest on average: rank 0, 0.0 µs" in alone and alone.count('fill-opacity="0.000"') == 4
    none = of_all._replace(operations=(), begun=torch.zeros(3, 0))
    with pytest.raises(ValueError, match="no operations that all ranks have recorded"):
        plot_begun(none, tmp_path / "none.svg")
    with pytest.raises(ValueError, match="no operations that all ranks have recorded"):
        plot_waits(none, tmp_path / "none.svg")


def test_clocks_that_differ() -> None:
    """Each rank's clock is ahead or behind by up to 5 ms. Times are exact to what a rank takes to observe that all have
    begun, if each rank was once the last. Without corrections they would be wrong by milliseconds."""
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    ranks, count, seen = 6, 12, 4e-6
    begun = 100 + torch.rand((ranks, count), generator=draw, dtype=torch.float64) * 1e-3
    begun[torch.arange(count) % ranks, torch.arange(count)] += 2e-3  # the last one
    begun[4] += 1e-3
    ahead = (torch.rand((ranks, 1), generator=draw, dtype=torch.float64) - 0.5) * 1e-2
    met = begun.amax(0) + seen * torch.rand((ranks, count), generator=draw, dtype=torch.float64)
    waits = (0.0,) * ranks

    def found(ahead: torch.Tensor, met: torch.Tensor | None) -> torch.Tensor:
        times = (begun + ahead).tolist()
        seen = (met + ahead).tolist() if met is not None else [[None] * count] * ranks
        ops = [[noted(n, times[r][n], waits, seen[r][n]) for n in range(count)] for r in range(ranks)]
        return lateness(ops).begun

    truth = begun - begun.amin(0)
    assert_close(found(ahead, met), truth, rtol=0, atol=2 * seen)
    # Clocks that agree are not corrected, nor those of which nothing is known.
    assert_close(found(torch.zeros(1), met), truth, rtol=0, atol=1e-9)
    wrong = begun + ahead
    assert_close(found(ahead, None), wrong - wrong.amin(0), rtol=0, atol=1e-9)
    # A rank that is the last each time cannot tell others that its clock is behind: it appears less late than it is.
    begun[0] = begun[1:].amax(0) + 1e-3
    met = begun.amax(0) + seen
    for behind in (-2e-3, 0.0, 2e-3):
        late = found(torch.tensor([[behind], *[[0.0]] * (ranks - 1)]), met)
        assert bool((late[0] >= late[1:].amax(0) - 2 * seen).all()) and bool((late >= 0).all())
