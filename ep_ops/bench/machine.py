"""The machine of a result."""

from __future__ import annotations

import datetime
import platform
from typing import Any

import torch

from ep_ops.commands.doctor import driver, installed


def describe(device: torch.device) -> dict[str, Any]:
    """Return versions and hardware, without the name of the host."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": platform.machine() + " CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None,
        "driver": None,
        "cutlass_dsl": installed("nvidia-cutlass-dsl"),
        "backend": None,
    }
    if device.type != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(device)
    facts |= {
        "device": properties.name,
        "sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
        "l2_mib": getattr(properties, "L2_cache_size", 0) // 2**20,
        "capability": f"{properties.major}.{properties.minor}",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": driver(),
    }
    return facts
