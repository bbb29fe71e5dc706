"""GPU tests run on every rank in lockstep: `torchrun --nproc-per-node N -m pytest tests/gpu`, or plain pytest for one.

A test that fails on one rank fails on all (see `together`), so that no rank is left waiting for another.

With more ranks than GPUs, several share one. Their kernels are time-sliced, so every interleaving is extreme; timings
mean nothing there, and what orders memory between GPUs is not tested.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharing import SHARING

from ep_ops import creation

REASON = "needs an NVIDIA GPU of compute capability 9.0 or higher, and the CuTe DSL"


def _usable() -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
        return False
    try:
        import cutlass  # noqa: F401
    except ImportError:
        return False
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not _usable():
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session", autouse=True)
def group() -> Iterator[None]:
    """The process group of torchrun, if there is one, and poisoned memory: torch.empty hands out NaN."""
    if not _usable():
        yield
        return
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    if SHARING > 1:  # NCCL rejects two ranks on a GPU; symmetric memory and "auto" do unless set
        creation.choose_backend = lambda facts: ("cute", "")
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "RANK" in os.environ:
        wait = datetime.timedelta(seconds=120 * SHARING)
        dist.init_process_group("nccl" if SHARING == 1 else "gloo", timeout=wait)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    yield
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@pytest.fixture
def seed() -> int:
    """A fresh seed, the same on all ranks (EP_OPS_TEST_SEED repeats one)."""
    import cases

    given = [cases.fresh_seed()]
    if dist.is_initialized():
        dist.broadcast_object_list(given, src=0)
    return given[0]


@pytest.fixture
def together() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """`with together(): ...` around checks: what fails on one rank is raised on all."""
    return _together


@contextlib.contextmanager
def _together() -> Iterator[None]:
    error: BaseException | None = None
    try:
        yield
    except (Exception, pytest.fail.Exception) as caught:
        error = caught
    said = [None if error is None else f"{type(error).__name__}: {error}"]
    if dist.is_initialized():
        words: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(words, said[0])
        said = words
    if error is not None:
        raise error
    for rank, text in enumerate(said):
        if text is not None:
            raise AssertionError(f"rank {rank}: {text}")
