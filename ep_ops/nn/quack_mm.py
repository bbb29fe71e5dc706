"""quack's grouped GEMMs, for rows that are grouped by expert, and for token-major rows that lists name.

Which tiles they use, and whether rows are gathered by the GEMM or copied before it, follows from rows of the tuning
table (ep_ops/backends/cute/tuning.py), which name the GPU, the sizes of the matrices and the mean number of rows of an
expert. Nothing is measured while a model runs, so that equal calls give equal bits:

    gemm                   rows times matrices
    gemm gated             the same, with SwiGLU in the epilogue
    gemm gated gradient    the same, with the gradient of SwiGLU in the epilogue
    gemm weights           gradients of matrices

The epilogues read and write gate and up of a column side by side, as pairs. quack reads and writes matrices
[El, H, 2F] of gates and ups in this order if they are the transpose of contiguous ones.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ep_ops.nn.grouped import Gated, Gemms
from ep_ops.nn.sums import copy_rows, sum_rows
from ep_ops.operators.library import define
from ep_ops.records import GROUPED, TOKEN_MAJOR, check_types

if TYPE_CHECKING:
    from ep_ops.backends.cute.tuning import Knobs, Tuning


def grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Multiply each expert's rows by its own matrix, as :func:`ep_ops.nn.grouped_mm` does. Differentiable.

    Tiles are dynamic: an SM takes the next one when it has finished one. Under ``torch.compile`` it is one operator,
    ``torch.ops.ep.quack_mm``.

    Args:
        x: rows, [R, M], bfloat16 or float16.
        w: matrices, [El, M, N], contiguous or the transpose of contiguous ones, in the dtype of x.
        offs: end of each expert's rows, int32 [El], such as ``Route.offs``.

    Returns:
        [R, N]. Rows after ``offs[-1]`` are undefined, in x and in the result.

    Raises:
        TypeError: an argument is not a tensor, or has another dtype.
        ValueError: w has other sizes, or M or N is not a multiple of 8.
    """
    check_operands(x, w, offs)
    return _GroupedMM.apply(x, w, offs, None, None)


