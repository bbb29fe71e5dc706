"""Compiled graphs run every ep operator of the program once, whatever the sizes of the rank's tensors: AOT autograd
removes none, merges none, and recomputes only what activation checkpointing asks for."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
import toy
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from ranks import run_ranks
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ep_ops.operators.partition import mark

FORWARD, BACKWARD = ["dispatch", "combine"], ["combine_backward", "dispatch_backward"]


def operators(fn: Callable[..., Any], *args: Any, partition: Any = min_cut_rematerialization_partition) -> list[Any]:
    """Names of the ep operators in the forward and in the backward graph of ``fn``."""
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([n.target._opname for n in graph.graph.nodes if getattr(n.target, "namespace", None) == "ep"])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    out = torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(*args)
    if out.requires_grad:
        out.sum().backward()
    return graphs


def unused(comm, x, topk_idx, weights, scale):
    """A dispatch whose results nobody uses, and a layer."""
    comm.dispatch(x, topk_idx, weights)
    return toy.layer(comm, x * 2, topk_idx, weights, scale)


def identical(comm, x, topk_idx, weights, scale):
    """Two dispatches of the same tokens."""
    first, second = (comm.dispatch(x, topk_idx, weights) for _ in range(2))
    return sum(comm.combine(toy.experts(rows, scale) * n, rows.route) for n, rows in ((2, first), (3, second)))


@pytest.mark.parametrize("partition", [min_cut_rematerialization_partition, default_partition])
@pytest.mark.parametrize("grad", [False, True])
def test_unused_and_identical_operators_stay(grad, partition):
    with toy.communicator() as comm:
        args = (*toy.inputs(6, grad=grad), toy.scales(grad=grad))
        expected = [["dispatch", "dispatch", "combine"], BACKWARD]
        assert operators(functools.partial(unused, comm), *args, partition=partition) == expected[: 1 + grad]
        expected = [["dispatch"] * 2 + ["combine"] * 2, ["dispatch_planned"] * 2 + ["dispatch_backward"] * 2]
        ran = operators(functools.partial(identical, comm), *args, partition=partition)
        assert [sorted(part) for part in ran] == [sorted(part) for part in expected[: 1 + grad]]


def test_backward_repeats_only_operators_that_it_needs():
    """Where everything is repeated, an operator whose results only forward reads, through whatever is repeated as well,
    runs in forward alone."""
    graph = torch.fx.Graph()
    x, tangent = graph.placeholder("x"), graph.placeholder("tangents_1")
    read, needed = (
        graph.call_function(op, (x,)) for op in (torch.ops.ep.dispatch.default, torch.ops.ep.combine.default)
    )
    shown = graph.call_function(torch.neg, (graph.call_function(operator.getitem, (read, 0)),))
    grad = graph.call_function(torch.mul, (tangent, graph.call_function(torch.neg, (needed,))))
    graph.output((shown, grad))
    with torch._functorch.config.patch(activation_memory_budget=0):
        mark(graph)
    assert read.meta["partitioner_tag"] == "must_be_in_forward"
    assert "partitioner_tag" not in needed.meta


WIDE = 64


def two_layers(comm, policy, x, topk_idx, weights, scale, wide):
    """Cheap and expensive tensors of various sizes between the operators, for the partitioner to choose from."""

    def layer(x):
        rows = comm.dispatch(torch.nn.functional.silu(x), topk_idx, weights)
        covered = torch.arange(rows.x.shape[0])[:, None] < rows.route.offs[-1]
        y = toy.experts(rows, scale)
        y = ((y * y.sigmoid()) @ wide).relu() @ wide.t()
        return comm.combine(torch.where(covered, y, 0), rows.route, rows.weights)

    for _ in range(2):
        if policy == "none":
            out = layer(x)
        elif policy == "all":
            out = checkpoint(layer, x, use_reentrant=False)
        else:
            chosen = functools.partial(create_selective_checkpoint_contexts, POLICIES[policy])
            out = checkpoint(layer, x, use_reentrant=False, context_fn=chosen)
        x = torch.tanh(out) + torch.nn.functional.gelu(x @ wide) @ wide.t()
    return x


def _prefer_save(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_SAVE


def _products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = {
    "prefer to save": _prefer_save,
    "prefer to save products": _products,
    "save products": [torch.ops.aten.mm.default],
}


def _inputs(tokens):
    draw = torch.Generator().manual_seed(1)
    wide = (torch.randn(toy.HIDDEN, WIDE, generator=draw) * 0.1).requires_grad_()
    return *toy.inputs(tokens, grad=True), toy.scales(grad=True), wide


DRAWN = {"marks": pytest.mark.drawn}


@pytest.mark.parametrize(
    "policy, budget",
    [
        ("none", 0.52),
        ("prefer to save products", 0.3),
        pytest.param("none", 0.1, **DRAWN),
        pytest.param("none", 0.0, **DRAWN),
        pytest.param("all", 1.0, **DRAWN),
        pytest.param("all", 0.3, **DRAWN),
        pytest.param("prefer to save", 0.3, **DRAWN),
        pytest.param("prefer to save products", 1.0, **DRAWN),
        pytest.param("save products", 0.3, **DRAWN),
    ],
)
def test_sizes_do_not_decide_which_operators_run(policy, budget):
    with torch._functorch.config.patch(activation_memory_budget=budget), toy.communicator(512) as comm:
        model = functools.partial(two_layers, comm, policy)
        few, many = (operators(model, *_inputs(tokens)) for tokens in (4, 512))
    assert few == many
    forward, backward = few
    assert forward == FORWARD * 2
    assert [name for name in backward if name.endswith("backward")] == BACKWARD * 2
    if policy in ("none", "prefer to save") and budget > 0:
        assert backward == BACKWARD * 2


def _compiled_and_eager(budget):
    """(operators that ran, gradients) of this rank, compiled and eager; ranks have different numbers of tokens."""
    rank = torch.distributed.get_rank()
    results = []
    with torch._functorch.config.patch(activation_memory_budget=budget), toy.communicator(512) as comm:
        calls: list = []
        toy.recorded(comm, calls)
        layer = functools.partial(two_layers, comm, "none")
        partitioned = "aot_eager_decomp_partition"  # as Inductor does, without its kernels
        for run in (torch.compile(layer, fullgraph=True, dynamic=False, backend=partitioned), layer):
            x, topk_idx, weights, scale, wide = _inputs((512, 4)[rank])
            local = scale[comm.first_local_expert :][: comm.num_local_experts]
            calls.clear()
            run(x, topk_idx, weights, local, wide).sum().backward()
            results.append(([name for name, *_ in calls], [x.grad, weights.grad, scale.grad, wide.grad]))
    return results


def test_ranks_of_different_sizes_agree_under_a_memory_budget():
    for (ran, gradients), (expected_ran, expected) in run_ranks(2, _compiled_and_eager, 0.52):
        assert ran == expected_ran == FORWARD * 2 + BACKWARD * 2
        torch.testing.assert_close(gradients, expected)
