"""Processes that start with everything imported: forks of a server, of which each process of pytest has one."""

from __future__ import annotations

import functools
import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED = ["torch", "torch.distributed", "ep_ops", "torch._dynamo", "torch._inductor.compile_fx", "pytest"]
"""Seconds of work, done once and before any thread exists. Nothing of the CuTe DSL, whose place the emulator takes."""


@functools.cache
def forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context
