"""A combine whose gradient travels in a format: beside the same gradient rounded by tests/quantized.py, and within the
format's bound of the one that travels as it is."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import quantized
import torch
from ranks import run_ranks
from test_formats_model import HIDDEN, MX, POW2, TOP_K, communicator, inputs
from torch import Tensor

import ep_ops

MOST = 16  # tokens of a rank
WIRE = ("wire:e4m3/128/pow2", "wire:e4m3/128/fp32", "wire:e4m3/32/mx", "wire:e4m3/row/fp32")


def gradients(rank: int, seed: int) -> Tensor:
    """Draw gradients of a rank's sums, of all magnitudes."""
    draw = torch.Generator().manual_seed(seed + 50 + rank)
    return (
        torch.randn(9 - 2 * rank, HIDDEN, generator=draw) * torch.randn(1, HIDDEN, generator=draw).exp2()
    ).bfloat16()


def rounded(grad: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Return what arrives of a tensor, and how far that may lie from it: half of the distance of two codes, which are
    1/8 of a power of two apart, the smallest ones 2**-9; and, where scales are no powers of two, what fp32 and bfloat16
    round."""
    codes, scales = quantized.quantized(grad, format.partition("/")[2])
    each = scales.repeat_interleave(HIDDEN // scales.shape[1], 1)
    bound = torch.maximum(grad.double().abs() / 16, each / 1024)
    arrives = quantized.dequantized(codes, scales, torch.bfloat16)
    return arrives, bound if "fp32" not in format else bound * 1.001 + arrives.double().abs() / 256


def _backward(format: str, weighted: bool, slots: int, seed: int) -> list[dict[str, Any]]:
    """The gradient in the format, the same rounded before, and as it is: gradients of rows, weights and residual."""
    rank, results = torch.distributed.get_rank(), []
    grad = gradients(rank, seed)
    with communicator(max_tokens_per_rank=MOST) as comm:
        x, idx, weights = inputs(grad.shape[0], seed + rank)
        sent = comm.dispatch(x, idx, weights, **cases.room(None, slots))
        assert sent.weights is not None
        draw = torch.Generator().manual_seed(seed)
        owner = sent.route.recv_from
        y = torch.where((owner >= 0)[:, None], torch.randn(sent.x.shape, generator=draw), torch.nan).bfloat16()
        for asked, given in ((format, grad), ("", rounded(grad, format)[0]), ("", grad)):
            rows, by, residual = (t.clone().requires_grad_() for t in (y, sent.weights, x))
            out = comm.combine(rows, sent.route, by if weighted else None, residual=residual, grad_format=asked)
            out.backward(given)
            results.append({"y": rows.grad, "weights": by.grad, "residual": residual.grad})
        return [
            {"owner": owner, "rows": y, "by": sent.weights, "covered": sent.x[:, 0].isfinite(), **r} for r in results
        ]


@pytest.mark.parametrize("slots", [0, 24])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("format", WIRE)
def test_gradients_in_a_format(format: str, weighted: bool, slots: int) -> None:
    seed = cases.fresh_seed()
    grads = [gradients(rank, seed) for rank in range(2)]
    bounds = [rounded(grad, format)[1] for grad in grads]
    for rank, (got, same, exact) in enumerate(run_ranks(2, _backward, format, weighted, slots, seed)):
        assert torch.equal(got["residual"], grads[rank]), "it stays where it is"
        covered, held = got["covered"], got["owner"] >= 0
        assert torch.equal(got["y"][covered], same["y"][covered])
        asker = got["owner"][held] // TOP_K
        bound = torch.stack([bounds[int(a) // MOST][int(a) % MOST] for a in asker])
        far = (got["y"][held].double() - exact["y"][held].double()).abs()
        assert far.any(), "it travels as it is"
        if not weighted:
            assert (far <= bound).all()
            continue
        own = bound * got["by"][held].double()[:, None]
        assert (far <= own + exact["y"][held].double().abs() / 100).all()  # both products are rounded to bfloat16
        y = got["rows"][held].double().abs()
        torch.testing.assert_close(got["weights"][covered], same["weights"][covered], rtol=1e-4, atol=1e-3)
        far = (got["weights"][held].double() - exact["weights"][held].double()).abs()
        assert far.any() and (far <= (bound * y).sum(1) + 1e-3).all()
        assert not got["weights"][covered & ~held].any()


def _step(comm: ep_ops.Communicator, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
    sent = comm.dispatch(x, idx, weights)
    rows = torch.where((sent.route.recv_from >= 0)[:, None], sent.x, 0)
    return comm.combine(rows * 2, sent.route, sent.weights, grad_format=f"wire:{POW2}")


def test_compiled() -> None:
    """One graph, the same numbers as eager code."""
    torch._dynamo.reset()
    with communicator() as comm:
        x, idx, weights = inputs(7)
        grad, found = gradients(1, 0), []
        for run in (_step, torch.compile(_step, backend="aot_eager", fullgraph=True)):
            leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
            run(comm, leaves[0], idx, leaves[1]).backward(grad)
            found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*found)


def test_rejections() -> None:
    y, idx = torch.ones(32, HIDDEN).bfloat16(), torch.zeros(3, TOP_K).int()
    with communicator() as comm:
        route, _ = comm.plan(idx, capacity=32)
        for name in (POW2, "wire:e5m2", MX):
            with pytest.raises(
                ValueError, match=rf"grad_format is '{name}'; allowed: '' \(the gradient is sent unquantized\)"
            ):
                comm.combine(y, route, grad_format=name)
    with communicator(dtype=torch.float64) as comm:
        route, _ = comm.plan(idx, capacity=32)
        with pytest.raises(ValueError, match="grad_format is 'wire:e4m3/32/mx', and rows are torch.float64"):
            comm.combine(y.double(), route, grad_format=f"wire:{MX}")
    with communicator(hidden_size=48) as comm:
        route, _ = comm.plan(idx, capacity=32)
        with pytest.raises(ValueError, match="hidden_size is 48; format 'wire:e4m3/32/mx' takes multiples of 32"):
            comm.combine(y[:, :48].contiguous(), route, grad_format=f"wire:{MX}")
