"""One rank's view of an allocation of symmetric memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread synchronize streams within the block while another thread captures a CUDA graph, which would end
    the capture otherwise (in mode "global", the default)."""
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, mode = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(mode)


def copied(device: torch.device, address: int, nbytes: int) -> torch.Tensor:
    """Return bytes of device memory, uint8 [nbytes] on the host, without waiting for running kernels. Any thread may
    call it.

    Raises:
        RuntimeError: the memory cannot be read.
    """
    from cuda.bindings import driver

    found = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    with beside_captures(), torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        (error,) = driver.cuMemcpyDtoHAsync(found.data_ptr(), address, nbytes, stream.cuda_stream)
        if int(error) != 0:
            raise RuntimeError(f"reading memory of {device} failed: {error}")
        stream.synchronize()
    return found


def peek(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor on the host, as :func:`copied` does. Kernels that write to it may be running, so its
    elements may be of different moments."""
    if tensor.device.type != "cuda":
        return tensor.detach().cpu().clone()
    found = copied(tensor.device, tensor.data_ptr(), tensor.nbytes)
    return found.view(tensor.dtype).view(tensor.shape)


@dataclasses.dataclass
class SymmetricBuffer:
    """One rank's view of a symmetric allocation, which is zeroed on every rank."""

    local: torch.Tensor  # uint8 [nbytes] on this rank's device
    addresses: tuple[int, ...]  # device address of every rank's buffer, as seen from this device; 0: it is not mapped
    _release: Callable[[], None] | None = None

    @functools.cached_property
    def table(self) -> torch.Tensor:
        """Return `addresses` as int64 on the device, for kernels. Read it before they run."""
        return torch.tensor(self.addresses, dtype=torch.int64, device=self.local.device)

    def read(self, rank: int, first: int, nbytes: int) -> bytes:
        """Return bytes of a rank's buffer, without waiting for running kernels. Any thread may call it."""
        if self.addresses[rank] == 0:
            raise RuntimeError(f"the symmetric memory of rank {rank} is not mapped: it is in another NVLink domain")
        try:
            found = copied(self.local.device, self.addresses[rank] + first, nbytes)
        except RuntimeError as error:
            raise RuntimeError(f"reading the symmetric memory of rank {rank} failed: {error}") from error
        return bytes(found.tolist())

    def free(self) -> None:
        """Free the memory, which no rank may access any more (barrier first). Calling it again does nothing."""
        release, self._release = self._release, None
        self.local = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.addresses = ()
        if release is not None:
            release()
