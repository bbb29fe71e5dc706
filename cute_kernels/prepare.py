"""Compiles kernels side by side, in processes of their own.

multiprocessing would import the main module of the user's program in each of them.
"""

import contextlib
import gc
import math
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from . import jit

PROGRAM = """
import pickle, sys
sys.modules["torch"] = None
sys.path += pickle.load(sys.stdin.buffer)
from cute_kernels import prepare
prepare.prepare_given()
"""
"""What a process runs. It finds what the user's program finds, but the standard library first: a file next to the
program may have the name of one of its modules. It has no PyTorch, which tvm_ffi would import: that takes longer than
the first kernel, and no kernel needs it."""


def cores() -> frozenset[int]:
    """Return the cores on which this process may run."""
    known = hasattr(os, "sched_getaffinity")
    return frozenset(os.sched_getaffinity(0) if known else range(os.cpu_count() or 1))


def quota() -> float | Fraction:
    """Return how many cores' time the container of this process may use; infinity if it has no limit."""
    try:
        time, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return Fraction(int(time), int(period))
    except (OSError, ValueError):  # no such file; "max"
        return math.inf


def share_of_cores(others: Sequence[frozenset[int]] = ()) -> int:
    """Return this process's share of the cores on which it may run, in whole cores.

    Args:
        others: the cores of each other process of this host that compiles at the same time. Processes that may run on
            a core have equal shares of it. They are taken to have a quota in common.
    """
    own = cores()
    share = sum(Fraction(1, 1 + sum(core in other for other in others)) for core in own)
    return int(share * min(len(own), quota()) / len(own))


def prepare_all(kernels: Sequence[Any], arch: str, processes: int) -> None:
    """Compile the kernels that are not on disk yet, in at most so many processes. What no process compiles is left to
    whoever needs the kernel: what one fails at, what is missing if no more processes start, and all kernels if nothing
    is kept on disk.

    Ranks of a host may call it for the same kernels at the same time: each begins with others.
    """
    missing = [kernel for kernel in kernels if not jit.prepared(kernel, arch)] if jit.keeps() else []
    count = min(processes, len(missing))
    if count < 2 or not sys.executable or getattr(sys, "frozen", False):  # frozen: it is the user's program
        return
    random.Random(os.getpid()).shuffle(missing)
    paths = [*filter(None, sys.path), str(Path(__file__).parents[1])]
    how: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    how["env"] = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with contextlib.ExitStack() as stack:
        started = []
        with contextlib.suppress(OSError):  # such as a limit on processes
            for i in range(count):
                given = stack.enter_context(tempfile.TemporaryFile())
                pickle.dump(paths, given)
                pickle.dump((missing[i::count], arch, os.getpid()), given)
                given.seek(0)
                started.append(subprocess.Popen([sys.executable, "-IS", "-c", PROGRAM], stdin=given, **how))
                stack.callback(started[-1].kill)  # of an interrupted program; does nothing to a process that has ended
        for process in started:
            process.wait()


def prepare_given() -> None:
    """In one of the processes: compile the kernels that it is given, as long as the process that started it lives."""
    kernels, arch, parent = pickle.load(sys.stdin.buffer)
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # a compiler makes many objects: collections would take a tenth of the time
    for kernel in kernels:
        if os.getppid() == parent:
            jit.prepare(kernel, arch)
