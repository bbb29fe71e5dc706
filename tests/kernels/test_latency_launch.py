"""What the latency path hands to its kernels, without a GPU: every argument they take, blocks that make sense."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from launches import Recorder, allocate_on_cpu

from cute_kernels import marks
from cute_kernels.heap import Problem
from cute_kernels.internode.wire import Nvlink
from cute_kernels.latency.combine import Combine
from cute_kernels.latency.dispatch import Dispatch
from ep_ops.backends.cute import latency
from ep_ops.backends.cute.outputs import Outputs
from ep_ops.config import consecutive_domains
from ep_ops.records import Route, Sizes

SMS = 132


@pytest.fixture(params=[(1, 1), (4, 4), (4, 2)], ids=["alone", "one_domain", "two_domains"])
def recorder(request) -> Recorder:
    ranks, size = request.param
    domains = consecutive_domains(ranks, size) if size < ranks else ()
    wire = Nvlink() if domains else None
    return Recorder(Problem(ranks, (8,) * ranks, 4, 64, "bf16", 512, domains, wire), SMS)


@pytest.fixture
def path(recorder, monkeypatch):
    allocate_on_cpu(monkeypatch)
    return latency.LatencyPath(recorder, Outputs(recorder.problem, 8, recorder.device), 256)


@pytest.mark.parametrize("max_tokens", [1, 8, 16, 256])
@pytest.mark.parametrize("weighted", [False, True])
def test_launches(path, recorder, max_tokens: int, weighted: bool) -> None:
    alone = recorder.problem.world_size == 1
    x, idx = torch.zeros(max_tokens, 64, dtype=torch.bfloat16), torch.zeros(max_tokens, 4, dtype=torch.int32)
    weights = torch.zeros(max_tokens, 4) if weighted else None
    sizes = Sizes(32, 1, 0, max_tokens)
    recv_x, recv_weights, *placed = path.dispatch(x, weights, idx, sizes)
    assert recv_x.shape == (32, 64) and recv_weights.shape == (32 * weighted,)
    route = Route(idx, *placed[:4], 1, 32, max_tokens)
    row_weights = recv_weights if weighted else None
    assert path.combine(recv_x, row_weights, route).shape == x.shape
    path.send_dispatch(x, weights, idx, sizes)
    assert len(path.dispatch(x, weights, idx, sizes, send=False)) == 7
    path.send_combine(recv_x, row_weights, route)
    assert path.combine(recv_x, row_weights, route, send=False).shape == x.shape

    kernels = [kernel for kernel, _, _ in recorder.launched]
    assert set(kernels) <= set(latency.kernels_of(recorder.problem, 256))
    assert [type(k) for k in kernels] == [Dispatch, Combine, Dispatch, Dispatch, Combine, Combine]
    for kernel, terms, given in recorder.launched:
        agreed = marks.unpack(terms)[1]
        assert agreed.kind == ("dispatch" if isinstance(kernel, Dispatch) else "combine") and agreed.few
        assert given["capacity" if isinstance(kernel, Dispatch) else "num_rows"] == 32
        assert 0 <= given["senders"] <= given["blocks"] and 1 <= given["blocks"] <= SMS
        assert not kernel.send or alone or given["senders"] > 0
        if kernel.receive:  # one block of a dispatch writes the route, at least one stores rows
            assert given["blocks"] - given["first_receiver"] >= 2


def test_a_rank_alone_wastes_no_block(path, recorder) -> None:
    if recorder.problem.world_size > 1:
        pytest.skip("not alone")
    assert path._dispatch_deal(8, True, True) == path._combine_deal(8, True, True) == (0, 0, SMS)


def test_puts_find_a_block_each(path, recorder) -> None:
    """As far as there are so many; blocks that send need not receive, too, unless all do."""
    far = recorder.problem.world_size - recorder.problem.domain_ranks
    for tokens in (1, 8, 20, 40, 256):
        deals = (path._dispatch_deal(tokens, True, True), path._combine_deal(tokens, True, True))
        for puts, (senders, first, blocks) in zip((far + far * tokens, far * tokens), deals, strict=True):
            assert blocks == SMS and senders >= min(puts, SMS) * (far > 0)
            assert first == senders or (senders, first) == (SMS, 0)
