"""Collectives for the host, over any process group or none."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TEXT_BYTES = 1024
"""Size of the text that a rank sends to the others."""


_turns: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()  # by process group


class Exchange:
    """Collectives among the ranks of ``group`` (None: this process alone). Results are on ``device``."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.turn = threading.RLock() if group is None else _turns.setdefault(group, threading.RLock())
        """Held by a thread during a call that exchanges data, so that the calls of a process group do not overlap."""
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.wire_device = _wire_device(group, device)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` of all ranks, which must have equal shapes, as [world_size, *shape]."""
        if self.world_size == 1 or tensor.numel() == 0:
            return tensor.to(self.device).expand(self.world_size, *tensor.shape)
        tensor = tensor.contiguous().to(self.wire_device)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._all_gather(gathered, tensor)
        return torch.stack(gathered).to(self.device)

    def all_to_all(self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        """Send the first ``send_counts[0]`` rows to rank 0, and so on; return the received rows by source rank."""
        if self.world_size == 1:
            return rows
        width = rows.shape[1:]
        # A tensor of at most one element is contiguous even with strides of 0, which cannot be viewed as bytes.
        rows = rows.contiguous() if rows.numel() > 1 else rows.clone(memory_format=torch.contiguous_format)
        flat = rows.view(rows.shape[0], width.numel()).view(torch.uint8).to(self.wire_device)
        received = flat.new_empty(sum(recv_counts), flat.shape[1])
        self._all_to_all(received, flat, list(recv_counts), list(send_counts))
        return received.to(self.device).view(rows.dtype).view(-1, *width)

    def _all_gather(self, gathered: list[Tensor], tensor: Tensor) -> None:
        """Run the collective of :meth:`all_gather`."""
        dist.all_gather(gathered, tensor, group=self.group)

    def _all_to_all(self, received: Tensor, sent: Tensor, recv_counts: list[int], send_counts: list[int]) -> None:
        """Run the collective of :meth:`all_to_all`."""
        dist.all_to_all_single(received, sent, recv_counts, send_counts, group=self.group)

    def all_gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks, each cut to ``TEXT_BYTES`` bytes."""
        encoded = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
        texts = self.all_gather(torch.tensor(list(encoded), dtype=torch.uint8, device="cpu")).tolist()
        return [bytes(numbers).rstrip(b"\0").decode(errors="ignore") for numbers in texts]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which can be pickled."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            on_gpu = self.device.type == "cuda"
            with torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
                dist.all_gather_object(values, value, group=self.group)
        return values

    def raise_together(self, doing: str, error: Exception | None) -> None:
        """Raise on all ranks if one has an error: its own there, elsewhere a RuntimeError with its text. Collective."""
        texts = self.all_gather_text("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        reasons = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if reasons:
            raise RuntimeError(f"{doing}: {'; '.join(reasons)}")

    def barrier(self) -> None:
        """Return after every rank has called it."""
        self.all_gather(torch.zeros(1, dtype=torch.int32, device="cpu")).cpu()


def _wire_device(group: Any, device: torch.device) -> torch.device:
    """Return the device of tensors that ``group`` can send. gloo is used for the CPU only."""
    if group is None or dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    served = {kind.type for kind in group._device_types}
    if device.type in served:
        return device
    if "cpu" in served or "cuda" not in served:
        return torch.device("cpu")
    return group.bound_device_id or torch.device("cuda", torch.cuda.current_device())
