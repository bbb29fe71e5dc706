"""Gradients: finite differences, a dense model, and that what is sent back never depends on what happens to arrive."""

from __future__ import annotations

import functools

import cases
import pytest
import torch
import toy
from ranks import run_ranks
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from ep_ops.operators.gradients import COMBINE_BACKWARD, DISPATCH_BACKWARD, DISPATCH_PLANNED


@pytest.fixture(scope="module")
def exact():
    with toy.communicator(dtype=torch.float64) as comm:
        yield comm


def _through_rows(comm, rows, scale):
    return comm.combine(toy.experts(rows, scale), rows.route, rows.weights)


WAYS = {
    "flat": lambda comm, x, idx, w, scale: _through_rows(comm, comm.dispatch(x, idx, w), scale),
    "unweighted": lambda comm, x, idx, w, scale: toy.layer(comm, x, idx, None, scale) * w.sum(),
    "drops": lambda comm, x, idx, w, scale: _through_rows(comm, comm.dispatch(x, idx, w, capacity=8), scale),
    "dynamic": lambda comm, x, idx, w, scale: _through_rows(comm, comm.dispatch(x, idx, w, exact=True), scale),
}


@pytest.mark.parametrize("way", WAYS)
def test_finite_differences(exact, way):
    x, topk_idx, weights = toy.inputs(5, dtype=torch.float64, grad=True)
    scale = toy.scales(torch.float64, grad=True)
    assert gradcheck(lambda x, w, s: WAYS[way](exact, x, topk_idx, w, s), (x, weights, scale))


def test_finite_differences_along_a_known_route(exact):
    x, topk_idx, weights = toy.inputs(5, dtype=torch.float64, grad=True)
    route, _ = exact.plan(topk_idx, capacity=12)

    def there_and_back(x, weights):
        rows, row_weights, *_ = exact.dispatch_planned(x, route, weights)
        return exact.combine(torch.sin(rows), route, row_weights)

    assert gradcheck(there_and_back, (x, weights))


def test_finite_differences_with_slots(exact):
    x, topk_idx, weights = toy.inputs(5, dtype=torch.float64, grad=True)

    def there_and_back(x, weights):
        rows = exact.dispatch(x, topk_idx, weights, layout="padded", slots=4)
        return exact.combine(torch.sin(rows.x), rows.route, rows.weights)

    assert gradcheck(there_and_back, (x, weights))


def test_finite_differences_with_a_residual(exact):
    x, topk_idx, weights = toy.inputs(5, dtype=torch.float64, grad=True)

    def layer(x, weights, residual):
        rows = exact.dispatch(x, topk_idx, weights)
        return exact.combine(torch.sin(rows.x), rows.route, rows.weights, residual=residual)

    assert gradcheck(layer, (x, weights, toy.inputs(5, seed=1, dtype=torch.float64, grad=True)[0]))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_residual_alone_sends_nothing_back(exact, monkeypatch, weighted):
    x, topk_idx, weights = toy.inputs(5, dtype=torch.float64)
    rows = exact.dispatch(x, topk_idx, weights)
    y, residual = rows.x.nan_to_num(), x.clone().requires_grad_()
    plain = exact.combine(y, rows.route, rows.weights if weighted else None)
    out = exact.combine(y, rows.route, rows.weights if weighted else None, residual=residual)
    torch.testing.assert_close(out, plain + residual)
    for operator in (DISPATCH_PLANNED, COMBINE_BACKWARD):
        monkeypatch.setattr(operator, "call", None)
    (grad,) = torch.autograd.grad(out, residual, x)
    assert torch.equal(grad, x)


def _losses(tokens):
    """Gradients of a layer on these ranks and of the dense model, tokens[rank] tokens each."""
    rank = torch.distributed.get_rank()
    results = []
    with toy.communicator(dtype=torch.float64) as comm:
        for layer in (lambda *args: toy.layer(comm, *args), toy.dense):
            x, topk_idx, weights = toy.inputs(tokens[rank], seed=rank, dtype=torch.float64, grad=True)
            scale = toy.scales(torch.float64, grad=True)
            out = layer(x, topk_idx, weights, scale)
            (out.sin().sum() * (rank + 1)).backward()
            torch.distributed.all_reduce(scale.grad)
            results.append([out.detach(), x.grad, weights.grad, scale.grad])
    return results


@pytest.mark.parametrize("tokens", [(5,), (7, 0), (3, 16), (0, 0)])
def test_equal_to_a_dense_model(tokens):
    for sparse, dense in run_ranks(len(tokens), _losses, tokens):
        torch.testing.assert_close(sparse, dense)


@pytest.fixture
def sent_back(monkeypatch):
    """Which gradients each dispatch_backward was given: of rows, of weights."""
    given = []
    run = DISPATCH_BACKWARD.call

    def record(a):
        given.append((a.grad_recv_x is not None, a.grad_recv_weights is not None))
        return run(a)

    monkeypatch.setattr(DISPATCH_BACKWARD, "call", record)
    return given


