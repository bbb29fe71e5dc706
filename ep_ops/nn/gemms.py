"""Which grouped GEMMs run: selected by name, from sizes and from what all ranks have, so that ranks agree."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from ep_ops.communicator import Communicator
from ep_ops.nn.few_rows import DTYPES
from ep_ops.nn.grouped import TORCH, Gemms
from ep_ops.nn.quack_mm import GEMMS as QUACK
from ep_ops.nn.scaled import ROW
from ep_ops.records import Dispatched

NAMES = "auto", "torch", "quack", "memory"

MOST_MEAN_ROWS = 64
"""Largest mean number of rows of an expert up to which "auto" selects the kernels for few rows."""


class Choice(NamedTuple):
    """The GEMMs of an expert MLP."""

    gemms: Gemms
    """Those of calls that do not run the kernels for few rows."""
    tokens: int = 0
    """Largest ``max_tokens`` of a call that runs the kernels for few rows; 0: none does."""
    gradients: bool = False
    """Whether calls with gradients run them, too."""
    ranks: int = 1
    """Number of ranks that send rows."""

    def runs_few_rows(self, received: Dispatched, *weights: Tensor) -> bool:
        """Return whether rows of a dispatch are multiplied by the kernels for few rows."""
        if received.scales is not None or received.route.max_tokens > self.tokens:
            return False
        needs = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (received.x, *weights))
        return self.gradients or not needs

    def __str__(self) -> str:
        ordinary = {TORCH: "torch", QUACK: "quack"}.get(self.gemms, "given GEMMs")
        if not self.tokens:
            return ordinary
        if self.gradients:
            return "memory"
        return f"memory without gradients up to max_tokens={self.tokens}, else {ordinary}"


def choose(comm: Communicator, gemms: str | Gemms | Choice, width: int, format: str = "") -> Choice:
    """Return the GEMMs of experts with hidden width F. The result is the same on all ranks.

    Args:
        comm: the communicator of the experts.
        gemms: "torch", "quack", "memory", "auto", or the GEMMs themselves. "memory" selects the kernels for few rows
            (:func:`ep_ops.nn.few_rows_mlp`) for every call. "auto" selects them without gradients, if the backend is
            ``cute`` and experts have at most ``MOST_MEAN_ROWS`` rows on average; otherwise PyTorch's.
        width: F.
        format: of dispatched rows, as for :class:`ep_ops.nn.Experts`.

    Raises:
        TypeError: ``gemms`` is neither a name nor GEMMs.
        ValueError: ``gemms`` is not a name, or is "memory" and the dtype, the sizes or the format are not supported.
    """
    if isinstance(gemms, Choice):
        return gemms
    if isinstance(gemms, Gemms):
        return Choice(gemms)
    if not isinstance(gemms, str):
        raise TypeError(f"gemms is a {type(gemms).__name__}; allowed: one of {', '.join(NAMES)}, or ep_ops.nn.Gemms")
    if gemms not in NAMES:
        raise ValueError(f"gemms is {gemms!r}; allowed: {', '.join(map(repr, NAMES))}, or ep_ops.nn.Gemms")
    if gemms in ("torch", "quack"):
        return Choice(TORCH if gemms == "torch" else QUACK)
    problem = few_rows_problem(comm, width, format)
    if gemms == "memory":
        if problem is not None:
            raise ValueError(f"gemms is 'memory', but {problem}")
        return Choice(TORCH, sys.maxsize, True, comm.world_size)
    if problem is not None or comm.backend.name != "cute":
        return Choice(TORCH)
    tokens = MOST_MEAN_ROWS * comm.num_experts // (comm.world_size * comm.top_k)
    return Choice(TORCH, tokens, False, comm.world_size)


def few_rows_problem(comm: Communicator, width: int, format: str) -> str | None:
    """Return why the kernels for few rows do not run, or None. The reason is the same on all ranks."""
    if comm.dtype not in DTYPES:
        return f"the communicator's dtype is {comm.dtype}; allowed: {', '.join(map(str, DTYPES))}"
    if comm.hidden_size % 8 or width % 8:
        return f"hidden_size is {comm.hidden_size} and the experts' width is {width}; allowed: multiples of 8"
    if format == ROW:
        return f"format is {ROW!r}, whose rows the first GEMM takes quantized"
    return None
