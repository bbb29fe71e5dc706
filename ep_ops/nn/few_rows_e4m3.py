"""SwiGLU experts with e4m3 weights and few rows each, as in decode steps of models that are served in FP8.

    got = comm.dispatch(x, experts, weights, max_tokens=8, zeros=False, format="e4m3/128/fp32", scales_as="rows")
    y = few_rows_mlp_e4m3(got.x, got.scales, w_in, in_scales, w_out, out_scales, got.route, comm.world_size)
    out = comm.combine(y, got.route, got.weights)

Weights lie as in checkpoints: [El, N, K], with a scale for each block of 128 x 128. Codes are multiplied as they are,
and the sums of 128 products are added in fp32. The first GEMM quantizes its result for the second one. As with
:func:`few_rows_mlp`, a forward consists of two kernels that read the weights of the experts that have rows once, and
the bits of a row depend neither on other rows nor on the sizes of the call. There is no gradient.

On GPUs that run the ``cute`` backend these are kernels. Otherwise PyTorch computes the same sums, slowly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops import formats
from ep_ops.formats import ELEMENT, Segments
from ep_ops.nn.few_rows import plain
from ep_ops.nn.live_rows import kernels_on
from ep_ops.operators.library import define
from ep_ops.records import Route, check_types

BLOCK = 128
"""Numbers that share a scale: of a row, and in both directions of weights."""
FORMAT = formats.format_of("e4m3/128/fp32")
"""How rows are quantized here."""
SCALES = torch.float32, torch.float8_e8m0fnu


def few_rows_mlp_e4m3(
    x: Tensor, scales: Tensor | None, w_in: Tensor, in_scales: Tensor, w_out: Tensor, out_scales: Tensor, route: Route,
    ranks: int,
) -> Tensor:  # fmt: skip
    """Return the outputs of SwiGLU experts with e4m3 weights for the rows of a route.

    Under ``torch.compile`` it is one operator, ``torch.ops.ep.few_rows_mlp_e4m3``. H and F are multiples of 128.

    A number y of the result differs from the one that fp64 computes from the same codes and scales by at most
    2**-8 |y| plus, for each number h between the GEMMs, |w| (0.08 |h| + s / 1024), where w is its weight and s the
    scale of its block. This is half of the distance between e4m3 numbers, and 2**-6 |w h| for Hopper's tensor cores:
    they drop bits below 2**-13 of the largest of 32 products and their sum. The sums from which h is computed have such
    an error, too, and h differs accordingly. In tests it is below 2**-13 of the sum of the products' magnitudes.

    Args:
        x: rows along ``route``: codes, float8_e4m3fn [R, H], or bfloat16, float16 or float32 numbers [R, H], which are
            quantized first.
        scales: scales of codes, float32 [R, H / 128], as :meth:`ep_ops.Communicator.dispatch` returns them for the
            formats "e4m3/128/fp32" and "e4m3/128/pow2" with ``scales_as="rows"``. None: x is not quantized.
        w_in: gates and ups, float8_e4m3fn [El, 2F, H], contiguous.
        in_scales: scales of blocks, [El, 2F / 128, H / 128], float32 or float8_e8m0fnu (converted in each call).
        w_out: down matrices, float8_e4m3fn [El, H, F], contiguous.
        out_scales: likewise, [El, H / 128, F / 128].
        route: of grouped or padded rows. Its ``max_tokens`` and top_k select tiles, which affects the speed only.
        ranks: number of ranks that send rows, at least 1; it affects the speed only, too.

    Returns:
        bfloat16 [R, H]. Rows that are not kept, padding included, are undefined.

    Raises:
        TypeError: an argument is not a tensor or not a Route, or a dtype is not supported.
        ValueError: the route is token-major, ``ranks`` is less than 1, or a shape is wrong.
        NotImplementedError: x requires a gradient.
    """
    check_types(Tensor, x=x, w_in=w_in, in_scales=in_scales, w_out=w_out, out_scales=out_scales)
    check_types(Route, route=route)
    segments, experts = route.segments, route.offs.shape[0]
    if x.dim() != 2 or x.shape[0] != route.num_rows or x.shape[1] % BLOCK:
        allowed = f"[{route.num_rows}, H], the rows of the route, with H a multiple of {BLOCK}"
        raise ValueError(f"x has shape {tuple(x.shape)}; allowed: {allowed}")
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; allowed: 1 or more, the ranks that send rows")
    if torch.is_grad_enabled() and x.requires_grad:
        raise NotImplementedError("few_rows_mlp_e4m3 has no gradient; x must not require one")
    check_weights(experts, x.shape[1], w_in, in_scales, w_out, out_scales)
    if scales is None:
        _check_dtype("x without scales", x, (torch.bfloat16, torch.float16, torch.float32))
        x, scales = formats.quantize(x, FORMAT)
    else:
        check_types(Tensor, scales=scales)
        _check_dtype("x with scales", x, (ELEMENT,))
        _check_dtype("scales", scales, (torch.float32,))
        wanted = x.shape[0], x.shape[1] // BLOCK
        if scales.dim() < 2 or scales.numel() != wanted[0] * wanted[1] or scales.shape[-1] != wanted[1]:
            raise ValueError(f"scales have shape {tuple(scales.shape)}; allowed: {wanted}, after x")
        scales = scales.reshape(wanted)
    return _FEW_ROWS_MLP_E4M3(
        x, scales, w_in, in_scales.float(), w_out, out_scales.float(), *segments, route.max_tokens,
        route.topk_idx.shape[1], ranks,
    )  # fmt: skip


def check_weights(
    experts: int, hidden: int, w_in: Tensor, in_scales: Tensor, w_out: Tensor, out_scales: Tensor
) -> None:
    """Raise TypeError or ValueError unless weights and scales have the dtypes and shapes that the kernels take."""
    if w_in.dim() != 3 or w_in.shape[0] != experts or w_in.shape[1] % (2 * BLOCK) or w_in.shape[2] != hidden:
        allowed = f"[{experts}, 2F, {hidden}], with F a multiple of {BLOCK}"
        raise ValueError(f"w_in has shape {tuple(w_in.shape)}; allowed: {allowed}")
    width = w_in.shape[1] // 2
    _check_shape("w_out", w_out, (experts, hidden, width))
    _check_shape("in_scales", in_scales, (experts, 2 * width // BLOCK, hidden // BLOCK))
    _check_shape("out_scales", out_scales, (experts, hidden // BLOCK, width // BLOCK))
    for name, w in (("w_in", w_in), ("w_out", w_out)):
        _check_dtype(name, w, (ELEMENT,))
    for name, w in (("in_scales", in_scales), ("out_scales", out_scales)):
        _check_dtype(name, w, SCALES)


def _check_shape(name: str, tensor: Tensor, allowed: tuple[int, ...]) -> None:
    if tensor.shape != allowed:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: {allowed}, after w_in")


def _check_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(map(str, allowed))}")


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, dtype=torch.bfloat16, memory_format=torch.contiguous_format)


def _mlp(x: Tensor, scales: Tensor, *given: Any) -> Tensor:
    w_in, in_scales, w_out, out_scales, offs, counts, alignment, *share = given
    kernels, segments = kernels_on(x.device), Segments(offs, counts, alignment)
    if kernels is None:
        return plain(
            _fake(x), segments, lambda rows, e: _sums(x[rows], scales[rows], w_in[e], in_scales[e]),
            lambda inner, e: _sums(*formats.quantize(inner, FORMAT), w_out[e], out_scales[e]),
        )  # fmt: skip
    out = _fake(x)
    x, scales, *weights = map(kernels.readable, (x, scales, w_in, in_scales, w_out, out_scales))
    kernels.few_rows_e4m3(x, scales, tuple(weights), out, segments, kernels.Share(*share))
    return out


def _sums(x: Tensor, scales: Tensor, w: Tensor, w_scales: Tensor) -> Tensor:
    """Return x @ w.T, each number summed in fp32 over ascending K in blocks, whatever the number of rows."""
    x, w = x.float(), w.float().t().contiguous()
    sums = x.new_zeros(x.shape[0], w.shape[1])
    for block in range(scales.shape[1]):
        of_block = torch.zeros_like(sums)
        for k in range(block * BLOCK, (block + 1) * BLOCK):
            of_block.addcmul_(x[:, k : k + 1], w[k])
        sums += of_block * (scales[:, block, None] * w_scales[:, block].repeat_interleave(BLOCK))
    return sums


# Without a gradient. The last three numbers only select tiles and the number of blocks.
_FEW_ROWS_MLP_E4M3 = define(
    "few_rows_mlp_e4m3(Tensor x, Tensor scales, Tensor w_in, Tensor in_scales, Tensor w_out, Tensor out_scales, "
    "Tensor offs, Tensor counts, int alignment, SymInt tokens, SymInt top_k, int ranks) -> Tensor y", _mlp, _fake,
)  # fmt: skip
