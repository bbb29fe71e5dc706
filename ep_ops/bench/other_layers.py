"""MoE layers of other libraries, to compare decode steps with, where these are installed.

Each computes weighted sums of SwiGLU experts from tokens, expert ids and routing weights, on one GPU that holds all
experts. Those of inference engines have no exchange between ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ep_ops import Communicator, formats
from ep_ops.nn import swiglu_quantized

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [T, H], expert ids int32 [T, K], routing weights float32 [T, K] -> [T, H]."""


def vllm(comm: Communicator, w_in: Tensor, w_out: Tensor) -> Layer:
    """Return vLLM's Triton kernels with the tiles that it ships. ImportError if they are not installed."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    first, second = w_in.mT.contiguous(), w_out.mT.contiguous()
    return lambda x, ids, weights: fused_experts(x, first, second, weights, ids)


def flashinfer(comm: Communicator, w_in: Tensor, w_out: Tensor) -> Layer:
    """Return flashinfer's CuTe DSL layer for Hopper, tuned in the first call of each shape. ImportError if it is not
    installed."""
    from flashinfer import autotune, cute_dsl_fused_moe_bf16

    experts, hidden, _ = w_in.shape
    gate, up = (half.unflatten(1, (-1, 32)) for half in w_in.mT.chunk(2, 1))
    first = torch.stack((up, gate), 2).reshape(experts, -1, hidden)  # 32 columns of each by turns
    run = functools.partial(cute_dsl_fused_moe_bf16, w1_weight=first, w2_weight=w_out.mT.contiguous())
    tuned = set[torch.Size]()

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        new = ids.shape not in tuned
        tuned.add(ids.shape)
        with autotune(new):
            return run(x, ids, weights, num_experts=experts, top_k=ids.shape[1])

    return layer


def vllm_e4m3(comm: Communicator, w_in: Tensor, in_scales: Tensor, w_out: Tensor, out_scales: Tensor) -> Layer:
    """Return vLLM's block-scaled Triton kernels with the tiles that it ships. They quantize x."""
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    config = fp8_w8a8_moe_quant_config(w1_scale=in_scales, w2_scale=out_scales, block_shape=[128, 128])
    return lambda x, ids, weights: fused_experts(x, w_in, w_out, weights, ids, quant_config=config)


def deep_gemm(comm: Communicator, w_in: Tensor, in_scales: Tensor, w_out: Tensor, out_scales: Tensor) -> Layer:
    """Return DeepGEMM's masked grouped GEMMs between dispatch and combine of a communicator, on padded rows."""
    import deep_gemm as library

    form, gemm = "e4m3/128/fp32", library.fp8_m_grouped_gemm_nt_masked  # the name that all versions have
    experts, hidden, width = w_out.shape

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        slots = formats.round_up(x.shape[0] * comm.world_size, 128)
        got = comm.dispatch(
            x, ids, weights, max_tokens=x.shape[0], format=form, scales_as="columns", layout="padded", slots=slots,
            zeros=False,
        )  # fmt: skip
        mean = max(1, ids.numel() * comm.world_size // comm.num_experts)
        h, y = (x.new_empty(experts, slots, columns) for columns in (2 * width, hidden))
        gemm((got.x.view(experts, slots, hidden), got.scales), (w_in, in_scales), h, got.route.counts, mean)
        codes, scales = swiglu_quantized(h.flatten(0, 1), got.route, form, "columns")
        gemm((codes.view(experts, slots, width), scales), (w_out, out_scales), y, got.route.counts, mean)
        return comm.combine(y.flatten(0, 1), got.route, got.weights)

    return layer


LAYERS: dict[str, dict[str, Callable[..., Layer]]] = {
    "bf16": {"vllm": vllm, "flashinfer": flashinfer},
    "e4m3": {"vllm": vllm_e4m3, "deep_gemm": deep_gemm},
}
"""Weights -> name -> layer."""


def installed(
    names: tuple[str, ...], kind: str, comm: Communicator, weights: tuple[Tensor, ...], say: Callable[[str], Any]
) -> dict[str, Layer]:
    """Return the layers that are installed, of those named. `say` receives the reason why another is left out.

    Args:
        kind: of the weights: "bf16" or "e4m3".
        weights: gate and up [E, H, 2F] and down [E, F, H]; or w_in, in_scales, w_out, out_scales as for
            :func:`ep_ops.nn.few_rows_mlp_e4m3`.
    """
    found = {}
    for name, layer in LAYERS[kind].items():
        if name in names:
            try:
                found[name] = layer(comm, *weights)
            except Exception as error:  # an import of a library that does not support this host may raise anything
                say(f"{name} is not measured: {error}")
    return found
