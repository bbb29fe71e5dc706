"""Compiled regions (``nested_compile_region``) and frozen constants run the operators of the program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ep_ops

IDS = torch.arange(2, dtype=torch.int32)


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    torch._dynamo.reset()
    sizes: dict[str, Any] = dict(num_experts=4, hidden_size=16, top_k=2, max_tokens_per_rank=16, dtype=torch.float32)
    with ep_ops.Communicator(**sizes, device="cpu") as made:
        yield made


def calls_of(comm: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each operator of the communicator adds its name when it runs."""
    ran: list[str] = []
    waits: Any = comm.backend._waits
    begin = waits.begin
    monkeypatch.setattr(waits, "begin", lambda call: (ran.append(call), begin(call))[1])
    return ran


def block_of(comm: Any) -> Any:
    def block(x: Tensor) -> Tensor:
        sent = comm.dispatch(x, IDS.expand(x.shape[0], 2).contiguous())
        return comm.combine(sent.x.sin(), sent.route)

    return block


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.drawn)])
def test_a_region_that_is_called_twice(comm: Any, backend: str) -> None:
    region = torch.compiler.nested_compile_region(block_of(comm))
    x = torch.randn(5, 16, requires_grad=True)
    out = torch.compile(lambda x: region(region(x)) + region(x), fullgraph=True, backend=backend)(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    y = x.detach().requires_grad_()
    right = 2 * (2 * y.sin()).sin() + 2 * y.sin()
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(grad, torch.autograd.grad(right.square().sum(), y)[0])


def test_a_region_whose_results_are_not_used(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    block, ran = block_of(comm), calls_of(comm, monkeypatch)
    region = torch.compiler.nested_compile_region(block)

    def unused(x: Tensor) -> Tensor:
        region(x * 2)
        return region(x)

    def branch(x: Tensor) -> Tensor:
        torch.cond(x.sum() > 1e9, torch.sin, block, (x,))
        return block(x)

    x = torch.randn(5, 16)
    with torch.no_grad():
        for f in (unused, branch):
            got = torch.compile(f, fullgraph=True)(x)
            assert ran == ["ep::dispatch", "ep::combine"] * 2
            torch.testing.assert_close(got, 2 * x.sin())
            ran.clear()


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.drawn)])
def test_a_region_of_a_training_graph_whose_results_are_not_used(
    comm: Any, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    block, ran = block_of(comm), calls_of(comm, monkeypatch)

    def before(run: Any, x: Tensor) -> Tensor:
        run(x.detach())
        run(x * 2)
        return run(x)

    def after(run: Any, x: Tensor) -> Tensor:
        out = run(x)
        run(out)
        return out

    x = torch.randn(5, 16, requires_grad=True)
    for f in (before, after):
        found = []
        for run in (block, torch.compiler.nested_compile_region(block)):
            compiled = f if run is block else torch.compile(f, fullgraph=True, backend=backend)
            out = compiled(run, x)
            grad = torch.autograd.grad(out.square().sum(), x)[0]
            found.append((out, grad, tuple(ran)))
            ran.clear()
        (out, grad, operators), (right, right_grad, eager) = found[1], found[0]
        assert operators == eager
        torch.testing.assert_close((out, grad), (right, right_grad))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.drawn)])
@pytest.mark.parametrize("of_region", [False, True])
def test_batched_gradients_of_a_graph(comm: Any, of_region: bool, backend: str) -> None:
    block = block_of(comm)
    f = torch.compiler.nested_compile_region(block) if of_region else block
    compiled = torch.compile(lambda x: f(x), fullgraph=True, backend=backend)
    x, several = torch.randn(5, 16, requires_grad=True), torch.randn(3, 5, 16)
    out = compiled(x)
    with pytest.raises(NotImplementedError, match="batched gradients .*; allowed: one backward"):
        torch.autograd.grad(out, x, several, is_grads_batched=True, retain_graph=True)
    for one in several:
        torch.testing.assert_close(torch.autograd.grad(out, x, one, retain_graph=True)[0], 2 * x.cos() * one)


class Constants(nn.Module):
    """A plan of constant ids, and a dispatch of constant rows."""

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self.comm = comm
        self.register_buffer("ids", IDS.expand(5, 2).contiguous())
        self.rows = nn.Parameter(torch.randn(5, 16))

    def forward(self, x: Tensor) -> Tensor:
        route, _ = self.comm.plan(self.ids)
        sent = self.comm.dispatch_planned(x, route)
        table = self.comm.dispatch(self.rows, self.ids)
        return self.comm.combine(sent.x, route) + self.comm.combine(table.x, table.route)


def test_freezing(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, ran, x = Constants(comm).eval(), calls_of(comm, monkeypatch), torch.randn(5, 16)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        compiled = torch.compile(module, fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), 2 * x + 2 * module.rows)
            assert ran == ["ep::plan", "ep::dispatch_planned", "ep::dispatch", "ep::combine", "ep::combine"]
            ran.clear()
