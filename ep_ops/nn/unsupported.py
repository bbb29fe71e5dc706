"""Changes of PyTorch's classes that do not work with experts which are spread over ranks.

Classes that cannot train them raise errors that name the cause. PyTorch's own errors are about mixed tensors or a
missing sharding strategy. ``DTensor.share_memory_`` works. PyTorch's method reads a storage that DTensors do not have,
and ends the process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor


def watch() -> None:
    """Change the classes, as far as they have been imported. Importing them takes time."""
    if "share_memory_" not in vars(DTensor):
        DTensor.share_memory_ = _share_local  # type: ignore[method-assign, assignment]
    for module, name, adapt in _CLASSES:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None and not hasattr(found.__init__, "_ep_watched"):
            found.__init__ = _watched(found.__init__, adapt)


def _watched(init: Callable[..., None], adapt: Callable[[Any], Any]) -> Callable[..., None]:
    """Return a constructor that passes its first argument through ``adapt``, which may raise."""

    @functools.wraps(init)
    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            args = adapt(args[0]), *args[1:]
        init(
            self,
            *args,
            **{name: adapt(given) if name in ("module", "params") else given for name, given in kwargs.items()},
        )

    watched._ep_watched = True  # type: ignore[attr-defined]
    return watched


def _share_local(self: DTensor) -> DTensor:
    """Move this rank's part of a DTensor to shared memory, as ``torch.Tensor.share_memory_`` does."""
    self._local_tensor.share_memory_()
    return self


def _without_experts(module: Any) -> Any:
    """Return the module that FSDP1 is to wrap. NotImplementedError if it contains experts."""
    for part in module.modules() if isinstance(module, nn.Module) else ():
        comm = getattr(part, "comm", None)
        if hasattr(part, "expert_parameters") and getattr(comm, "world_size", 1) > 1:
            raise NotImplementedError(
                f"FullyShardedDataParallel (FSDP1) does not support {type(part).__name__}, whose experts are spread"
                " over ranks; use torch.distributed.fsdp.fully_shard (docs/training.md)"
            )
    return module


def _without_dtensors(params: Any) -> Any:
    """Return the parameters for ZeroRedundancyOptimizer. NotImplementedError if there are DTensors among them."""
    if not isinstance(params, Iterable):
        return params
    groups = [one | {"params": list(one["params"])} if isinstance(one, dict) else one for one in params]
    every = [p for one in groups for p in (one["params"] if isinstance(one, dict) else [one])]
    if any(isinstance(p, DTensor) for p in every):
        raise NotImplementedError(
            "ZeroRedundancyOptimizer does not support DTensors, such as experts that are spread over ranks; pass the"
            " other parameters to it, and the experts to an optimizer of their own"
        )
    return groups


_CLASSES: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("torch.distributed.fsdp", "FullyShardedDataParallel", _without_experts),
    ("torch.distributed.optim", "ZeroRedundancyOptimizer", _without_dtensors),
)
