"""What a result was measured on."""

from __future__ import annotations

import datetime
import platform
import subprocess
from typing import Any

import torch


def describe(device: torch.device) -> dict[str, Any]:
    """Versions and hardware; names no host."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": platform.machine() + " CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None,
        "driver": None,
        "cutlass_dsl": None,
        "backend": None,
    }
    try:
        import cutlass

        facts["cutlass_dsl"] = cutlass.__version__
    except ImportError:
        pass
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
        "driver": _driver(),
    }
    return facts


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
