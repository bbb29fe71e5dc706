"""The one memory that all kernels of this process see, and where its random numbers come from."""

from __future__ import annotations

import random
from typing import Any

from .memory import GlobalMemory

draw = random.Random()
clock = 0
"""Nanoseconds to kernels; it advances with each round of the scheduler."""
accesses = 0
"""How many accesses to memory are left before the next one at which a lane stops (threads.pause)."""
networks: list[Any] = []
"""The network between the heaps in this memory, if there is one."""
_memories: list[GlobalMemory] = []


def new_memory(nbytes: int) -> GlobalMemory:
    networks.clear()
    _memories[:] = [GlobalMemory(nbytes)]
    return _memories[0]


def memory() -> GlobalMemory:
    return _memories[0]
