"""Run a function on the ranks of a gloo process group: ``run_ranks(2, fn, *args) -> [result of rank 0, of rank 1]``.

    from ranks import run_ranks

    def exchange(numbers):                       # at module level: workers import it by name
        rank = torch.distributed.get_rank()      # a fresh default group is ready in every call
        ...
        return something_picklable

    def test_exchange():
        first, second = run_ranks(2, exchange, [1, 2])

Workers are started once per world size and kept for the whole test session; they are forks (tests/forks.py).
Each call gets a new default process group, which is destroyed afterwards, and a clean Dynamo.
"""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import gc
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from forks import forks

GRACE = 60.0  # seconds that the other ranks get once one rank has raised


class RemoteTraceback(Exception):
    """The text of a worker's traceback, shown as the cause of the exception raised here."""

    def __str__(self) -> str:
        return "\n" + "".join(self.args)


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 240.0, return_exceptions: bool = False
) -> list[Any]:
    """Call ``fn(*args)`` on every rank and return the results in rank order.

    ``fn`` must be a module-level function; arguments and results are pickled (tensors travel by value). If ranks
    raise, the exception of the lowest rank that did not just lose its peers is raised here, with its own type; with
    ``return_exceptions`` the exceptions stand in the list instead. After ``timeout`` seconds, or ``GRACE`` seconds
    after the first exception, ranks that have not answered are killed and count as having raised ``TimeoutError``.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    results = pool.run(fn, args, timeout)
    if not return_exceptions:
        failures = [r for r in results if isinstance(r, BaseException)]
        if failures:
            raise min(failures, key=_is_consequence)
    return results


def _is_consequence(result: Any) -> bool:
    """Whether this is likely to be what one rank sees when another has failed."""
    return isinstance(result, TimeoutError) or (isinstance(result, RuntimeError) and "gloo" in str(result))


class _Pool:
    """``world_size`` workers and the pipes to them. Not used again once one was lost."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        context = forks()
        self.directory = tempfile.TemporaryDirectory(prefix="ep_ops_ranks_")
        self.calls = 0
        self.pipes: list[Connection] = []
        self.workers = []
        for rank in range(world_size):
            here, there = context.Pipe()
            worker = context.Process(target=_worker, args=(there, rank, world_size), daemon=True)
            worker.start()
            there.close()
            self.pipes.append(here)
            self.workers.append(worker)

    def run(self, fn: Callable[..., Any], args: tuple, timeout: float) -> list[Any]:
        self.calls += 1
        store = os.path.join(self.directory.name, f"store{self.calls}")
        job = pickle.dumps((list(sys.path), os.getcwd(), store, timeout, pickle.dumps((fn, args))))
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        pending = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        try:
            for pipe in self.pipes:
                pipe.send_bytes(job)
            while pending:
                ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for pipe in ready:
                    rank = pending.pop(pipe)
                    results[rank] = self._receive(pipe, rank)
                    if isinstance(results[rank], BaseException):
                        deadline = min(deadline, time.monotonic() + GRACE)
        except BaseException:
            self.close()
            raise
        for rank in pending.values():
            results[rank] = TimeoutError(f"rank {rank} of {self.world_size} did not return from {fn.__name__}")
            if self.workers[rank].is_alive():
                os.kill(self.workers[rank].pid, signal.SIGUSR1)  # faulthandler prints where it was
                time.sleep(0.2)
        if not all(w.is_alive() for w in self.workers) or any(map(_is_consequence, results.values())):
            self.close()
        return [results[rank] for rank in range(self.world_size)]

    def _receive(self, pipe: Connection, rank: int) -> Any:
        try:
            failed, value, text = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.workers[rank].join(GRACE)
            return RuntimeError(f"rank {rank} died with exit code {self.workers[rank].exitcode}")
        if failed:
            value.__cause__ = RemoteTraceback(f"rank {rank} of {self.world_size}:\n{text}")
        return value

    def close(self) -> None:
        _pools.pop(self.world_size, None)
        for pipe in self.pipes:
            pipe.close()  # an idle worker leaves when it sees the end of its pipe; so does a busy one
        for worker in self.workers:
            worker.join(1.0)
            if worker.is_alive():
                worker.kill()
                worker.join()
        self.directory.cleanup()


_pools: dict[int, _Pool] = {}


@atexit.register
def close_pools() -> None:
    """End all workers (done at exit by itself)."""
    for pool in list(_pools.values()):
        pool.close()


def _worker(pipe: Connection, rank: int, world_size: int) -> None:
    gc.freeze()  # collections would copy all memory that this process shares with the one it is a fork of
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(1)
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                jobs.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone or has closed this pool, whatever the main thread is waiting for

    threading.Thread(target=listen, daemon=True).start()
    while True:
        pipe.send_bytes(_call(jobs.get(), rank, world_size))


def _call(job: bytes, rank: int, world_size: int) -> bytes:
    import torch
    import torch.distributed as dist

    path, directory, store, timeout, call = pickle.loads(job)
    try:
        sys.path[:] = path
        os.chdir(directory)
        torch.manual_seed(0)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout + GRACE),  # the parent gives up first
        )
        try:
            dist.barrier()  # nobody fails while another still connects
            fn, args = pickle.loads(call)
            result = fn(*args)
            dist.barrier()  # nobody leaves while another still talks to it
        finally:
            if "ep_ops" in sys.modules:  # whose communicators end with their process group
                living = sys.modules["ep_ops"].registry.living
                for comm in living.values():
                    comm.destroyed = True
                living.clear()
            if dist.is_initialized():
                dist.destroy_process_group()
        return pickle.dumps((False, result, ""))
    except BaseException as error:  # noqa: BLE001 - everything goes back to the caller
        text = traceback.format_exc()
        error = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
        try:
            message = pickle.dumps((True, error, text))
            pickle.loads(message)
            return message
        except Exception:  # noqa: BLE001
            return pickle.dumps((True, RuntimeError(f"{type(error).__name__}: {error}"), text))
