"""Grouped GEMM on quantized rows with one scale for each row."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ep_ops import formats
from ep_ops.nn.grouped import grouped_mm
from ep_ops.operators.once import once
from ep_ops.records import check_types

ROW = "e4m3/row/fp32"
"""The format that torch's row-wise grouped GEMM takes on Hopper."""


def scaled_grouped_mm(rows: Tensor, scales: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Multiply each expert's quantized rows by its matrix: :func:`grouped_mm` for the format ``e4m3/row/fp32``.

    In forward each column of w gets a scale in the same format. On GPUs of capability 9.0 torch's row-wise scaled
    grouped GEMM multiplies the codes; elsewhere a bfloat16 GEMM multiplies the dequantized values. In backward, in
    bfloat16, the gradient of a row is straight-through, with unquantized w, and that of w uses the dequantized rows.
    On GPUs it is not tested under ``torch.compile``.

    Args:
        rows: codes, float8_e4m3fn [R, M], M a multiple of 16.
        scales: float32 [R].
        w: bfloat16 [El, M, N], N a multiple of 16.
        offs: end of each expert's rows, int32 [El].

    Returns:
        bfloat16 [R, N]. Rows after ``offs[-1]`` are undefined, in rows and in the result.

    Raises:
        TypeError: an argument is not a tensor, or has the wrong dtype.
        ValueError: an argument has the wrong shape.
    """
    check_types(Tensor, rows=rows, scales=scales, w=w, offs=offs)
    if rows.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32 or w.dtype != torch.bfloat16:
        raise TypeError(
            f"rows have {rows.dtype}, scales {scales.dtype}, w {w.dtype}; allowed: float8_e4m3fn, float32, bfloat16"
        )
    if scales.shape != rows.shape[:1] or w.shape[1] != rows.shape[1] or w.shape[1] % 16 or w.shape[2] % 16:
        raise ValueError(
            f"rows have shape {tuple(rows.shape)}, scales {tuple(scales.shape)}, w {tuple(w.shape)}; allowed: [R, M], "
            "[R], [El, M, N], M and N multiples of 16"
        )
    return _Scaled.apply(rows, scales, w, offs)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, scales: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(rows, scales, w, offs)
        form = formats.format_of(ROW)
        of_columns = w.transpose(1, 2)  # [El, N, M]
        codes, by = formats.quantize(of_columns.reshape(-1, w.shape[1]), form)
        if rows.is_cuda and torch.cuda.get_device_capability(rows.device) == (9, 0):
            codes, by = codes.view(of_columns.shape), by.view(of_columns.shape[:2])
            return torch._scaled_grouped_mm(
                rows, codes.transpose(1, 2), scales, by, offs.int(), out_dtype=torch.bfloat16
            )
        exact = formats.dequantize(codes, by, form, w.dtype).view(of_columns.shape).transpose(1, 2)
        return grouped_mm(formats.dequantize(rows, scales, form, w.dtype), exact, offs)

    @staticmethod
    @functools.partial(once, "scaled_grouped_mm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        rows, scales, w, offs = ctx.saved_tensors
        grad = grad.contiguous()
        own = grouped_mm(grad, w.transpose(1, 2), offs) if ctx.needs_input_grad[0] else None
        of_w = None
        if ctx.needs_input_grad[2]:
            exact = formats.dequantize(rows, scales, formats.format_of(ROW), w.dtype)
            of_w = torch._grouped_mm(exact.t(), grad, offs=offs)
        return own, None, of_w, None