def gathered_mm(x: Tensor, w: Tensor, offs: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Return ``grouped_mm(x[rows], w, offs)`` [L, N], from x [R, M] and rows, int32 [L]; ``places`` are those of each
    row, int32 [R, K]. Differentiable. Raises as :func:`grouped_mm`."""
    check_operands(x, w, offs)
    return _GroupedMM.apply(x, w, offs, rows, places)


def check_operands(x: Tensor, w: Tensor, offs: Tensor) -> None:
    """Raise TypeError or ValueError unless quack multiplies rows x by matrices w, as :func:`grouped_mm` describes."""
    check_types(Tensor, x=x, w=w, offs=offs)
    if x.dtype not in (torch.bfloat16, torch.float16) or w.dtype != x.dtype:
        raise TypeError(f"x is {x.dtype} and w is {w.dtype}; allowed: both torch.bfloat16 or both torch.float16")
    if w.dim() != 3 or w.shape[0] != offs.shape[0] or w.shape[1] != x.shape[1] or w.shape[1] % 8 or w.shape[2] % 8:
        allowed = f"[{offs.shape[0]}, {x.shape[1]}, N] (the entries of offs, the columns of x), multiples of 8"
        raise ValueError(f"w has shape {tuple(w.shape)}; allowed: {allowed}")


def weights_gradient(x: Tensor, grad: Tensor, offs: Tensor) -> Tensor:
    """Return the gradient [El, M, N] of w in ``grouped_mm(x, w, offs)``, from x [R, M] and ``grad`` [R, N]."""
    check_types(Tensor, x=x, grad=grad, offs=offs)
    return gathered_gradient(x, grad, offs, None)


def gathered_product(x: Tensor, w: Tensor, offs: Tensor, rows: Tensor | None) -> Tensor:
    """Return ``grouped_mm(x[rows], w, offs)`` [L, N], from x [R, M] and rows, int32 [L]; None: all rows. Not
    differentiable. Raises as :func:`grouped_mm`."""
    check_operands(x, w, offs)
    return _QUACK_MM(x.contiguous(), w, offs, rows, False)


def gathered_gradient(x: Tensor, grad: Tensor, offs: Tensor, rows: Tensor | None) -> Tensor:
    """Return ``weights_gradient(x[rows], grad, offs)`` [El, M, N], from x [R, M] and rows, int32 [L]; None: all."""
    return _QUACK_MM(x.contiguous(), grad.contiguous(), offs, rows, False)


def _gated_product(x: Tensor, w: Tensor, offs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    check_operands(x, w, offs)
    return _QUACK_GATED(x.contiguous(), w, offs, rows)


def _gated_gradient(
    grad: Tensor, w: Tensor, h: Tensor, weights: Tensor, offs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _QUACK_GATED_BACKWARD(grad.contiguous(), w, h, weights.contiguous(), offs)


def _pairs_product(grad: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return _QUACK_MM(grad, w, offs, None, True)


def _pairs_gradient(x: Tensor, grad: Tensor, offs: Tensor, rows: Tensor) -> Tensor:
    return _QUACK_MM(x.contiguous(), grad, offs, rows, True)


GEMMS = Gemms(
    grouped_mm, weights_gradient, True, gathered_product, gathered_gradient,
    Gated(_gated_product, _gated_gradient, _pairs_product, _pairs_gradient),
)  # fmt: skip
"""For :func:`ep_ops.nn.expert_mlp` and the attribute ``gemms`` of :class:`ep_ops.nn.Experts`."""


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offs: Tensor, rows: Tensor | None, places: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w, offs, rows, places)
        return _QUACK_MM(x.contiguous(), w, offs, rows, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, w, offs, rows, places = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), None
        if ctx.needs_input_grad[0]:
            grad_x = _QUACK_MM(grad, w.transpose(1, 2), offs, None, False)
            grad_x = grad_x if places is None else sum_rows(grad_x, places)
        grad_w = gathered_gradient(x, grad, offs, rows) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None, None, None


# ---------------------------------------------------------------------- operators
#
# Dynamo cannot be relied on to trace quack, and only eager calls take a configuration. Tensors have the strides of the
# trace, so that matrices are not copied to be transposed.

_STRIDES = (torch.Tag.needs_exact_strides,)


def _fake(a: Tensor, b: Tensor, offs: Tensor, rows: Tensor | None, pairs: bool) -> Tensor:
    if b.dim() == 3:
        return a.new_empty((a if rows is None else rows).shape[0], b.shape[2])
    if pairs:
        return a.new_empty(offs.shape[0], b.shape[1], a.shape[1]).transpose(1, 2)
    return a.new_empty(offs.shape[0], a.shape[1], b.shape[1])


def _mm(a: Tensor, b: Tensor, offs: Tensor, rows: Tensor | None, pairs: bool) -> Tensor:
    """Multiply each expert's rows of a [R, M] by its matrix of b [El, M, N], or their transpose by its rows of b. With
    ``rows`` [L] those are a[rows]. ``pairs``: columns of b, or with matrices columns of a, are pairs of gate and up,
    and matrices are the transpose of contiguous ones [El, 2F, H]."""
    out = _fake(a, b, offs, rows, pairs)
    if not offs.shape[0] or not a.shape[0] or not (rows is None or rows.shape[0]):
        return out.zero_()
    of_weights = b.dim() == 2
    knobs = _knobs("gemm weights" if of_weights else "gemm", a, b, offs, rows)
    a, how = _gathering(a, rows, offs, knobs.gathers)
    ends = torch.nn.functional.pad(offs, (1, 0))
    if not of_weights:
        b = b.contiguous() if pairs else b  # saved matrices may come back with other strides
        gemm(a, b, out, knobs.tile, ("B",) if pairs else None, cu_seqlens_m=ends, **how)
    elif pairs and not how:  # the matrices as they lie in memory
        gemm(b.mT, a, out.mT, knobs.tile, ("out",), cu_seqlens_k=ends)
    else:
        gemm(a.mT, b, out, knobs.tile, ("out",) if pairs else None, cu_seqlens_k=ends, **how)
    return out


def _fake_gated(x: Tensor, w: Tensor, offs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(rows.shape[0], w.shape[2]), x.new_empty(rows.shape[0], w.shape[2] // 2)


def _gated(x: Tensor, w: Tensor, offs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return x[rows] times w, [L, 2F] in pairs, and SwiGLU of it, [L, F]."""
    h, a = _fake_gated(x, w, offs, rows)
    if not offs.shape[0] or not x.shape[0] or not rows.shape[0]:
        return h.zero_(), a.zero_()
    knobs = _knobs("gemm gated", x, w, offs, rows)
    x, how = _gathering(x, rows, offs, knobs.gathers)
    ends = torch.nn.functional.pad(offs, (1, 0))
    gated(x, w, h, a, knobs.tile, cu_seqlens_m=ends, **how)
    return h, a


def _fake_gated_backward(
    grad: Tensor, w: Tensor, h: Tensor, weights: Tensor, offs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return h.new_empty(h.shape), h.new_empty(h.shape[0], w.shape[1]), weights.new_empty(weights.shape)


def _gated_backward(
    grad: Tensor, w: Tensor, h: Tensor, weights: Tensor, offs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of h and of the weights, [L, 2F] in pairs and [L], and SwiGLU of h times the weights, from
    ``grad`` [L, H], w [El, F, H], h [L, 2F] in pairs and weights [L]."""
    made = _fake_gated_backward(grad, w, h, weights, offs)
    if not offs.shape[0] or not h.shape[0]:
        return made[0].zero_(), made[1].zero_(), made[2].zero_()
    b = w.transpose(1, 2)
    knobs = _knobs("gemm gated gradient", grad, b, offs, None)
    ends = torch.nn.functional.pad(offs, (1, 0))
    return *made[:2], gated_gradient(grad, b, h, weights, *made[:2], knobs.tile, cu_seqlens_m=ends)


_QUACK_MM = define(
    "quack_mm(Tensor a, Tensor b, Tensor offs, Tensor? rows, bool pairs) -> Tensor", _mm, _fake, _STRIDES
)
_QUACK_GATED = define(
    "quack_gated(Tensor x, Tensor w, Tensor offs, Tensor rows) -> (Tensor h, Tensor a)", _gated, _fake_gated, _STRIDES
)  # fmt: skip
_QUACK_GATED_BACKWARD = define(
    "quack_gated_backward(Tensor grad, Tensor w, Tensor h, Tensor weights, Tensor offs)"
    " -> (Tensor grad_h, Tensor a, Tensor grad_weights)", _gated_backward, _fake_gated_backward, _STRIDES,
)  # fmt: skip


def _gathering(x: Tensor, rows: Tensor | None, offs: Tensor, gathers: bool) -> tuple[Tensor, dict[str, Any]]:
    """Return rows and the argument by which a GEMM gathers them, or copied rows and none."""
    if rows is None:
        return x, {}
    return (x, {"A_idx": rows}) if gathers else (copy_rows(x, rows, offs), {})


# ---------------------------------------------------------------------- choices


@functools.cache
def tuning(device: torch.device) -> Tuning:
    """Return the rows of the tuning table for a device."""
    from ep_ops.backends.cute.tuning import Tuning, rows_given

    return Tuning(torch.cuda.get_device_name(device) if device.type == "cuda" else "", 1, rows_given())


def _knobs(operation: str, a: Tensor, b: Tensor, offs: Tensor, rows: Tensor | None) -> Knobs:
    """Return the choices for such a GEMM."""
    mean = (a if rows is None else rows).shape[0] // offs.shape[0]
    layout = GROUPED if rows is None else TOKEN_MAJOR
    return tuning(a.device).knobs(operation, layout, tokens=mean, sizes=f"{a.shape[1]}x{b.shape[-1]}")


@functools.cache  # quack knows configurations by their identity
def _config(tile: str, device: torch.device) -> Any:
    """Return quack's record of a configuration, None for its own choice."""
    if not tile:
        return None
    from ep_ops.backends.cute.tuning import TILE

    found = TILE.fullmatch(tile)
    assert found is not None
    *numbers, pingpong = found.groups()
    m, n, cluster_m, cluster_n = map(int, numbers)
    return _module("gemm_config").GemmConfig(
        tile_m=m, tile_n=n, cluster_m=cluster_m, cluster_n=cluster_n, pingpong=pingpong is not None,
        is_dynamic_persistent=False, device_capacity=torch.cuda.get_device_capability(device)[0],
    )  # fmt: skip


def _module(name: str) -> Any:
    """Import a module of quack, which takes a second and changes the CuTe DSL, so not before it is needed.

    Raises:
        ModuleNotFoundError: quack-kernels is not installed.
    """
    try:
        return importlib.import_module(f"quack.{name}")
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "quack":
            raise
        text = "quack's GEMMs need quack-kernels, which is not installed: pip install quack-kernels==0.6.5"
        raise ModuleNotFoundError(text, name=error.name) from error


def gemm(a: Tensor, b: Tensor, out: Tensor, tile: str, concat: tuple[str, ...] | None = None, **how: Any) -> None:
    """Write the result of quack's GEMM."""
    run = _module("gemm_interface").gemm_tuned.fn
    run(a, b, out, config=_config(tile, a.device), dynamic_scheduler=True, concat_layout=concat, **how)


def gated(x: Tensor, w: Tensor, h: Tensor, a: Tensor, tile: str, **how: Any) -> None:
    """Write the result of quack's GEMM into h, and SwiGLU of it into a."""
    _module("gemm_interface").gemm_act(
        x, w, activation="swiglu", preact_out=h, postact_out=a, dynamic_scheduler=True, tuned=False,
        config=_config(tile, x.device), concat_layout=("B",), **how,
    )  # fmt: skip


def gated_gradient(
    grad: Tensor, b: Tensor, h: Tensor, weights: Tensor, grad_h: Tensor, a: Tensor, tile: str, **how: Any
) -> Tensor:  # fmt: skip
    """Write the gradient of h and weighted SwiGLU of h, and return the gradient of the weights."""
    return _module("gemm_interface").gemm_dact(  # type: ignore[no-any-return]
        grad, b, h, activation="swiglu", dx_out=grad_h, postact_out=a, colvec_scale=weights, colvec_reduce=True,
        dynamic_scheduler=True, tuned=False, config=_config(tile, grad.device), **how,
    )[2]  # fmt: skip
