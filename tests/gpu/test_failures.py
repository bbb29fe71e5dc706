"""What goes wrong on a device is said on the host: nothing hangs, nothing is sent to nowhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import ep_ops
from cute_kernels import jit

CONFIG = dict(num_experts=8, hidden_size=64, top_k=2, max_tokens_per_rank=64, latency_max_tokens=0, backend="cute")


def inputs(rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator(device="cuda").manual_seed(rank)
    x = torch.randn(32, 64, generator=gen, device="cuda").bfloat16()
    return x, torch.randint(0, 8, (32, 2), generator=gen, device="cuda", dtype=torch.int32)


def test_bad_expert(together):
    with ep_ops.Communicator(**CONFIG) as comm:
        x, idx = inputs(comm.rank)
        idx[3, 1] = 8
        sent = comm.dispatch(x, idx)
        torch.cuda.synchronize()
        with together():
            assert int(sent.route.send_rows[3, 1]) == -1
            with pytest.raises(ValueError, match=r"topk_idx holds 8 at flat index 7 .* from -1 \(none\) to 7"):
                comm.check_errors()
        idx[3, 1] = 0
        sent = comm.dispatch(x, idx)  # usable again
        out = comm.combine(sent.x, sent.route)
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert not out.isnan().any()


def test_absent_rank(together):
    """A rank that does not come is named by all that waited for it, and their kernels end."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        pytest.skip("needs several ranks")
    comm = ep_ops.Communicator(timeout=1.0, **CONFIG)
    comm.warmup()
    absent = dist.get_world_size() - 1
    x, idx = inputs(comm.rank)
    if comm.rank != absent:
        sent = comm.dispatch(x, idx)
        comm.combine(sent.x, sent.route)
        torch.cuda.synchronize()
    with together():
        if comm.rank != absent:
            with pytest.raises(RuntimeError, match=rf"waited 1 s for rank {absent} "):
                comm.dispatch(x, idx)
    comm.destroy()


def test_order_mismatch(together):
    """Ranks that call different operators are told so, long before the deadline."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        pytest.skip("needs several ranks")
    comm = ep_ops.Communicator(timeout=20.0, **CONFIG)
    comm.warmup()
    x, idx = inputs(comm.rank)
    sent = comm.dispatch(x, idx)
    torch.cuda.synchronize()
    dist.barrier()
    if comm.rank == 0:
        comm.plan(idx)
    else:
        comm.combine(sent.x, sent.route)
    torch.cuda.synchronize()
    with together():
        with pytest.raises(RuntimeError, match="call operators in different orders"):
            comm.check_errors()
    comm.destroy()


def test_compile_during_capture(together, monkeypatch):
    config = dict(CONFIG, hidden_size=88)
    monkeypatch.setenv("EP_OPS_CACHE_DIR", "")
    with ep_ops.Communicator(**config) as comm:
        idx = inputs(comm.rank)[1]
        graph = torch.cuda.CUDAGraph()
        with together():
            with pytest.raises(jit.CompileDuringCapture, match="warmup"):
                with torch.cuda.graph(graph):
                    comm.plan(idx)
