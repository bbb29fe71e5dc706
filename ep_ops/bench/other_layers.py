"""MoE layers of inference engines, to compare decode steps with, where these libraries are installed.

Each computes weighted sums of SwiGLU experts from tokens, expert ids and routing weights, on one GPU that holds all
experts. None has an exchange between ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [T, H], expert ids int32 [T, K], routing weights float32 [T, K] -> [T, H]."""


def vllm(w_in: Tensor, w_out: Tensor) -> Layer:
    """Return vLLM's Triton kernels with the tiles that it ships. ImportError if they are not installed."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    first, second = w_in.mT.contiguous(), w_out.mT.contiguous()
    return lambda x, ids, weights: fused_experts(x, first, second, weights, ids)


def flashinfer(w_in: Tensor, w_out: Tensor) -> Layer:
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


LAYERS: dict[str, Callable[[Tensor, Tensor], Layer]] = {"vllm": vllm, "flashinfer": flashinfer}


def installed(names: tuple[str, ...], w_in: Tensor, w_out: Tensor, say: Callable[[str], Any]) -> dict[str, Layer]:
    """Return the layers that are installed, of those named. `say` receives the reason why another is left out.

    Args:
        w_in: gate and up [E, H, 2F].
        w_out: down [E, F, H].
    """
    found = {}
    for name in LAYERS:
        if name in names:
            try:
                found[name] = LAYERS[name](w_in, w_out)
            except Exception as error:  # an import of a library that does not support this host may raise anything
                say(f"{name} is not measured: {error}")
    return found
