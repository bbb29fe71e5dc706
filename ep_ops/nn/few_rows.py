"""SwiGLU experts with few rows each, as in decode steps, whose time is that of reading the weights.

    got = comm.dispatch(x, experts, weights, max_tokens=8, zeros=False)
    y = few_rows_mlp(got.x, w_in, w_out, got.route, comm.world_size)
    out = comm.combine(y, got.route, got.weights)

A forward consists of two kernels: gate, up and SwiGLU, then down. Each reads the weights of the experts that have rows
once, and only kept rows. The bits of a row depend neither on the other rows, nor on the sizes of the call, nor on the
order of the weights in memory: every sum runs over ascending K in fp32.

On GPUs that run the ``cute`` backend these are kernels, for bfloat16 and float16 and sizes that are multiples of 8.
Otherwise PyTorch computes the same sums, slowly. A kernel is compiled by the first call that needs it, which must
precede the capture of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ep_ops import formats
from ep_ops.formats import Segments
from ep_ops.inputs import autocasts
from ep_ops.nn.grouped import grouped_mm, weights_gradient
from ep_ops.nn.live_rows import SWIGLU, SWIGLU_BACKWARD, kernels_on
from ep_ops.operators.library import define, differentiate
from ep_ops.records import Route, check_types

DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes that kernels accept."""


def few_rows_mlp(x: Tensor, w_in: Tensor, w_out: Tensor, route: Route, ranks: int) -> Tensor:
    """Return the outputs of SwiGLU experts for the rows of a route. Differentiable.

    Under ``torch.compile`` it is one operator, ``torch.ops.ep.few_rows_mlp``. Its gradient is computed by the ordinary
    GEMMs (:func:`grouped_mm`), which compute gate and up again.

    Args:
        x: rows [R, H] along ``route``, bfloat16 or float16.
        w_in: gate and up matrices, [El, H, 2F], contiguous or the transpose of contiguous ones. Under
            ``torch.autocast`` weights are cast to the dtype of x.
        w_out: down matrices, [El, F, H], likewise.
        route: of grouped or padded rows. Its ``max_tokens`` and top_k select tiles, which affects the speed only.
        ranks: number of ranks that send rows, at least 1; it affects the speed only, too.

    Returns:
        [R, H]. Rows that are not kept, padding included, are undefined.

    Raises:
        TypeError: an argument is not a tensor or not a Route, or a dtype is not supported.
        ValueError: the route is token-major, ``ranks`` is less than 1, or a shape is wrong.
    """
    check_types(Tensor, x=x, w_in=w_in, w_out=w_out)
    check_types(Route, route=route)
    segments, experts = route.segments, route.offs.shape[0]
    if x.dim() != 2 or x.shape[0] != route.num_rows:
        raise ValueError(f"x has shape {tuple(x.shape)}; allowed: [{route.num_rows}, H], the rows of the route")
    if x.dtype not in DTYPES:
        raise TypeError(f"x has dtype {x.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; allowed: 1 or more, the ranks that send rows")
    hidden = x.shape[1]
    check_shapes(experts, hidden, w_in, w_out)
    if autocasts(x.device.type):
        w_in, w_out = w_in.to(x.dtype), w_out.to(x.dtype)
    for name, w in (("w_in", w_in), ("w_out", w_out)):
        if w.dtype != x.dtype:
            raise TypeError(f"{name} has dtype {w.dtype}; allowed: {x.dtype}, the dtype of x")
    return few_rows(x, w_in, w_out, segments, route.max_tokens, route.topk_idx.shape[1], ranks)


