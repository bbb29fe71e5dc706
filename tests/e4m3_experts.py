"""Weights of SwiGLU experts in e4m3 as checkpoints have them, and what their results must be."""

from __future__ import annotations

import torch
from segments import Drawn
from torch import Tensor


def weights_of(experts: int, hidden: int, width: int, seed: int, *, powers: bool = False) -> tuple[Tensor, ...]:
    """Return w_in, in_scales, w_out, out_scales on the CPU. `powers`: scales are powers of two in bytes."""
    draw = torch.Generator().manual_seed(seed)
    made: list[Tensor] = []
    for rows, columns in ((2 * width, hidden), (hidden, width)):
        numbers = (torch.randn(experts, rows, columns, generator=draw) * 100).clamp(-448, 448)
        codes = numbers.to(torch.float8_e4m3fn)  # which makes NaN of larger numbers before PyTorch 2.13
        scales = (torch.rand(experts, rows // 128, columns // 128, generator=draw) + 0.5) * columns**-0.5 / 100
        made += [codes, scales.log2().round().exp2().to(torch.float8_e8m0fnu) if powers else scales]
    return tuple(made)


def exact(codes: Tensor, scales: Tensor) -> Tensor:
    """Return codes times the scales of their blocks, in fp64: of weights, or of rows."""
    wide = scales.float().double().repeat_interleave(128, -1)
    if wide.shape[-2] != codes.shape[-2]:
        wide = wide.repeat_interleave(128, -2)
    return codes.double() * wide


def bound_of(inner: Tensor) -> Tensor:
    """Return the bound on the error of numbers [..., F] between the GEMMs."""
    scale = inner.unflatten(-1, (-1, 128)).abs().amax(-1).clamp(min=1e-4).repeat_interleave(128, -1) / 448
    return 0.07 * inner.abs() + scale / 1024 + inner.abs() * 2**-20


def assert_right(
    got: Tensor, x: Tensor, scales: Tensor, weights: tuple[Tensor, ...], of: Drawn, alignment: int
) -> None:
    """Compare kept rows with fp64, within the bound that `few_rows_mlp_e4m3` states. All tensors are on the CPU."""
    w_in, w_out = exact(*weights[:2]), exact(*weights[2:])
    rows = exact(x, scales)
    seen = 0
    for e, (end, count) in enumerate(zip(of.offs, of.counts, strict=True)):
        if count == 0:
            continue
        begin = end - -(-count // alignment) * alignment
        gate, up = (rows[begin : begin + count] @ w_in[e].T).chunk(2, 1)
        inner = gate / (1 + (-gate).exp()) * up
        want = inner @ w_out[e].T
        bound = bound_of(inner) @ w_out[e].T.abs() + want.abs() * 2**-8
        error = (got[begin : begin + count].double() - want).abs()
        assert (error <= bound).all(), f"expert {e}: off by {float((error / bound).max()):.2f} of the bound"
        assert error.norm() <= 0.05 * want.norm()
        seen += count
    assert got.dtype == torch.bfloat16 and seen == len(of.kept) > 0


def assert_layer(
    got: Tensor, x: Tensor, scales: Tensor, ids: Tensor, weights: Tensor, experts: tuple[Tensor, ...]
) -> None:
    """Compare weighted sums of experts for quantized tokens with fp64: each output is within the bound that
    `few_rows_mlp_e4m3` states, and the sum is rounded. ``experts``: of all ranks. All tensors are on the CPU."""
    w_in, w_out = exact(*experts[:2]), exact(*experts[2:])
    rows, want, bound = exact(x, scales), torch.zeros(got.shape).double(), torch.zeros(got.shape).double()
    for k in range(ids.shape[1]):
        for t, e in enumerate(ids[:, k].tolist()):
            gate, up = (w_in[e] @ rows[t]).chunk(2)
            inner = gate / (1 + (-gate).exp()) * up
            y, weight = w_out[e] @ inner, weights[t, k].double()
            want[t] += weight * y
            bound[t] += weight * (w_out[e].abs() @ bound_of(inner) + y.abs() * 2**-8)
    error = (got.double() - want).abs()
    # The sum is rounded to bfloat16 once for each rank of its experts, and once more.
    bound += 3 * 2**-8 * (want.abs() + bound)
    assert (error <= bound).all(), f"off by {float((error / bound).max()):.2f} of the bound"
    assert error.norm() <= 0.05 * want.norm() and want.norm() > 0
