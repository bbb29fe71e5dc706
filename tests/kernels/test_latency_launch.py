"""What the latency path hands to its kernels, without a GPU: as many arguments as they take, blocks that make sense."""

from __future__ import annotations

import contextlib

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels import marks
from cute_kernels.heap import Problem
from cute_kernels.latency.combine import Combine
from cute_kernels.latency.dispatch import Dispatch
from cute_kernels.launch import ranks_signature
from ep_ops.backends import latency

SMS = 132


class Recorder:
    """A backend that launches nothing."""

    def __init__(self, world_size: int) -> None:
        self._problem = Problem(world_size, (8,) * world_size, 4, 64, "bf16", 512)
        self._device = torch.device("cpu")
        self.launched: list = []

    def _new_route(self, new, topk_idx, max_tokens):
        def ints(*shape):
            return torch.empty(shape, dtype=torch.int32)

        return ints(*topk_idx.shape), ints(self._problem.world_size, max_tokens, 4), ints(8), ints(8), ints(8)

    def _new_rows(self, new, x, topk_weights, num_rows):
        return x.new_empty(num_rows, x.shape[1]), torch.empty(0 if topk_weights is None else num_rows)

    def _new_tokens(self, y, tokens):
        return y.new_empty(tokens, y.shape[1])

    def _launch(self, kernel, variant, terms, tensors, numbers):
        made = kernel(self._problem, *variant)
        taken = len(made.signature()) - len(ranks_signature(self._problem)) - 1  # and the stream
        assert len(tensors) + len(numbers) == taken
        agreed = marks.unpack(terms)[1]
        assert agreed.kind in ("dispatch", "combine") and agreed.few
        assert all(t is None or isinstance(t, torch.Tensor) for t in tensors)
        assert all(type(n) is int for n in numbers)
        self.launched.append((made, numbers[-3:]))


@pytest.fixture(params=[1, 4])
def path(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: None)
    made = latency.LatencyPath(Recorder(request.param), 256, SMS)
    monkeypatch.setattr(latency, "allocator", lambda device: None)
    monkeypatch.setattr(made, "_beside", contextlib.nullcontext)
    monkeypatch.setattr(made, "_join", lambda: None)
    return made


@pytest.mark.parametrize("max_tokens", [1, 8, 16, 256])
@pytest.mark.parametrize("weighted", [False, True])
def test_launches(path, max_tokens: int, weighted: bool) -> None:
    alone = path._backend._problem.world_size == 1
    x, idx = torch.zeros(max_tokens, 64, dtype=torch.bfloat16), torch.zeros(max_tokens, 4, dtype=torch.int32)
    weights = torch.zeros(max_tokens, 4) if weighted else None
    terms = (32, 1, 0, max_tokens)
    recv_x, recv_weights, *route = path.dispatch(x, weights, idx, *terms)
    assert recv_x.shape == (32, 64) and recv_weights.shape == (32 * weighted,)
    along = (idx, *route[:4])
    row_weights = recv_weights if weighted else None
    assert path.combine(recv_x, row_weights, along).shape == x.shape
    assert path.dispatch_start(x, weights, idx, *terms).shape == (0,)
    assert len(path.dispatch_wait(x, weights, idx, *terms)) == 7
    assert path.combine_start(recv_x, row_weights, along).shape == (0,)
    assert path.combine_wait(recv_x, row_weights, along).shape == x.shape

    kernels = [kernel for kernel, _ in path._backend.launched]
    assert set(kernels) <= set(latency.kernels_of(path._backend._problem, 256))
    assert [type(k) for k in kernels] == [Dispatch, Combine, Dispatch, Dispatch, Combine, Combine]
    for kernel, (senders, first_receiver, blocks) in path._backend.launched:
        assert 0 <= senders <= blocks and 1 <= blocks <= SMS
        assert not kernel.send or alone or senders > 0
        if kernel.receive:  # one block of a dispatch writes the route, at least one stores rows
            assert blocks - first_receiver >= 2


def test_a_rank_alone_wastes_no_block(path) -> None:
    if path._backend._problem.world_size > 1:
        pytest.skip("not alone")
    assert path._dispatch_deal(8, True, True) == path._combine_deal(True, True) == (0, 0, SMS)
