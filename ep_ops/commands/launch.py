"""One process per rank on this host, which end together."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NO_OUTPUT = 74
"""Exit code of a process whose output cannot be written."""
GRACE = 5.0  # seconds between asking the remaining processes to end and killing them


def launch(function: Callable[..., None], world_size: int, *args: object) -> None:
    """Call ``function(rank, store, world_size, *args)``, a module-level function, in ``world_size`` new processes.

    ``store`` is the path of a file for their ``torch.distributed.FileStore``, in a folder that only this user can read.
    A TCPStore would listen on all addresses of this host, and anybody who reaches it could run code in the processes,
    which unpickle what other ranks send.

    Returns when all have ended. If one fails, the others are terminated and its exception is raised here, with its
    traceback (``torch.multiprocessing.ProcessRaisedException``) or exit code (``ProcessExitedException``). On Ctrl-C
    all are terminated, and KeyboardInterrupt is raised.
    """
    with tempfile.TemporaryDirectory(prefix="ep_ops_", ignore_cleanup_errors=True) as folder:
        store = os.path.join(folder, "store")
        context = mp.start_processes(
            _run, (function, store, world_size, *args), nprocs=world_size, join=False, start_method="spawn"
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
    try:
        function(rank, *args)
        sys.stdout.flush()
    except OSError:
        if not output_is_lost():
            raise
        os._exit(NO_OUTPUT)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def output_is_lost() -> bool:
    """Return whether standard output cannot be written. If so, say why, unless its reader has ended (``| head``), and
    discard what is not written yet."""
    try:
        os.write(sys.stdout.fileno(), b"\n")  # streams do not repeat what failed
    except BrokenPipeError:
        pass
    except OSError as error:
        print(f"standard output cannot be written: {error.strerror}", file=sys.stderr, flush=True)
    else:
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def gpu_count() -> int:
    """Return the number of GPUs that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@contextlib.contextmanager
def process_group(
    rank: int, store: str | None, world_size: int, kind: str, timeout: float = 300.0, sharing: bool = False
) -> Iterator[torch.device]:
    """Initialize the default process group of a process that `launch` or torchrun has started, and yield its device.

    Args:
        rank: index of the process on this host, and of its GPU.
        store: file of the launcher's store, or None under torchrun.
        world_size: number of ranks; unused under torchrun.
        kind: "cuda" for GPUs and NCCL, "cpu" for gloo.
        timeout: seconds that torch.distributed waits for a rank.
        sharing: ranks share GPUs, which NCCL does not support: they use gloo.
    """
    device, options = torch.device(kind), dict[str, Any]()
    if kind == "cuda":
        device = torch.device("cuda", rank % gpu_count() if sharing else rank)
        torch.cuda.set_device(device)
    if sharing:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    elif kind == "cuda":
        options["device_id"] = device
    if store is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        options |= {"store": dist.FileStore(store, world_size), "rank": rank, "world_size": world_size}
    backend = "nccl" if "device_id" in options else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout), **options)
    yield device
    # Not in a `finally`: after an error the others may be waiting elsewhere, and the launcher ends them.
    dist.barrier()
    dist.destroy_process_group()
