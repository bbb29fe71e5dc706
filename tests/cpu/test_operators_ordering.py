"""Compiled graphs run the ep operators in the order of the program, on every rank, whatever its sizes."""

from __future__ import annotations

import asyncio
import contextvars
import os
import re
import shutil
import threading
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch._inductor.config
import torch._inductor.decomposition
import torch._inductor.lowering
import toy
from ranks import run_ranks
from torch._functorch import compile_utils
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

from ep_ops.operators import ordering


def two_micro_batches(first_comm, second_comm, x1, idx1, w1, x2, idx2, w2, scale):
    """Combines are used in the other order than they are called in, which tempts Inductor to swap them."""
    first = first_comm.dispatch(x1, idx1, w1)
    second = second_comm.dispatch(x2, idx2, w2)
    one = first_comm.combine(toy.experts(first, scale), first.route, first.weights)
    two = second_comm.combine(toy.experts(second, scale), second.route, second.weights)
    return torch.cat([two * 2, one])


def _eager_and_compiled(tokens, train, dynamic):
    """(results, calls) of eager, and of Inductor, on this rank with tokens[rank] tokens in two micro-batches."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    # Sizes decide the order only where nothing else does, and caches must not bring back what they decided elsewhere.
    with torch._inductor.config.patch(fx_graph_cache=False), toy.communicator(512) as comm:
        calls: list = []
        toy.recorded(comm, calls)
        local = toy.scales()[comm.first_local_expert : comm.first_local_expert + comm.num_local_experts]
        results = []
        for compile_it in (False, True):
            args = [
                *toy.inputs(tokens[rank][0], seed=2 * rank, grad=train),
                *toy.inputs(tokens[rank][1], seed=2 * rank + 1, grad=train),
                local.clone().requires_grad_(train),
            ]
            fn = torch.compile(two_micro_batches, fullgraph=True, dynamic=dynamic) if compile_it else two_micro_batches
            calls.clear()
            out = fn(comm, comm, *args)
            if train:
                out.sin().sum().backward()
            results.append(([out.detach(), *(a.grad for a in args)], list(calls)))
    return results


@pytest.mark.parametrize(
    "tokens, train, dynamic",
    [
        pytest.param(((8, 512), (512, 8)), True, True, id="training", marks=pytest.mark.drawn),
        pytest.param(((8, 512), (512, 8)), True, False, id="training, static", marks=pytest.mark.drawn),
        pytest.param(((0, 5), (512, 0)), True, False, id="no tokens", marks=pytest.mark.drawn),
        pytest.param(((8, 512), (512, 8)), False, False, id="inference", marks=pytest.mark.drawn),
    ],
)
def test_ranks_of_very_different_sizes(tokens, train, dynamic):
    for (eager, eager_calls), (compiled, compiled_calls) in run_ranks(2, _eager_and_compiled, tokens, train, dynamic):
        assert [name for name, *_ in eager_calls] == ["dispatch"] * 2 + ["combine"] * 2 + train * (
            ["combine_backward"] * 2 + ["dispatch_backward"] * 2
        )
        assert compiled_calls == eager_calls
        torch.testing.assert_close(compiled, eager)


def operators_in(code):
    return re.findall(r"torch\.ops\.ep\.(\w+)\.default\(", code)


def test_all_communicators_are_one_sequence():
    """Ranks of two communicators may be the same processes: their operators must not pass each other either."""
    with toy.communicator() as first, toy.communicator() as second:
        calls: list = []
        args = *toy.inputs(3), *toy.inputs(7, seed=1), toy.scales()
        torch._dynamo.reset()
        torch.compile(two_micro_batches, fullgraph=True)(toy.recorded(first, calls), toy.recorded(second, calls), *args)
        assert [(name, comm) for name, _, comm in calls] == [
            (name, comm.name) for name in ("dispatch", "combine") for comm in (first, second)
        ]


def test_what_nothing_uses_still_runs():
    """A rank without tokens has no use for its combine, nor for the gradient of its dispatch; its peers have."""

    def layers(x, topk_idx, weights, scale):
        parts = zip(*(t.split([0, 4]) for t in (x, topk_idx, weights)), strict=True)
        return torch.cat([toy.layer(comm, *part, scale) for part in parts])

    with toy.communicator() as comm:
        torch._dynamo.reset()
        args = (*toy.inputs(4, grad=True), toy.scales(grad=True))

        def step(layers):
            for arg in args:
                arg.grad = None
            out = layers(*args)
            out.sin().sum().backward()
            return [out, *(arg.grad for arg in args)]

        results, code = run_and_get_code(lambda: step(torch.compile(layers, fullgraph=True)))
        torch.testing.assert_close(results, step(layers))
        assert [operators_in(part) for part in code] == [
            ["dispatch", "combine"] * 2,
            ["combine_backward", "dispatch_backward"] * 2,
        ]


class Given(CustomGraphPass):
    """A pass of a user."""

    def __init__(self, run=lambda graph: None):
        self.run = run

    def __call__(self, graph):
        self.run(graph)

    def uuid(self):
        return None


PASSES = "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass"


def in_thread(run):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


async def _task(run):
    run()


WHERE = {
    "thread": in_thread,
    "task": lambda run: asyncio.run(_task(run)),
    "context": lambda run: contextvars.Context().run(run),
    "here": lambda run: run(),
}


@pytest.mark.parametrize(
    "where, options",
    [
        ("thread", {}),
        ("task", dict.fromkeys(PASSES, Given())),
        pytest.param("task", {}, marks=pytest.mark.drawn),
        pytest.param("context", {}, marks=pytest.mark.drawn),
        *(pytest.param("here", {name: Given()}, marks=pytest.mark.drawn) for name in PASSES),
    ],
)
def test_the_order_holds_wherever_a_graph_is_compiled(where, options):
    """Options of Inductor are context variables, which threads and tasks do not inherit and which users may set."""

    def program(comm, x, topk_idx, weights):
        first, second = (comm.dispatch(x * n, topk_idx, weights) for n in (1, 2))
        b = comm.combine(torch.sin(second.x), second.route)
        a = comm.combine(torch.cos(first.x), first.route)
        return a, b

    calls: list = []
    ran: list = []
    with torch._inductor.config.patch(fx_graph_cache=False), toy.communicator() as comm:
        toy.recorded(comm, calls)
        inputs = toy.inputs(6)[:2]

        def run():
            torch._dynamo.reset()
            with torch.no_grad():
                compiled = torch.compile(program, fullgraph=True, **({"options": options} if options else {}))
                compiled(comm, *inputs, None)  # a graph of its own for each pass
                calls.clear()
                ran.append(compiled(comm, *inputs, None))
                ran.append(list(calls))
                calls.clear()
                ran.append(program(comm, *inputs, None))
                ran.append(list(calls))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            WHERE[where](run)
    results, compiled_calls, expected, eager_calls = ran
    assert compiled_calls == eager_calls and [name for name, *_ in eager_calls] == ["dispatch"] * 2 + ["combine"] * 2
    torch.testing.assert_close(results, expected)


def _swap(graph):
    """Move the second dispatch before the first."""
    first, second = (node for node in graph.nodes if node.target is torch.ops.ep.dispatch.default)
    for node in (second, *second.all_input_nodes):
        if node.op != "placeholder":
            first.prepend(node) if node is second else second.prepend(node)


def _insert(graph):
    """Add a dispatch."""
    node = next(node for node in graph.nodes if node.target is torch.ops.ep.dispatch.default)
    with graph.inserting_before(node):
        graph.call_function(node.target, node.args).meta["val"] = node.meta["val"]


@pytest.mark.parametrize("change, what", [(_swap, "moved"), pytest.param(_insert, "inserted", marks=pytest.mark.drawn)])
def test_a_pass_that_changes_the_order_is_reported(change, what):
    def program(comm, x, topk_idx):
        return [comm.dispatch(x * n, topk_idx).x for n in (1, 2)]

    with torch._inductor.config.patch(fx_graph_cache=False), toy.communicator() as comm, torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(program, fullgraph=True, options={"post_grad_custom_post_pass": Given(change)})
        with pytest.raises(Exception, match=f"a compiler pass has {what} dispatch.*allowed: passes that neither"):
            compiled(comm, *toy.inputs(6)[:2])


def test_nodes_that_communicate_are_put_back():
    """Nodes that communicate are put back with what they need, and behind it."""
    ep, math = torch.ops.ep, torch.ops.aten
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    one = graph.call_function(ep.plan.default, (x,))
    needed = graph.call_function(math.sin.default, (x,))
    two = graph.call_function(ep.plan.default, (needed,))
    three = graph.call_function(ep.plan.default, (x,))
    last = graph.call_function(math.cos.default, (one,))
    end = graph.output((last, two, three))
    last.prepend(one)
    three.append(needed), needed.append(two)
    assert list(graph.nodes) == [x, three, needed, two, one, last, end]
    ordering._restore(graph, [one, two, three])
    assert list(graph.nodes) == [x, one, needed, two, three, last, end]
    graph.lint()


def test_what_does_not_belong_between_start_and_wait_is_moved_behind():
    """A pass may move nodes towards what uses them, into a pair whose start they are not between in the program."""
    split, math = torch.ops.ep, torch.ops.aten
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    start = graph.call_function(split.dispatch_start.default, (x,))
    first, second = (graph.call_function(math.sin.default, (x,)) for _ in range(2))
    needed = graph.call_function(math.cos.default, (x,))
    between = graph.call_function(math.tanh.default, (x,))
    between.meta[ordering._BETWEEN] = (start.name,)
    wait = graph.call_function(split.dispatch_wait.default, (start, needed))
    graph.output((first, second, between, wait))
    ordering._restore_split(graph)
    assert list(graph.nodes)[:-1] == [x, start, needed, between, wait, first, second]


@pytest.fixture
def not_installed(monkeypatch):
    """Undo the installation, as in a fresh process."""
    monkeypatch.setattr(ordering, "_installed", False)
    for owner, name, _ in ordering.hooks():
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(function, "__wrapped__", function))  # put back
    monkeypatch.setattr(compile_utils, "rand_ops", list(compile_utils.rand_ops))
    lowerings = {op: torch._inductor.lowering.lowerings.pop(op, None) for op in ordering.OPERATORS}
    cat = torch._inductor.decomposition.decompositions[torch.ops.aten.cat.default]
    yield
    torch._inductor.decomposition.decompositions[torch.ops.aten.cat.default] = cat
    for op, lowering in lowerings.items():
        torch._inductor.lowering.lowerings.pop(op, None)
        if lowering is not None:
            torch._inductor.lowering.lowerings[op] = lowering


def test_unknown_torch_is_left_alone(not_installed, monkeypatch):
    monkeypatch.setattr(ordering, "TRIED", ("3.0", "3.1"))
    with pytest.warns(UserWarning, match="supported: 3.0 up to, not including, 3.1"):
        ordering.install()
    assert not any(op in torch._inductor.lowering.lowerings for op in ordering.OPERATORS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ordering.install()  # said once


def test_changed_torch_is_left_alone(not_installed, monkeypatch):
    monkeypatch.delattr(torch._inductor.lowering, "fallback_handler")
    with pytest.warns(UserWarning, match="fallback_handler"):
        ordering.install()
    assert not any(op in torch._inductor.lowering.lowerings for op in ordering.OPERATORS)


def test_keys_of_compiled_graphs_follow_from_the_sources(tmp_path, monkeypatch):
    """Keys of compiled graphs follow from the sources. With a number in their place, caches bring back graphs of an
    ep_ops that has changed since."""
    assert "ep_ops_tests_" in os.environ["TORCHINDUCTOR_CACHE_DIR"], "those of an earlier run are not found"
    root = Path(ordering.__file__).parents[2]
    assert ordering.SOURCES == (root / "ep_ops", root / "meta_kernels")
    shutil.copytree(root / "ep_ops" / "operators", tmp_path / "operators")
    (tmp_path / "fakes.py").write_text("\n")

    def key():
        ordering.digest_of.cache_clear()
        details = types.SimpleNamespace()
        ordering._add_digest(lambda details: None, details)
        return details.ep_ops

    keys = [key()]
    assert keys[0] == key()
    monkeypatch.setattr(ordering, "SOURCES", (tmp_path,))
    keys.append(key())
    for changed in ("operators/gradients.py", "operators/ordering.py", "fakes.py"):
        source = (tmp_path / changed).read_bytes()
        (tmp_path / changed).write_bytes(source[:-1] + b" ")  # as long as before
        keys.append(key())
    assert len(set(keys)) == 5
