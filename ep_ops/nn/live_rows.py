"""SwiGLU between two grouped GEMMs, computed for the rows of segments only.

    got = comm.dispatch(x, experts, weights)                        # room for the worst case, several times the mean

    y = grouped_mm(got.x, w_in, got.route.offs)                     # [R, 2F]
    y = swiglu_rows(y, got.route)                                   # [R, F]
    out = comm.combine(grouped_mm(y, w_out, got.route.offs), got.route, got.weights)

Like grouped GEMMs, these functions read the ends of the segments on the device, so rows after them cost no time.
Padding rows become zero, in the result and in the gradient, whatever they contain. Rows outside of segments are not
read, and are undefined in result and gradient.

On GPUs that run the ``cute`` backend they are kernels, for rows of bfloat16, float16 and float32 whose F numbers are a
multiple of 16 bytes. Otherwise PyTorch computes all R rows and writes NaN where the result is undefined. A kernel is
compiled by the first call that needs it, which must precede the capture of a CUDA graph.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ep_ops import formats
from ep_ops.formats import Grid, ScaleLayout, Segments
from ep_ops.group.topology import lack_of_kernels
from ep_ops.operators.eager import reject_transforms
from ep_ops.operators.gradients import free_gradient
from ep_ops.operators.library import define, differentiate
from ep_ops.records import Route, check_types

BLOCKWISE = ("e4m3/128/pow2", "e4m3/128/fp32", "e4m3/32/mx")
LAYOUTS = ("rows", "columns", "packed")


def swiglu_rows(gate_and_up: Tensor, route: Route) -> Tensor:
    """Return silu of the first half of each row times the second half. Differentiable.

    Computed in fp32 (fp64 for float64 rows) and rounded once. Under ``torch.compile`` it is one operator,
    ``torch.ops.ep.swiglu``.

    Args:
        gate_and_up: [R, 2F], rows along ``route``.
        route: of grouped or padded rows, with R = ``route.num_rows``.

    Returns:
        [R, F] in the same dtype.

    Raises:
        ValueError: the route is token-major, or the shape is wrong.
        TypeError: ``gate_and_up`` is not a tensor, or its dtype is not bfloat16, float16, float32 or float64; ``route``
            is not a Route.
    """
    return SWIGLU(*_checked(gate_and_up, route))


def swiglu_quantized(
    gate_and_up: Tensor, route: Route, format: str = "e4m3/128/pow2", scales_as: str = ""
) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`swiglu_rows`, quantized as docs/formats.md defines, in one pass.

    The gradient is straight-through: that of the codes has the dtype of ``gate_and_up``.

    Args:
        gate_and_up, route: as for :func:`swiglu_rows`, but not float64.
        format: "e4m3/128/pow2", "e4m3/128/fp32" or "e4m3/32/mx".
        scales_as: layout of the scales, "rows", "columns" or "packed". Empty: the first of the format.

    Returns:
        Codes, float8_e4m3fn [R, F], and their scales in the same form as ``Dispatched.scales``. Both are 0 in padding.

    Raises:
        ValueError: another format or layout, or an F that is not a multiple of the block; others as for
            :func:`swiglu_rows`.
        TypeError: as for :func:`swiglu_rows`, and for float64.
    """
    rows = _checked(gate_and_up, route)
    form, layout = _format(format, scales_as)
    formats.reject_hidden(gate_and_up.shape[1] // 2, form, "F (half the columns of gate_and_up)")
    if gate_and_up.dtype == torch.float64:
        raise TypeError("gate_and_up has dtype torch.float64; allowed for quantization: bfloat16, float16, float32")
    codes, scales = _SWIGLU_QUANTIZED(*rows, format, layout)
    grid = Grid(codes.shape[0], route.slots, route.offs.shape[0], codes.shape[1])
    return codes, formats.view(scales, layout, grid)


_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_lack = functools.cache(lack_of_kernels)


def _checked(x: Tensor, route: Route) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Return the arguments that the operators begin with."""
    check_types(Tensor, gate_and_up=x)
    check_types(Route, route=route)
    reject_transforms("ep::swiglu", (x,))
    segments = route.segments
    if x.dtype not in _DTYPES:
        raise TypeError(f"gate_and_up has dtype {x.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
    if x.dim() != 2 or x.shape[1] % 2 or x.shape[0] != route.num_rows:
        raise ValueError(
            f"gate_and_up has shape {tuple(x.shape)}; allowed: [{route.num_rows}, 2F], the rows of the route"
        )
    return x, *segments, route.slots


def _format(name: str, scales_as: str) -> tuple[formats.Format, str]:
    if name not in BLOCKWISE:
        raise ValueError(f"format is {name!r}; allowed: {', '.join(map(repr, BLOCKWISE))}")
    form = formats.format_of(name)
    layout = formats.layout_of(form, scales_as)
    if layout not in LAYOUTS:
        raise ValueError(f"scales_as is {scales_as!r}; allowed here: {', '.join(map(repr, LAYOUTS))}")
    return form, layout


# The operators take gates and ups x [R, 2F], and offs, counts, alignment and slots, which determine the rows.


_ROWS = "Tensor offs, Tensor counts, int alignment, SymInt slots"


def kernels_of(x: Tensor, hidden: int) -> Any:
    """Return the module that launches kernels for rows of x, or None if plain PyTorch runs."""
    kernels = kernels_on(x.device)
    return kernels if kernels is not None and kernels.takes(x, hidden) else None


def kernels_on(device: torch.device) -> Any:
    """Return the module that launches kernels on a device, or None if plain PyTorch runs."""
    if device.type != "cuda" or _lack(device) is not None:
        return None
    from ep_ops.backends.cute import local_kernels

    return local_kernels


def _kernel(x: Tensor, hidden: int, *rest: Any) -> Any:
    from cute_kernels.local.swiglu import SwiGLURows
    from ep_ops.backends.cute.sizing import DTYPES

    return SwiGLURows(hidden, DTYPES[x.dtype], *rest)


def _fake_swiglu(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def _swiglu(x: Tensor, *along: Any) -> Tensor:
    *of, slots = along
    segments, hidden = Segments(*of), x.shape[1] // 2
    kernels = kernels_of(x, hidden)
    if kernels is None:
        kept, live = _covered(x, segments)
        gate, up = _wide(x, kept).chunk(2, 1)
        return torch.where(live, (torch.nn.functional.silu(gate) * up).to(x.dtype), torch.nan)
    out = _fake_swiglu(x)
    kernels.swiglu(_kernel(x, hidden), kernels.readable(x), out, segments, slots)
    return out


def _fake_backward(grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _backward(grad: Tensor, x: Tensor, *along: Any) -> Tensor:
    """Return the gradient. With s = sigmoid(gate): grad * up * s * (1 + gate * (1 - s)), and grad * gate * s."""
    *of, slots = along
    segments, hidden = Segments(*of), grad.shape[1]
    kernels = kernels_of(x, hidden)
    if kernels is None:
        kept, live = _covered(x, segments)
        (gate, up), own = _wide(x, kept).chunk(2, 1), _wide(grad, kept)
        share = torch.sigmoid(gate)
        both = torch.cat([own * up * share * (1 + gate * (1 - share)), own * (gate * share)], 1)
        return torch.where(live, both.to(x.dtype), torch.nan)
    out = _fake_backward(grad, x)
    given, own = kernels.readable(x), kernels.readable(grad)
    kernels.swiglu(_kernel(x, hidden, True), given, out, segments, slots, grad=own)
    return out


def _fake_weighted(grad: Tensor, x: Tensor, weights: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), grad.new_empty(grad.shape), weights.new_empty(weights.shape)


def _weighted_backward(
    grad: Tensor, x: Tensor, weights: Tensor, offs: Tensor, counts: Tensor, alignment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of weight * SwiGLU(x) and its value. ``grad`` is the gradient of the weighted result.

    Results: the gradient of x [R, 2F], the weighted result [R, F], and the gradient of the weights [R], which is the
    dot product of ``grad`` and SwiGLU(x) in fp32 (fp64 for float64 rows).
    """
    segments, hidden = Segments(offs, counts, alignment), grad.shape[1]
    kernels = kernels_of(x, hidden)
    made = _fake_weighted(grad, x, weights)
    if kernels is None:
        kept, live = _covered(x, segments)
        (gate, up), own = _wide(x, kept).chunk(2, 1), _wide(grad, kept)
        share, by = torch.sigmoid(gate), torch.where(kept[:, 0], weights, 0).to(own.dtype)[:, None]
        out = gate * share * up
        dots = (own * out).sum(1)
        own = own * by
        both = torch.cat([own * up * share * (1 + gate * (1 - share)), own * (gate * share)], 1)
        for result, values in zip(made, (both, out * by), strict=False):
            result.copy_(torch.where(live, values.to(x.dtype), torch.nan))
        made[2].copy_(torch.where(live[:, 0], dots, torch.nan))
        return made
    kernels.swiglu_weighted(
        _kernel(x, hidden, True, "", "", True), *map(kernels.readable, (x, grad, weights)), made, segments
    )
    return made


def _fake_quantized(
    x: Tensor, offs: Tensor, counts: Tensor, alignment: int, slots: int, format: str, layout: str
) -> tuple[Tensor, Tensor]:
    hidden = x.shape[1] // 2
    grid = Grid(x.shape[0], slots, offs.shape[0], hidden)
    shape, dtype = formats.scales_shape(formats.format_of(format), layout, grid)
    return x.new_empty(x.shape[0], hidden, dtype=torch.float8_e4m3fn), x.new_empty(shape, dtype=dtype)


def _quantized(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *along, slots, format, layout = arguments
    segments, hidden = Segments(*along), x.shape[1] // 2
    kernels = kernels_of(x, hidden)
    if kernels is None:
        form = formats.format_of(format)
        codes, scales = formats.quantize(_swiglu(x, *segments, slots), form)
        kept, live = _covered(x, segments)
        codes = torch.where(live & ~kept, 0, codes.view(torch.uint8)).view(codes.dtype)
        as_bytes = scales.dtype == torch.float8_e8m0fnu
        own, unused = (scales.view(torch.uint8), 255) if as_bytes else (scales, torch.nan)
        scales = torch.where(kept, own, torch.where(live, 0, unused).to(own.dtype)).view(scales.dtype)
        grid = Grid(x.shape[0], slots, segments.offs.shape[0], hidden)
        return codes, ScaleLayout(form, layout, grid, segments).pack(scales, True, torch.nan)
    codes, scales = _fake_quantized(x, *arguments)
    kernel = _kernel(x, hidden, False, format, layout)
    kernels.swiglu(kernel, kernels.readable(x), codes, segments, slots, scales=scales)
    return codes, scales


def _covered(x: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Return which rows are kept, and which are in segments, bool [R, 1] each."""
    return segments.covered(x.shape[0], False)[:, None], segments.covered(x.shape[0], True)[:, None]


def _wide(x: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept, x, 0).to(formats.exact_dtype(x.dtype))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, offs, counts, alignment, slots, *_ = inputs
    ctx.save_for_backward(x, offs, counts)
    ctx.sizes, ctx.others = (alignment, slots), len(inputs) - 1
    ctx.set_materialize_grads(False)
    if isinstance(output, tuple):
        codes, scales = output
        ctx.mark_non_differentiable(scales)
        free_gradient(ctx, output, codes, [scales])


def _gradient(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    own = None
    if grad is not None and ctx.needs_input_grad[0]:
        x, offs, counts = ctx.saved_tensors
        own = SWIGLU_BACKWARD(grad.to(x.dtype), x, offs, counts, *ctx.sizes)
    return (own, *(None for _ in range(ctx.others)))


SWIGLU = define(f"swiglu(Tensor x, {_ROWS}) -> Tensor out", _swiglu, _fake_swiglu)
SWIGLU_BACKWARD = define(f"swiglu_backward(Tensor grad, Tensor x, {_ROWS}) -> Tensor grad_x", _backward, _fake_backward)
SWIGLU_WEIGHTED_BACKWARD = define(
    "swiglu_weighted_backward(Tensor grad, Tensor x, Tensor weights, Tensor offs, Tensor counts, int alignment)"
    " -> (Tensor grad_x, Tensor out, Tensor grad_weights)", _weighted_backward, _fake_weighted,
)  # fmt: skip
_SWIGLU_QUANTIZED = define(
    f"swiglu_quantized(Tensor x, {_ROWS}, str format, str layout) -> (Tensor codes, Tensor scales)", _quantized,
    _fake_quantized,
)  # fmt: skip
differentiate(SWIGLU, _gradient, _save)
differentiate(_SWIGLU_QUANTIZED, _gradient, _save)
