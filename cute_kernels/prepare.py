"""Compiles kernels side by side, in processes of their own.

multiprocessing would import the main module of the user's program in each of them.
"""

import contextlib
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import jit

PROGRAM = """
import pickle, sys
sys.path += pickle.load(sys.stdin.buffer)
from cute_kernels import prepare
prepare.prepare_given()
"""
"""What a process runs. It finds what the user's program finds, but the standard library first: a file next to the
program may have the name of one of its modules."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    for kernel in kernels:
        if os.getppid() == parent:
            jit.prepare(kernel, arch)
