"""Conversion of the arguments of a communicator."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

LARGE = 0.1
"""A receive buffer of the default capacity that takes more than this part of a GPU's memory is warned of."""


def launched_ranks() -> int:
    """Return the number of processes that a launcher has started according to WORLD_SIZE; 1 if it is not a number."""
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isascii() and given.isdecimal() else 1


def group_of(group: Any) -> dist.ProcessGroup | None:
    """Return the process group that was passed as ``group``. TypeError or ValueError for anything else."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns on other ranks
        raise TypeError("group does not contain this rank; allowed: a process group of which this rank is a member")
    if group is not None and not isinstance(group, (dist.ProcessGroup, DeviceMesh)):
        raise TypeError(f"group is {group!r}; allowed: a process group, a DeviceMesh of one dimension, or None")
    if group is None:
        if dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        if launched_ranks() > 1:
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


def device_of(device: torch.device | str | int | None) -> torch.device:
    """Return ``device`` with its index (without for the CPU). ValueError if it does not exist."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device is {device!r}; allowed: a torch.device, its name, or None ({reason})") from None
    if found.type == "cpu":
        return torch.device("cpu")  # without an index, as the device of tensors
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ValueError(
            f"device is '{found}', but torch {torch.__version__} sees no GPU; pass device='cpu', or leave it out"
        )
    if found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if found.index >= count:
        raise ValueError(f"device is '{found}', but torch sees {count} GPUs; allowed: cuda:0 to cuda:{count - 1}")
    return found


def large_rows(device: torch.device, row_bytes: int) -> float:
    """Return the number of rows above which a receive buffer of default capacity causes a warning."""
    if device.type != "cuda":
        return float("inf")
    return LARGE * torch.cuda.get_device_properties(device).total_memory / row_bytes