@pytest.mark.parametrize("used", ["both", "rows", "weights"])
def test_missing_gradients_are_sent_as_zeros(exact, sent_back, used):
    """A rank whose loss does not touch an output must still send what its peers expect."""
    x, topk_idx, weights = toy.inputs(4, dtype=torch.float64, grad=True)
    rows = exact.dispatch(x, topk_idx, weights)
    covered = torch.arange(rows.x.shape[0]) < rows.route.offs[-1]
    loss = torch.zeros((), dtype=torch.float64)
    if used != "weights":
        loss = loss + rows.x[covered].sum()
    if used != "rows":
        loss = loss + rows.weights[covered].sum()
    loss.backward()
    assert sent_back == [(True, True)]
    valid = (topk_idx >= 0).double()
    torch.testing.assert_close(x.grad, valid.sum(1)[:, None].expand_as(x) * (used != "weights"))
    torch.testing.assert_close(weights.grad, valid * (used != "rows"))


@pytest.mark.parametrize("x_asks, weights_ask", [(True, False), (False, True)])
def test_only_what_is_asked_for_is_sent(exact, sent_back, x_asks, weights_ask):
    x, topk_idx, weights = toy.inputs(4, dtype=torch.float64)
    out = toy.layer(exact, x.requires_grad_(x_asks), topk_idx, weights.requires_grad_(weights_ask), toy.scales(x.dtype))
    out.sum().backward()
    assert sent_back == [(x_asks, weights_ask)]
    assert (x.grad is not None, weights.grad is not None) == (x_asks, weights_ask)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("y_asks, weights_ask", [(True, False), (False, True), (True, True)])
def test_combine_gives_every_gradient_that_is_asked_for(exact, y_asks, weights_ask, split):
    """Gradients of rows alone, of weights alone, and of both are right: each row's is its token's, times its weight or
    its values."""
    seed = cases.fresh_seed()
    x, topk_idx, weights = toy.inputs(6, seed=seed, dtype=torch.float64)
    sent = exact.dispatch(x, topk_idx, weights)
    draw = torch.Generator().manual_seed(seed)
    y = torch.randn(sent.x.shape, generator=draw, dtype=torch.float64).requires_grad_(y_asks)
    row_weights = torch.randn(y.shape[0], generator=draw, dtype=torch.float64).requires_grad_(weights_ask)
    grad_out = torch.randn(x.shape, generator=draw, dtype=torch.float64)
    if split:
        out = exact.combine_wait(exact.combine_start(y, sent.route, row_weights))
    else:
        out = exact.combine(y, sent.route, row_weights)
    out.backward(grad_out)
    assert (y.grad is not None, row_weights.grad is not None) == (y_asks, weights_ask)
    for token, rows in enumerate(sent.route.send_rows.tolist()):
        for row in rows:
            if row < 0:
                continue
            if y_asks:
                torch.testing.assert_close(y.grad[row], row_weights[row].detach() * grad_out[token])
            if weights_ask:
                torch.testing.assert_close(row_weights.grad[row], (grad_out[token] * y[row].detach()).sum())


def test_integers_and_absent_weights_have_no_gradient(exact):
    x, topk_idx, weights = toy.inputs(3, dtype=torch.float64, grad=True)
    rows = exact.dispatch(x, topk_idx, weights)
    assert rows.x.requires_grad and rows.weights.requires_grad
    assert not any(t.requires_grad for t in (*rows.route.tensors, rows.dropped))
    sizes = (44, 4, 0, 16, exact.num_local_experts, 1, exact.name)
    _, _, absent, *_ = torch.ops.ep.dispatch(x, None, topk_idx, *sizes)
    assert absent.shape == (0,) and not absent.requires_grad
    with torch.no_grad():
        assert not exact.dispatch(x, topk_idx, weights).x.requires_grad


def test_second_derivatives_are_rejected(exact):
    x, topk_idx, weights = toy.inputs(3, dtype=torch.float64, grad=True)
    (grad,) = torch.autograd.grad(
        toy.layer(exact, x, topk_idx, weights, toy.scales(x.dtype)).sum(), x, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="ep::dispatch does not support second derivatives"):
        grad.sum().backward()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("of", ["rows", "weights", "grad_out", "checkpointed"])
def test_no_second_derivative_is_left_out(exact, of, split):
    """A second derivative raises, also by torch.autograd.grad, which comes to no node from which its inputs cannot be
    reached, and where the first gradients depend on nothing but what a combine has saved."""
    x, topk_idx, weights = toy.inputs(3, dtype=torch.float64, grad=True)

    def layer(x, weights):
        rows = exact.dispatch_wait(exact.dispatch_start(x, topk_idx, weights)) if split else exact.dispatch(
            x, topk_idx, weights
        )  # fmt: skip
        given = torch.sin(rows.x), rows.route, rows.weights
        return exact.combine_wait(exact.combine_start(*given)) if split else exact.combine(*given)

    run = functools.partial(checkpoint, layer, use_reentrant=False) if of == "checkpointed" else layer
    out, start = run(x, weights), torch.ones(3, toy.HIDDEN, dtype=x.dtype, requires_grad=of == "grad_out")
    asked = {"grad_out": start, "weights": weights}.get(of, x)
    gradients = torch.autograd.grad(out, (x, weights), start, create_graph=True)
    with pytest.raises(NotImplementedError, match="does not support second derivatives"):
        torch.autograd.grad(sum(grad.square().sum() for grad in gradients) + asked.sum(), asked)
    torch.autograd.grad(layer(x, weights).sum(), x)  # nothing is left under way


def test_a_hessian_lacks_nothing(exact):
    x, topk_idx, weights = toy.inputs(3, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.functional.hessian(lambda x: exact.dispatch(x, topk_idx, weights).x[0].sin().sum(), x)
