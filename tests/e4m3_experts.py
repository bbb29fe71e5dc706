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
        scale = inner.view(count, -1, 128).abs().amax(2).clamp(min=1e-4).repeat_interleave(128, 1) / 448
        bound = (0.07 * inner.abs() + scale / 1024 + inner.abs() * 2**-20) @ w_out[e].T.abs() + want.abs() * 2**-8
        error = (got[begin : begin + count].double() - want).abs()
        assert (error <= bound).all(), f"expert {e}: off by {float((error / bound).max()):.2f} of the bound"
        assert error.norm() <= 0.05 * want.norm()
        seen += count
    assert got.dtype == torch.bfloat16 and seen == len(of.kept) > 0
