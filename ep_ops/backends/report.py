"""What kernels report to the host: who waited for whom, and ids that no expert has."""

from __future__ import annotations

import ctypes

import torch

from cute_kernels import sync

_WORDS = sync.REPORT_WORDS


class Report:
    """Two records in host memory that kernels write: a wait that failed, and an expert id out of range."""

    def __init__(self, num_experts: int, timeout: float) -> None:
        self._num_experts = num_experts
        self._timeout = timeout
        self._memory = torch.zeros(2 * _WORDS, dtype=torch.int64, pin_memory=True)
        self.address = self._memory.data_ptr()
        self._words = (ctypes.c_int64 * (2 * _WORDS)).from_address(self.address)

    def pending(self) -> bool:
        """Whether there is something to raise; a fraction of a microsecond."""
        words = self._words
        return words[0] != 0 or words[_WORDS] != 0

    def failed(self) -> str | None:
        """Text of the wait that failed; the communicator cannot be used after it."""
        if self._words[0] == 0:
            return None
        _, reason, flag, kind, epoch, rank, peer, detail, expected, seen = self._words[:10]
        operation, awaited = sync.KINDS[kind], sync.FLAGS[flag]
        where = f", token {detail}" if awaited in ("chunk", "token") else ""
        doing = f"rank {rank}, in ep::{operation} (operation {epoch} of this communicator)"
        if reason == sync.MISMATCH:
            return (
                f"{doing}, met rank {peer} in ep::{sync.KINDS[seen & 15]}: the ranks call operators in different orders"
            )
        last = "nothing" if seen == 0 else f"ep::{sync.KINDS[seen & 15]}, operation {seen >> 4}"
        return (
            f"{doing}, waited {self._timeout:g} s for rank {peer} ({awaited} flag{where}: expected {expected}, "
            f"seen {seen}, that is {last})"
        )

    def bad_expert(self) -> str | None:
        """Text of the first expert id out of range since the last call; forgets it."""
        words = self._words
        if words[_WORDS] == 0:
            return None
        _, _, _, kind, epoch, rank, _, entry, _, expert = words[_WORDS : _WORDS + 10]
        for i in range(_WORDS):
            words[_WORDS + i] = 0
        return (
            f"topk_idx holds {expert} at flat index {entry} on rank {rank} (ep::{sync.KINDS[kind]}, operation "
            f"{epoch}); allowed are expert ids from -1 (none) to {self._num_experts - 1}. Such entries were not sent."
        )
