"""Conversion of the arguments of a communicator."""

from __future__ import annotations

import itertools
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

LARGE = 0.1
"""A receive buffer of the default capacity that takes more than this part of a GPU's memory is warned of."""

_numbers: dict[str, itertools.count[int]] = {}  # by name of the group


def group_of(group: Any) -> dist.ProcessGroup | None:
    """Return the process group that was passed as ``group``. TypeError or ValueError for anything else."""
    if group is not None and not hasattr(group, "size"):
        raise TypeError(f"group is {group!r}; allowed: a process group, a DeviceMesh of one dimension, or None")
    if group is None:
        if dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            warnings.warn(
                "this communicator consists of this process alone, because torch.distributed is not initialized, but"
                f" WORLD_SIZE is {os.environ['WORLD_SIZE']}. Call torch.distributed.init_process_group() first.",
                RuntimeWarning, stacklevel=3,
            )  # fmt: skip
        return None
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names or ''}; pass the dimension of"
                " the ranks that share the experts, such as mesh['ep']"
            )
        return group.get_group()
    return group


def next_name(group: dist.ProcessGroup | None) -> str:
    """Return the default name of a communicator. Names are "ep0", "ep1", ... in order of creation, followed by the
    group's name unless it is the default group. Each group is counted separately, so that its ranks agree."""
    of = "" if group is None or group is dist.group.WORLD else f"@{group.group_name}"
    return f"ep{next(_numbers.setdefault(of, itertools.count()))}{of}"


def device_of(device: torch.device | str | int | None) -> tuple[torch.device, str | None]:
    """Return ``device`` with its index (without for the CPU), and None. If the device is not available, return the CPU,
    over which all ranks can be informed, and the reason."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        why = f"device is '{device}', but torch {torch.__version__} sees no GPU; pass device='cpu', or leave it out"
        return torch.device("cpu"), why
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type == "cpu":
        device = torch.device("cpu")  # without an index, as the device of tensors
    return device, None


def large_rows(device: torch.device, row_bytes: int) -> float:
    """Return the number of rows above which a receive buffer of default capacity causes a warning."""
    if device.type != "cuda":
        return float("inf")
    return LARGE * torch.cuda.get_device_properties(device).total_memory / row_bytes
