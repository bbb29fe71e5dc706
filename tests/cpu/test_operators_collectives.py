"""Compiled graphs run PyTorch's collectives and the ep operators in the order of the program, on every rank."""

from __future__ import annotations

import re

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import toy
from ranks import run_ranks
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from ep_ops.nn import MoELayer, Router, load_balancing_loss, router_z_loss

NAMES = {"allreduce_": "all_reduce"}  # of dist.all_reduce outside of graphs


class Noted(TorchDispatchMode):
    """Notes the operators that communicate in ``names``."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._opname
        if func.namespace in ("ep", "c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
            self.names.append(NAMES.get(name, name.rstrip("_")))
        return func(*args, **(kwargs or {}))


def _names_in(codes):
    """The operators that the generated code of each graph runs."""
    found = [re.findall(r"torch\.ops\.(?:ep|_c10d_functional)\.(\w+)\.default\(", code) for code in codes]
    return [[name.rstrip("_") for name in names if name != "wait_tensor"] for names in found]


def every_collective(comm, x, idx, w, scale):
    """Each depends on x alone, and all are used in the opposite order."""
    group = dist.group.WORLD
    s = x.sum(0)
    constant = s.detach()
    first = toy.layer(comm, x, idx, w, scale)
    results = [funcol.all_reduce(s, "sum", group)]
    second = toy.layer(comm, x * 2, idx, w, scale)
    results.append(funcol.all_gather_tensor_autograd(s * 2, 0, group))
    results.append(funcol.reduce_scatter_tensor_autograd(s * 3, "sum", 0, group))
    third = toy.layer(comm, x * 3, idx, w, scale)
    results.append(funcol.all_to_all_single_autograd(s * 4, [toy.HIDDEN], [toy.HIDDEN], group))
    results.append(funcol.broadcast(constant * 5, 0, group))
    results += funcol.all_reduce_coalesced([constant * 6, constant * 7], "sum", group)
    results += funcol.all_gather_into_tensor_coalesced([constant * 8, constant * 9], group)
    results += funcol.reduce_scatter_tensor_coalesced([constant * 10, constant * 11], "sum", [0, 0], group)
    for _ in range(2):  # identical, and one is not used
        total = constant * 12
        dist.all_reduce(total)
    fourth = toy.layer(comm, x * 4, idx, w, scale)
    return torch.cat([fourth, third, second, first]), [total, *reversed(results)]


def _order_of_every_collective(tokens, grad):
    """(results, names) of eager, and of Inductor."""
    with torch._inductor.config.patch(fx_graph_cache=False), toy.communicator() as comm, torch.set_grad_enabled(grad):
        args = [*toy.inputs(tokens, grad=grad), toy.scales(grad=grad)]

        def step(fn):
            for arg in args:
                arg.grad = None
            out, others = fn(comm, *args)
            if grad:
                (out.sin().sum() + sum(other.sum() for other in others)).backward()
            return [t.detach() + 0 for t in (out, *others)] + [arg.grad for arg in args]  # waits

        results, codes = run_and_get_code(step, torch.compile(every_collective, fullgraph=True, dynamic=False))
        with Noted() as noted:
            expected = step(every_collective)
        return (expected, noted.names), (results, _names_in(codes))


@pytest.mark.parametrize(
    "tokens, grad", [(0, True), *(pytest.param(*case, marks=pytest.mark.drawn) for case in ((5, True), (0, False)))]
)
def test_every_collective_keeps_its_place(tokens, grad):
    (found,) = run_ranks(1, _order_of_every_collective, tokens, grad, timeout=550)
    (expected, names), (results, graphs) = found
    assert len(names) == (30 if grad else 18) and len(graphs) == 1 + grad
    assert [name for graph in graphs for name in graph] == names
    torch.testing.assert_close(results, expected)


def two_layers_and_three_losses(first, second, x):
    out, one = first(x, return_routing=True)
    losses = [load_balancing_loss(one.logits, one.topk_idx)]
    out, two = second(out, return_routing=True)
    losses += [load_balancing_loss(two.logits, two.topk_idx), router_z_loss(one.logits)]
    router_z_loss(two.logits)  # not used
    return out, losses


def _beside_eager(tokens, compiled, grad, generate):
    """Results with ranks ``compiled``, and with none, of layers with ``tokens[rank]`` tokens. ``generate``: whether
    Inductor compiles C++ for operators of torch, or calls them."""
    rank = dist.get_rank()
    results = []
    how = torch._inductor.config.patch(fx_graph_cache=False, fallback_by_default=not generate)
    with how, toy.communicator() as comm, torch.set_grad_enabled(grad):
        layers = [MoELayer(comm, 8, router=Router(toy.EXPERTS, toy.HIDDEN, toy.TOP_K, seed=n)) for n in range(2)]
        parameters = [p for layer in layers for p in layer.router.parameters()]
        for ranks in (compiled, ()):
            x = toy.inputs(tokens[rank], seed=rank, grad=grad)[0]
            run = two_layers_and_three_losses
            if rank in ranks:
                run = torch.compile(run, fullgraph=True, dynamic=False)
            out, losses = run(*layers, x)
            if grad:
                (out.sin().sum() + sum(losses)).backward()
            results.append([t.detach() for t in (out, *losses)] + [t.grad for t in (x, *parameters)])
            for layer in layers:
                layer.zero_grad()
    return results


@pytest.mark.parametrize(
    "tokens, compiled, grad, generate",
    [
        ((16, 0), (0,), True, False),
        pytest.param((16, 0), (0, 1), True, False, marks=pytest.mark.drawn),
        pytest.param((16, 16), (1,), True, True, marks=pytest.mark.drawn),
        pytest.param((0, 16), (0, 1), False, False, marks=pytest.mark.drawn),
    ],
)
def test_compiled_ranks_beside_eager_ones(tokens, compiled, grad, generate):
    for got, expected in run_ranks(2, _beside_eager, tokens, compiled, grad, generate, timeout=550):
        torch.testing.assert_close(got, expected)


def test_graphs_without_ep_operators_are_not_changed():
    """Positions are recorded only where ep operators are."""
    seen = []

    def look(graph):
        seen.append([node for node in graph.nodes if "ep_position" in node.meta])

    options = {"post_grad_custom_post_pass": look}
    with torch._inductor.config.patch(fx_graph_cache=False), toy.communicator() as comm, torch.no_grad():
        for run in (lambda x, ids: comm.dispatch(x, ids).x.sum(), lambda x, ids: x + 1):
            torch._dynamo.reset()
            torch.compile(run, fullgraph=True, options=options)(*toy.inputs(3)[:2])
    assert [len(nodes) for nodes in seen] == [1, 0]
