"""The cute backend from its warmup, which runs every kernel, to the end of its memory. Needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from recorded import PROBLEM, Device

from ep_ops.backends.cute import backend as cute
from ep_ops.backends.cute.ahead import latency_kernels, throughput_kernels


def test_warmup_runs_every_kernel(backend: Any, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warmup runs whole and split operations without tokens, in one round and in several, in both layouts. Blocks of
    this budget do not join others."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: device)
    # Kernels that receive no row write a zero, which an exact dispatch reads.
    monkeypatch.setattr(torch, "empty_strided", lambda shape, strides, dtype: torch.zeros(shape, dtype=dtype))
    backend._config = SimpleNamespace(
        name="ep", max_tokens_per_rank=PROBLEM.planned_tokens, hidden_size=64, top_k=2, dtype=torch.bfloat16,
        alignment=16, world_size=2, symmetric_rows=8,
    )  # fmt: skip
    backend._local_experts = 2
    rows, table = torch.zeros(8 * 64 * 2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    backend._rows = SimpleNamespace(local=rows, table=table)
    backend.warmup()
    launched = [one for launcher in (backend._launcher, backend.side) for one in launcher.launched]
    kernels = [*throughput_kernels(PROBLEM), *latency_kernels(PROBLEM, 64)]
    assert {kernel for kernel, *_ in launched} == {kernel for kernel in kernels if not getattr(kernel, "joins", False)}
    assert not backend._flights.started


@pytest.mark.parametrize(("keep", "failed"), [(False, False), (True, False), (False, True)])
def test_memory_of_a_communicator_that_ends(keep: bool, failed: bool, backend: Any, monkeypatch: Any) -> None:
    """Memory to which a peer may still write is never freed."""
    kept: list[Any] = []
    monkeypatch.setattr(cute, "_kept", kept)
    backend.memory, backend._rows, backend._failures = mock.Mock(), mock.Mock(), mock.Mock()
    backend._failures.has_failed.return_value = failed
    backend._exchange = SimpleNamespace(group="group")
    backend.destroy(keep)
    backend._failures.unwatch.assert_called_once_with()
    assert backend._exchange.group is None
    freed = [memory.free.call_count for memory in (backend.memory, backend._rows)]
    assert freed == [int(not (keep or failed))] * 2
    assert kept == ([(backend.memory, backend._rows, backend._failures.report)] if keep or failed else [])
