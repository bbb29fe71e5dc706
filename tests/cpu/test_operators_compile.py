"""torch.compile and torch.export: one graph, few compilations, and the same numbers as eager."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import toy
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend


@pytest.fixture
def comm():
    torch._dynamo.reset()
    with toy.communicator() as comm:
        yield comm


def exact_size_layer(comm, x, topk_idx, weights, scale):
    rows = comm.dispatch(x, topk_idx, weights, exact=True)
    return comm.combine(toy.experts(rows, scale), rows.route, rows.weights)


def padded_layer(comm, x, topk_idx, weights, scale):
    """[El, slots, H], as grouped GEMMs with masks take it."""
    rows = comm.dispatch(x, topk_idx, weights, layout="padded", slots=12)
    grouped = rows.x.view(comm.num_local_experts, 12, toy.HIDDEN)
    begin = torch.arange(comm.num_local_experts) * 12
    used = (torch.arange(12) < (rows.route.offs - begin)[:, None])[..., None]
    y = torch.where(used, torch.tanh(torch.where(used, grouped, 0)) * scale[:, None], 0)
    return comm.combine(y.view_as(rows.x), rows.route, rows.weights)


def planned_layer(comm, x, topk_idx, weights, scale):
    """Without weights, along a route that was planned before; x is not contiguous when it comes."""
    route, _ = comm.plan(topk_idx)
    rows = comm.dispatch_planned((x.t() + 1).contiguous().t().contiguous(), route).x
    return comm.combine(torch.tanh(rows), route) * weights.sum() + scale.sum()


def residual_layer(comm, x, topk_idx, weights, scale):
    rows = comm.dispatch(x, topk_idx, weights)
    return comm.combine(toy.experts(rows, scale), rows.route, rows.weights, residual=torch.cos(x))


LAYERS = {
    "residual": residual_layer,
    "flat": toy.layer,
    "padded": padded_layer,
    "exact size": exact_size_layer,
    "planned": planned_layer,
}


def step(layer, comm, tokens, seed=0):
    args = [*toy.inputs(tokens, seed=seed, grad=True), toy.scales(grad=True)]
    out = layer(comm, *args)
    out.sin().sum().backward()
    return [out.detach(), *(arg.grad for arg in args)]


@pytest.mark.parametrize(("layer", "backend"), [
    *((layer, backend) for layer in LAYERS for backend in ("eager", "aot_eager")),
    *(pytest.param(layer, "inductor", marks=pytest.mark.drawn) for layer in LAYERS),
])  # fmt: skip
def test_same_numbers_as_eager(comm, layer, backend):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(LAYERS[layer], backend=backend, fullgraph=True)
        torch.testing.assert_close(step(compiled, comm, 5), step(LAYERS[layer], comm, 5))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.drawn)])
def test_one_compilation_for_all_numbers_of_tokens(comm, backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(toy.layer, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (5, 16, 3, 11, 2):
        torch.testing.assert_close(step(compiled, comm, tokens), step(toy.layer, comm, tokens))
    assert counter.frame_count == 1
    for tokens in (1, 0):  # which PyTorch always compiles for by themselves
        torch.testing.assert_close(step(compiled, comm, tokens), step(toy.layer, comm, tokens))
    assert counter.frame_count == 3


def test_sizes_of_the_receive_buffer_are_dynamic(comm):
    """Capacity, bound on tokens and slots may follow the number of tokens without compiling again."""
    counter = CompileCounterWithBackend("aot_eager")

    def layer(x, topk_idx, weights):
        tokens = x.shape[0]
        flat = comm.dispatch(x, topk_idx, weights, capacity=8 * tokens, max_tokens=tokens)
        grouped = comm.dispatch(x, topk_idx, weights, layout="padded", slots=4 * tokens, max_tokens=tokens)
        assert flat.x.shape[0] == 8 * tokens and grouped.x.shape[0] == comm.num_local_experts * 4 * tokens
        return comm.combine(flat.x, flat.route) + comm.combine(grouped.x, grouped.route)

    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (4, 7, 12):
        args = toy.inputs(tokens)
        torch.testing.assert_close(compiled(*args), layer(*args))
    assert counter.frame_count == 1


def test_what_runs_is_opaque_to_dynamo(comm):
    """A function that breaks its graph calls the operators eagerly; their Python must not be compiled then."""
    counter = CompileCounter()

    @torch._dynamo.disable(recursive=False)
    def breaks(x, topk_idx, weights):
        rows = torch.ops.ep.dispatch(x, weights, topk_idx, 44, 4, 0, 16, comm.num_local_experts, 1, comm.name)
        rows[0][:1].sum().backward()
        return rows[0]

    def outer(x, topk_idx, weights):
        return breaks(x * 2, topk_idx, weights) * 2

    torch.compile(outer, backend=counter)(*toy.inputs(4, grad=True))
    assert counter.frame_count == 2  # before and after the call


@pytest.mark.parametrize("strict", [False, True])
def test_export(comm, strict):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(toy.scales())

        def forward(self, x, topk_idx, weights):
            return toy.layer(comm, x, topk_idx, weights, self.scale)

    tokens = {0: torch.export.Dim("tokens", min=2, max=16)}
    model = Layer()
    program = torch.export.export(model, tuple(toy.inputs(5)), dynamic_shapes=(tokens,) * 3, strict=strict)
    names = [node.target for node in program.graph.nodes if getattr(node.target, "namespace", None) == "ep"]
    assert names == [torch.ops.ep.dispatch.default, torch.ops.ep.combine.default]
    for count in (5, 9):
        args = toy.inputs(count, seed=count)
        torch.testing.assert_close(program.module()(*args), model(*args))


def test_export_round_trip(comm, tmp_path):
    class Layer(torch.nn.Module):
        def forward(self, x, topk_idx, weights, scale):
            return toy.layer(comm, x, topk_idx, weights, scale)

    torch.export.save(torch.export.export(Layer(), (*toy.inputs(5), toy.scales())), tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2")
    args = (*toy.inputs(5, seed=1), toy.scales())
    torch.testing.assert_close(loaded.module()(*args), toy.layer(comm, *args))


def test_inputs_are_made_contiguous(comm):
    """Inductor may lay out what it computes as it likes, but not what it hands to an operator."""

    def layer(x, topk_idx, weights):
        rows = comm.dispatch(x.relu(), topk_idx, weights)
        return comm.combine(rows.x, rows.route, rows.weights)

    x, topk_idx, weights = toy.inputs(6)
    transposed = x.t().contiguous().t()
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(transposed, topk_idx, weights), layer(x, topk_idx, weights))
