"""DeepEP's module interface on ep_ops operators, for clients whose code should not change.

It has ``Buffer`` (V1), ``ElasticBuffer`` (V2), ``Config``, ``EventHandle`` and ``EventOverlap``, as far as clients use
them.

    import ep_ops.integrations.deep_ep
    ep_ops.integrations.deep_ep.install()        # before the client is imported
    import deep_ep                               # this module

Names, order of rows and counts are those of DeepEP 2.1.0; handles have other contents. Rows of a dispatch are
token-major (docs/token-major.md). ``HybridEPBuffer`` is missing. Other unsupported features raise NotImplementedError
with the reason.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys

import torch

from ep_ops.integrations.deep_ep import utils
from ep_ops.integrations.deep_ep.buffer import Buffer, Config
from ep_ops.integrations.deep_ep.communicators import Communicators
from ep_ops.integrations.deep_ep.elastic import (
    ElasticBuffer,
    EPHandle,
    get_logical_domain_size,
    get_physical_domain_size,
)
from ep_ops.integrations.deep_ep.frameworks import send_weights
from ep_ops.integrations.deep_ep.utils import EventHandle, EventOverlap

__all__ = [
    "Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap",
    "get_logical_domain_size", "get_physical_domain_size", "install", "topk_idx_t", "utils",
]  # fmt: skip

topk_idx_t = torch.int64


__version__ = "2.1.0"
"""The version of DeepEP whose interface this is."""


def install(
    max_tokens_per_rank: int | None = None, *, latency_max_tokens: int | None = None, replace: bool = False
) -> None:
    """Make ``import deep_ep`` return this module in this process, and ``import deep_ep.utils`` its submodules.

    Repeated calls may set another bound and have no other effect.

    Args:
        max_tokens_per_rank: a bound on the tokens that any rank passes to a dispatch of :class:`Buffer`, the same on
            all ranks; default: the environment variable ``EP_OPS_DEEP_EP_MAX_TOKENS``. Without either, every such
            dispatch first agrees on the largest number of tokens, which waits for all ranks.
        latency_max_tokens: calls whose bound on tokens is at most this run on the latency kernels, as far as the sizes
            allow; default: the environment variable ``EP_OPS_DEEP_EP_LATENCY_TOKENS``, or 256. It concerns
            communicators that are created later.
        replace: take the place of a DeepEP that is installed or imported. Modules that have imported names from it
            keep them.

    Raises:
        RuntimeError: DeepEP itself is imported or installed and ``replace`` is False, or it has created a buffer in
            this process.
        ValueError: a bound is not a positive integer.
    """
    most = _bound("max_tokens_per_rank", max_tokens_per_rank, "EP_OPS_DEEP_EP_MAX_TOKENS")
    few = _bound("latency_max_tokens", latency_max_tokens, "EP_OPS_DEEP_EP_LATENCY_TOKENS")
    own, found = sys.modules[__name__], sys.modules.get("deep_ep")
    if found is not own:
        if not replace and (found is not None or importlib.util.find_spec("deep_ep") is not None):
            raise RuntimeError(
                "deep_ep is already imported or installed; remove it, or pass replace=True to use ep_ops in its place"
            )
        theirs = [getattr(found, name) for name in ("Buffer", "ElasticBuffer") if hasattr(found, name)]
        if any(type(thing) is kind for kind in theirs for thing in gc.get_objects()):
            raise RuntimeError(
                f"DeepEP ({getattr(found, '__file__', None)}) has created a buffer in this process; install"
                " ep_ops in its place before the first dispatch"
            )
        for name in [name for name in sys.modules if name == "deep_ep" or name.startswith("deep_ep.")]:
            del sys.modules[name]
        for name, module in list(sys.modules.items()):
            if name == __name__ or name.startswith(f"{__name__}."):  # otherwise it would be imported twice
                sys.modules["deep_ep" + name.removeprefix(__name__)] = module
    if most is not None:
        Buffer.max_tokens_per_rank = most
    if few is not None:
        Communicators.latency_max_tokens = few
    send_weights()


def _bound(name: str, given: int | None, variable: str) -> int | None:
    """Return the argument ``name``, or else the environment variable. ValueError unless it is a positive integer."""
    value: int | str | None = given
    if value is None:
        name, value = variable, os.environ.get(variable) or None
    if value is not None and (not str(value).isdecimal() or int(value) < 1):
        raise ValueError(f"{name} is {value!r}; expected a positive integer")
    return None if value is None else int(value)
