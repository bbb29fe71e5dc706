"""DeepEP's module interface, as far as its clients use it, on this library's operators: ``Buffer`` (V1) and
``ElasticBuffer`` (V2), ``Config``, ``EventHandle``, ``EventOverlap``, for clients whose code is to stay as it is.

    import ep_ops.integrations.deep_ep
    ep_ops.integrations.deep_ep.install()        # before the client is imported
    import deep_ep                               # this module

Names, order of rows, and meaning of counts are those of DeepEP 2.1.0; its handles hold what ours need, and differ
inside. Rows of a dispatch are token-major (docs/token-major.md); kernels run where they can. Not there:
``HybridEPBuffer``, which cannot be imported, and what raises NotImplementedError with the reason.
"""

from __future__ import annotations

import importlib.util
import sys

import torch

from ep_ops.integrations.deep_ep import utils
from ep_ops.integrations.deep_ep.buffer import Buffer
from ep_ops.integrations.deep_ep.config import Config
from ep_ops.integrations.deep_ep.elastic import ElasticBuffer, EPHandle
from ep_ops.integrations.deep_ep.utils import EventHandle, EventOverlap

__all__ = [
    "Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "install", "topk_idx_t", "utils",
]  # fmt: skip

topk_idx_t = torch.int64


def install() -> None:
    """Has ``import deep_ep`` give this module in this process, and ``deep_ep.utils`` and others those inside it. Does
    nothing the second time. RuntimeError if DeepEP itself is imported already, or is installed: remove it first, lest
    nobody knows which one runs."""
    own = sys.modules[__name__]
    if sys.modules.get("deep_ep") is own:
        return
    if "deep_ep" in sys.modules or importlib.util.find_spec("deep_ep") is not None:
        raise RuntimeError("deep_ep is imported or installed already; remove it where ep_ops is to stand in for it")
    for name, module in list(sys.modules.items()):
        if name == __name__ or name.startswith(f"{__name__}."):  # else it would be imported again, with other classes
            sys.modules["deep_ep" + name.removeprefix(__name__)] = module
