"""DeepEP's low-latency combine leaves out the entries whose id is negative, whatever their rows hold."""

from __future__ import annotations

import cases
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ep_ops import arrivals
from ep_ops.integrations.deep_ep import Buffer

EXPERTS, TOP_K, MOST, HIDDEN = 6, 3, 5, 128


def combined(seed: int, inference: bool) -> None:
    with torch.inference_mode(inference):  # PyTorch does not count writes to inference tensors
        _combined(seed)


def _combined(seed: int) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(seed + rank)
    buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
    for tokens in (MOST, 0, 3):
        x = torch.randn(tokens, HIDDEN, generator=draw).bfloat16()
        ids = torch.rand(tokens, EXPERTS, generator=draw).topk(TOP_K).indices
        ids[torch.rand(ids.shape, generator=draw) < 0.2] = -1
        weights = torch.rand(tokens, TOP_K, generator=draw)
        sent = {"topk_weights": weights} if tokens == 3 else {}
        rows, _, handle, *_ = buffer.low_latency_dispatch(x, ids, MOST, EXPERTS, use_fp8=False, **sent)
        own = EXPERTS // ranks
        scale = torch.arange(own).add(rank * own + 1).bfloat16()[:, None, None]  # expert e multiplies by e + 1
        for share, in_place in ((0.0, False), (0.3, False), (0.3, True), (1.0, False)):
            masked = torch.rand(ids.shape, generator=draw) < share
            whole, given = ids.clone(), ids.masked_fill(masked, -1)
            y = rows * scale
            # Rows of masked entries, which their owners know, hold NaN: 3 sources, at most MOST tokens, TOP_K each.
            everyone = [None] * ranks
            dist.all_gather_object(everyone, (ids.tolist(), masked.tolist()))
            asker = handle.route.recv_from.view(own, -1)
            for row in (asker >= 0).nonzero().tolist():
                source, token = divmod(int(asker[tuple(row)]) // TOP_K, MOST)
                if everyone[source][1][token][int(asker[tuple(row)]) % TOP_K]:
                    y[tuple(row)] = torch.nan
            if in_place:
                given = ids.copy_(given)
                weights.mul_(0.5)
            out, *_ = buffer.low_latency_combine(y, given, weights, handle)
            want = torch.zeros(tokens, HIDDEN)
            for token, k in (given >= 0).nonzero().tolist():
                want[token] += weights[token, k] * (x[token] * (given[token, k] + 1).bfloat16()).float()
            torch.testing.assert_close(out.float(), want, rtol=0.03, atol=0.03)
            ids.copy_(whole)
        usual, *_ = buffer.low_latency_combine(rows * scale, ids, weights, handle)  # the same tensor: nothing is masked
        again, *_ = buffer.low_latency_combine(rows * scale, ids.clone(), weights, handle)
        assert torch.equal(usual, again)
        ids.fill_(-1)  # the same tensor, which now names nobody
        assert not buffer.low_latency_combine(rows * scale, ids, weights, handle)[0].any()
    buffer.destroy()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.drawn)])
def test_masked_entries_are_left_out(ranks: int, inference: bool) -> None:
    run_ranks(ranks, combined, cases.fresh_seed(), inference)


def test_lists_without_some_rows() -> None:
    """Equal to the lists of a table that lacks them."""
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    ranks, tokens, top_k, num_rows = 3, 4, 2, 30
    for share in (0.0, 0.4, 1.0):
        table = torch.where(torch.rand(ranks, tokens, top_k, generator=draw) < 0.7, 0, -1)
        table[table == 0] = torch.randperm(num_rows, generator=draw)[: int((table == 0).sum())]
        numbers = torch.randint(0, 2, (ranks, tokens), generator=draw)
        left_out = torch.rand(num_rows, generator=draw) < share
        fewer = torch.where((table >= 0) & left_out[table.clamp(min=0)], -1, table)
        got = arrivals.without(arrivals.pack(table, num_rows, numbers), ranks, left_out)
        for one, other in zip(*(arrivals.defined(lists, ranks) for lists in (
            got, arrivals.pack(fewer, num_rows, numbers),
        )), strict=True):  # fmt: skip
            assert torch.equal(one, other)
