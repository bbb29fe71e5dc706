"""Let torchtitan 0.3.0 run on PyTorch 2.11, whose FSDP2 takes one mesh for all parameters of a module.

torchtitan shards a block's experts over another mesh than the rest of the block, in one call of ``fully_shard``. Here
that mesh must have one rank, and FSDP2 ignores the experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_init


@dataclasses.dataclass
class ShardPlacementResult:
    """The result of torchtitan's callback for a parameter."""

    placement: Any
    mesh_info: Any


def install() -> None:
    """Add the names that PyTorch 2.11 lacks. To be called before torchtitan is imported."""
    mesh_info = _fsdp_init._get_mesh_info
    torch.compiler._is_non_strict_tracing = lambda: False  # type: ignore[attr-defined]
    names: dict[Any, dict[str, Any]] = {
        fsdp: {"DataParallelMeshDims": type("DataParallelMeshDims", (), {})},  # used by other SPMD backends only
        _fsdp_common: {"ShardPlacementResult": ShardPlacementResult},
        _fsdp_init: {"_get_mesh_info": lambda mesh, dims: mesh_info(mesh)},
    }
    for module, added in names.items():
        for name, value in added.items():
            setattr(module, name, value)
    from torchtitan.distributed import fsdp as theirs

    theirs.fully_shard = fully_shard


def fully_shard(module: Any, *, shard_placement_fn: Callable[[nn.Parameter], Any] | None = None, **given: Any) -> Any:
    """Apply FSDP2 to the parameters of a module that the callback leaves on the mesh of the others."""
    ignored = set()
    if shard_placement_fn is not None:
        for p in module.parameters():
            mesh = shard_placement_fn(p).mesh_info.mesh
            if mesh != given["mesh"]:
                assert mesh.size() == 1, f"experts on {mesh}; expected one rank for each, since FSDP leaves them alone"
                ignored.add(p)
    return fsdp.fully_shard(module, **given, ignored_params=ignored)
