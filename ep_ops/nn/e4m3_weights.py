"""Weights in e4m3 with a scale for each block of 128 x 128, as checkpoints of DeepSeek-V3 have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ep_ops.communicator import Communicator
from ep_ops.formats import ELEMENT
from ep_ops.nn.few_rows_e4m3 import BLOCK, FORMAT
from ep_ops.nn.token_major import Rows
from ep_ops.records import GROUPED

FORMATS = FORMAT.name, "e4m3/128/pow2"
"""Formats of rows that are multiplied by such weights."""


def check_e4m3(comm: Communicator, width: int, gemms: Any, rows: Rows, format: str) -> str:
    """Return the format in which rows are sent to experts with e4m3 weights.

    Args:
        comm: the communicator of the experts.
        width: F.
        gemms, rows, format: as for :class:`ep_ops.nn.Experts`.

    Raises:
        ValueError: an argument is not supported for e4m3 weights.
    """
    if comm.dtype != torch.bfloat16:
        raise ValueError(f"the communicator's dtype is {comm.dtype}; allowed for e4m3 weights: torch.bfloat16")
    if comm.hidden_size % BLOCK or width % BLOCK:
        raise ValueError(
            f"hidden_size is {comm.hidden_size} and the experts' width is {width}; allowed for e4m3 weights: multiples"
            f" of {BLOCK}"
        )
    if not isinstance(gemms, str) or gemms not in ("auto", "memory"):
        raise ValueError(f"gemms is {gemms!r}; allowed for e4m3 weights: 'auto', 'memory', which are the same")
    if rows.layout != GROUPED:
        raise ValueError(f"rows is {rows.layout!r}; allowed for e4m3 weights: {GROUPED!r}")
    if format not in ("", *FORMATS):
        raise ValueError(f"format is {format!r}; allowed for e4m3 weights: '', {', '.join(map(repr, FORMATS))}")
    return format or FORMAT.name


def dtype_problem(*weights: Tensor) -> TypeError | None:
    """Return the error if something other than the layer, such as FSDP2, has converted its e4m3 weights."""
    found = [weight.dtype for weight in weights if weight.dtype != ELEMENT]
    if not found:
        return None
    return TypeError(
        f"e4m3 weights were converted to {found[0]}; allowed: {ELEMENT}. Conversion ignores their scales: the mp_policy"
        " of FSDP2 for a module with such weights must have no param_dtype"
    )


def gradient_problem(x: Tensor, *weights: Tensor) -> NotImplementedError | None:
    """Return the error if a call of experts with e4m3 weights needs gradients, which they do not have."""
    if not torch.is_grad_enabled():
        return None
    if any(weight.requires_grad for weight in weights):
        return NotImplementedError("e4m3 weights have no gradient; requires_grad of weights and scales must be False")
    if getattr(x, "requires_grad", False):  # the dispatch rejects what is no tensor
        return NotImplementedError("experts with e4m3 weights have no gradient; call them under torch.no_grad()")
    return None


def quantize_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes e4m3 [N, K] and scales float32 [N / 128, K / 128] of weights [N, K]: the largest magnitude of a
    block becomes 448. N and K are multiples of 128."""
    blocks = w.float().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    codes = (blocks / scales[:, None, :, None]).clamp(-448, 448).to(ELEMENT)
    return codes.view(w.shape), scales
