"""Kernels across NVLink domains that are declared, over all wires, to the bits of the reference backend (domains.py).

`torchrun --nproc-per-node 4 -m pytest tests/gpu/test_domains*.py`; the wire `nvshmem` needs an extra (docs/domains.md).
Ranks may share a GPU. Other files have calls that take several rounds, many steps, and token-major rows.
"""

from __future__ import annotations

import time

import cases
import domains
import pytest
import torch
import torch.distributed as dist
from domains import FORMAT_HIDDEN, FORMATS, TOKENS, TOP_K, both, check, drawn, expected, in_rounds, send, wrong
from operators import Call, ranks
from sharing import TURNS
from test_latency import one_is_late

ROUTES = ("random", "all_to_one_rank", "no_tokens_on_last_rank", "over_capacity", "nothing_to_last_rank", "padded")
"""Routes that one communicator can take."""

make, few = domains.make, domains.few  # fixtures


@pytest.mark.parametrize("name", ROUTES)
def test_every_operator(name, make, few, seed, together):
    rank, world_size = ranks()
    case = cases.route_cases(world_size, seed)[name]
    call = Call(case.topk_idx[rank].cuda(), case.capacity[rank], case.alignment, case.slots[rank], case.max_tokens)
    check(make, few, together, call, seed)


@pytest.mark.parametrize("tokens", ["many", "unequal", "none", "nowhere"])
def test_tokens(tokens, make, few, seed, together):
    """Results are right for as many tokens as allowed, for another number on each rank, for none, and for tokens
    without experts."""
    rank, world_size = ranks()
    count = {"many": TOKENS, "unequal": TOKENS * (rank + 1) // world_size - rank, "none": 0, "nowhere": 50}[tokens]
    idx = drawn(seed, 3, count)[1]
    if tokens == "nowhere":
        idx.fill_(-1)
    capacity = (TOKENS * world_size * TOP_K + 4 * 16) // 16 * 16
    check(make, few, together, Call(idx, capacity, 16, 0, TOKENS), seed)


@in_rounds
def test_gathered(half, make, seed, together):
    """Rows are copied where nobody can fetch them; what is asked of them stays the same."""
    x, idx, _ = drawn(seed, 1, TOKENS)
    rows = TOKENS * ranks()[1] * TOP_K
    outs = []
    with both(make, half=half, symmetric_rows=rows) as pair:
        for comm in pair:
            route, _ = comm.plan(idx, capacity=rows // 16 * 16)
            y = comm.dispatch_planned(x, route).x
            held = torch.arange(y.shape[0], device="cuda") < route.offs[-1]
            y = torch.where(held[:, None], y * 3, 0)
            outs.append(comm.combine_gathered(comm.empty_rows(y.shape[0]).copy_(y), route))
        torch.cuda.synchronize()
        with together():
            assert torch.equal(*outs)


@in_rounds
@pytest.mark.parametrize("way", FORMATS, ids=lambda way: way[0])
def test_formats(way, half, make, few, seed, monkeypatch):
    """Rows that are quantized on the way, with one rank late; the checking mode raises the first difference from the
    reference."""
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    delay = one_is_late(seed)
    name, layout = way
    with make("cute", "formats", half, [way], hidden_size=FORMAT_HIDDEN, latency_max_tokens=few) as comm:
        for step, tokens in enumerate((TOKENS, 3 + comm.rank, 0)):
            idx = drawn(seed, step, tokens)[1]
            x = torch.randn(tokens, FORMAT_HIDDEN, device="cuda").mul(10.0 ** (step - 2)).bfloat16()
            weights = torch.rand(idx.shape, device="cuda")
            delay()
            send(comm, x, idx, weights, name, layout)
            torch.cuda.synchronize()
            comm.check_errors()


@in_rounds
def test_what_one_rank_rejects(half, make, few, seed, together):
    """All are told, once, and go on."""
    with make("cute", "rejected", half, latency_max_tokens=few) as comm:
        x, idx, weights = drawn(seed, 1, 50)
        for _ in range(2):
            with together():
                if comm.rank == 0:
                    with pytest.raises(TypeError, match="x has dtype"):
                        comm.dispatch(x.float(), idx, weights)
                else:
                    comm.dispatch(x, idx, weights)
                    torch.cuda.synchronize()
                    with pytest.raises(ValueError, match="rejected by rank 0: x has dtype"):
                        comm.check_errors()
                    comm.check_errors()
            sent = comm.dispatch(x, idx, weights)
            out = comm.combine(sent.x, sent.route, sent.weights)
            torch.cuda.synchronize()
            comm.check_errors()
            with together():
                assert int(wrong(out, expected(comm, x, idx, weights))) == 0


def test_absent_rank(make, few, seed, together):
    """A rank that does not come is named by all, within the deadline, in its own domain and in others; destroy does not
    hang."""
    seconds = 2.0 * TURNS
    x, idx, _ = drawn(seed, 1, 30)
    comm = make("cute", "absent", timeout=seconds, latency_max_tokens=few)
    comm.warmup()
    absent = comm.world_size - 1
    torch.cuda.synchronize()
    dist.barrier()
    begun = time.monotonic()
    if comm.rank != absent:
        sent = comm.dispatch(x, idx)
        comm.combine(sent.x, sent.route)
        torch.cuda.synchronize()
    with together():
        if comm.rank != absent:
            assert time.monotonic() - begun < 10 * seconds
            with pytest.raises(RuntimeError, match=rf"s for rank {absent} ") as told:
                comm.check_errors()
            assert f"rank {comm.rank}, last first: " in str(told.value)
    if comm.rank == absent:
        end = time.monotonic() + 10 * seconds
        while not comm.backend.has_failed() and time.monotonic() < end:
            comm.backend.listen()
            time.sleep(0.01)
    begun = time.monotonic()
    with together():
        if comm.rank == absent:
            with pytest.raises(RuntimeError, match=rf"stopped because rank . waited .* s for rank {absent} "):
                comm.destroy()
        else:
            comm.destroy()
        assert time.monotonic() - begun < seconds