def check_shapes(experts: int, hidden: int, w_in: Tensor, w_out: Tensor) -> None:
    """Raise ValueError unless w_in is [experts, hidden, 2F] and w_out [experts, F, hidden]."""
    if w_in.dim() != 3 or w_in.shape[0] != experts or w_in.shape[1] != hidden or w_in.shape[2] % 2:
        raise ValueError(f"w_in has shape {tuple(w_in.shape)}; allowed: [{experts}, {hidden}, 2F]")
    if w_out.shape != (experts, w_in.shape[2] // 2, hidden):
        allowed = f"[{experts}, {w_in.shape[2] // 2}, {hidden}], after w_in"
        raise ValueError(f"w_out has shape {tuple(w_out.shape)}; allowed: {allowed}")


def few_rows(
    x: Tensor, w_in: Tensor, w_out: Tensor, segments: Segments, max_tokens: int, top_k: int, ranks: int
) -> Tensor:
    """Return the outputs of SwiGLU experts for the rows of segments, as :func:`few_rows_mlp` does for those of a
    route."""
    return _FEW_ROWS_MLP(x, w_in, w_out, *segments, max_tokens, top_k, ranks)  # type: ignore[no-any-return]


# The operator takes rows, weights, offs, counts, alignment, the bound on the tokens of a rank, top_k, and the number of
# ranks. The last three only select tiles and the number of blocks.


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _mlp(x: Tensor, w_in: Tensor, w_out: Tensor, offs: Tensor, counts: Tensor, alignment: int, *share: int) -> Tensor:
    kernels, segments = kernels_on(x.device), Segments(offs, counts, alignment)
    if kernels is None or x.dtype not in DTYPES or x.shape[1] % 8 or w_out.shape[1] % 8:
        return plain(
            _fake(x), segments, lambda rows, e: _sums(x[rows], w_in[e]), lambda inner, e: _sums(inner, w_out[e])
        )
    out = _fake(x)
    kernels.few_rows(kernels.readable(x), w_in, w_out, out, segments, kernels.Share(*share))
    return out


def plain(
    out: Tensor, segments: Segments, first: Callable[[slice, int], Tensor], second: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Write the results in plain PyTorch into ``out`` and return it, with undefined rows NaN. It reads the segments on
    the host.

    Args:
        first: returns gates and ups of rows of an expert.
        second: returns the outputs of these, from SwiGLU of them and the expert.
    """
    out.fill_(torch.nan)
    ends, counts, sizes = (values.tolist() for values in (segments.offs, segments.counts, segments.sizes))
    for e, (end, count, size) in enumerate(zip(ends, counts, sizes, strict=True)):
        if count:
            rows = slice(end - size, end - size + count)
            # Wide, because vectorized functions may round differently at the end of a tensor.
            gate, up = first(rows, e).double().chunk(2, 1)
            out[rows] = second((gate * torch.sigmoid(gate) * up).to(out.dtype), e).to(out.dtype)
    return out


def _sums(x: Tensor, w: Tensor) -> Tensor:
    """Return x @ w, each number summed in fp32 over ascending K, whatever the number of rows."""
    wide = formats.exact_dtype(x.dtype)
    x, w = x.to(wide), w.to(wide)
    sums = x.new_zeros(x.shape[0], w.shape[1])
    for k in range(x.shape[1]):
        sums.addcmul_(x[:, k : k + 1], w[k])
    return sums


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, alignment, _, _, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.alignment = alignment


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w_in, w_out, offs, counts = ctx.saved_tensors
    asks_x, asks_in, asks_out, *_ = ctx.needs_input_grad
    grad = grad.contiguous()
    inner = grouped_mm(x, w_in, offs)
    of_x = of_in = of_out = None
    if asks_x or asks_in:
        of_h = grouped_mm(grad, w_out.transpose(1, 2), offs)
        of_inner = SWIGLU_BACKWARD(of_h, inner, offs, counts, ctx.alignment, 0)
        of_x = grouped_mm(of_inner, w_in.transpose(1, 2), offs) if asks_x else None
        of_in = weights_gradient(x, of_inner, offs) if asks_in else None
    if asks_out:
        of_out = weights_gradient(SWIGLU(inner, offs, counts, ctx.alignment, 0), grad, offs)
    return of_x, of_in, of_out, *(None for _ in range(6))


# With the strides of the trace: transposed weights are not copied.
_FEW_ROWS_MLP = define(
    "few_rows_mlp(Tensor x, Tensor w_in, Tensor w_out, Tensor offs, Tensor counts, int alignment, "
    "SymInt tokens, SymInt top_k, int ranks) -> Tensor y", _mlp, _fake, (torch.Tag.needs_exact_strides,),
)  # fmt: skip
differentiate(_FEW_ROWS_MLP, _gradient, _save)
