"""One process per rank on this host, which end together."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GRACE = 5.0  # seconds between asking the remaining processes to end and killing them


def launch(function: Callable[..., None], world_size: int, *args: object) -> None:
    """Call ``function(rank, port, world_size, *args)``, a module-level function, in ``world_size`` new processes.

    Returns when all have ended. If one fails, the others are terminated and its exception is raised here, with its
    traceback (``torch.multiprocessing.ProcessRaisedException``) or exit code (``ProcessExitedException``). On Ctrl-C
    all are terminated, and KeyboardInterrupt is raised.
    """
    # The store lives here and picks its own port, so that no other process can take it in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.start_processes(
        _run, (function, store.port, world_size, *args), nprocs=world_size, join=False, start_method="spawn"
    )
    try:
        while not context.join(timeout=1.0, grace_period=GRACE):
            pass
    finally:
        for process in context.processes:
            if process.is_alive():
                process.terminate()
        for process in context.processes:
            process.join(GRACE)
            if process.is_alive():
                process.kill()


def _run(rank: int, function: Callable[..., None], *args: object) -> None:
    """Call the function, run exit handlers, and end the process without Python's finalization.

    If anything still refers to a process group, gloo's threads outlive destroy_process_group, and one that frees a
    tensor during finalization aborts the process (github.com/pytorch/pytorch/pull/179291).
    """
    function(rank, *args)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextlib.contextmanager
def process_group(
    rank: int, port: int, world_size: int, device: torch.device, timeout: float = 300.0
) -> Iterator[None]:
    """Initialize the default process group of a launched process, NCCL or gloo, with a timeout in seconds."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )
    yield
    # Not in a `finally`: after an error the others may be waiting elsewhere, and the launcher ends them.
    dist.barrier()
    dist.destroy_process_group()
