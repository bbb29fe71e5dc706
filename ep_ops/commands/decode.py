"""`ep-ops demo --decode`: a decode step of a stack of MoE layers, captured once and replayed.

Every layer routes its tokens, sends them with ``Communicator.dispatch``, runs all experts of a rank as one grouped
product, and returns the results with ``Communicator.combine``. On GPUs the whole step is one CUDA graph.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ep_ops
from ep_ops.commands.demo import Options
from ep_ops.commands.launch import process_group

EXPERTS, TOP_K, LAYERS = 64, 8, 4


class DecodeLayer(nn.Module):
    """Router, dispatch, experts, combine, and a residual connection."""

    def __init__(self, comm: ep_ops.Communicator, options: Options, seed: int) -> None:
        super().__init__()
        self.comm, self.tokens = comm, options.tokens
        draw = torch.Generator().manual_seed(seed)
        hidden, new = options.hidden_size, {"device": comm.device, "dtype": options.dtype}
        self.router = nn.Parameter(torch.randn(hidden, EXPERTS, generator=draw).to(comm.device))
        scale = torch.randn(EXPERTS, hidden, hidden, generator=draw)
        own = slice(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
        self.experts = nn.Parameter((scale[own] / hidden**0.5).to(**new))

    def forward(self, x: Tensor) -> Tensor:
        scores, topk_idx = (x.float() @ self.router).softmax(-1).topk(self.comm.top_k)
        weights = scores / scores.sum(-1, keepdim=True)
        room: dict[str, Any] = {"layout": "padded", "slots": self.slots, "max_tokens": self.tokens}
        rows = self.comm.dispatch(x, topk_idx.int(), weights, alignment=1, **room)
        grouped = rows.x.view(self.comm.num_local_experts, self.slots, -1)
        y = torch.tanh(torch.bmm(grouped, self.experts)).view_as(rows.x)
        out = self.comm.combine(y, rows.route, rows.weights)
        return nn.functional.rms_norm(x + out, x.shape[-1:])

    @property
    def slots(self) -> int:
        """Rows of an expert in the worst case, in which every token of every rank names it."""
        return self.comm.world_size * self.tokens


def decode(rank: int, port: int, world_size: int, options: Options) -> None:
    """Run one process of the demo, which prints µs per step and compares replayed steps with eager ones. CPUs run eager
    steps again."""
    with process_group(rank, port, world_size, options.device) as device, torch.no_grad():
        with options.communicator(EXPERTS, TOP_K, options.tokens, device) as comm:
            _steps(comm, options)


def _steps(comm: ep_ops.Communicator, options: Options) -> None:
    model = nn.Sequential(*(DecodeLayer(comm, options, seed) for seed in range(LAYERS)))
    draw = torch.Generator(device=comm.device).manual_seed(comm.rank)
    shape = (options.tokens, options.hidden_size)
    first = torch.randn(shape, generator=draw, device=comm.device).to(options.dtype)
    expected = first
    for _ in range(3):
        expected = model(expected)

    x, on_gpu = first.clone(), comm.device.type == "cuda"
    replay = _captured(comm, model, x) if on_gpu else lambda: x.copy_(model(x))
    x.copy_(first)
    for _ in range(3):
        replay()
    error = float((x.float() - expected.float()).norm() / expected.float().norm())
    took = _time(comm, replay, options.steps)
    comm.check_errors()
    if comm.rank == 0:
        print(
            f"{comm.world_size} ranks, {comm.backend.name} backend: {LAYERS} layers of {EXPERTS}"
            f" experts, top {TOP_K}, hidden {options.hidden_size}, {options.tokens} tokens per rank\n"
            f"{options.steps} decode steps: {took:.0f} µs per step, {took / LAYERS:.0f} µs per layer;"
            f" {'replayed against eager' if on_gpu else 'the same steps again'}: {error:.1e}"
        )
    # On a CPU matrix products round as the addresses of their operands happen to lie, so that steps differ a little.
    if not error < (1e-5 if on_gpu else 1e-2):
        what = "replayed steps differ from eager ones" if on_gpu else "the same steps differ"
        raise RuntimeError(f"rank {comm.rank}: {what} by {error:.1e}")


def _captured(comm: ep_ops.Communicator, model: nn.Module, x: Tensor):
    """Capture one step in place on ``x`` as a CUDA graph and return its replay."""
    comm.warmup()
    side = torch.cuda.Stream(comm.device)
    side.wait_stream(torch.cuda.current_stream(comm.device))
    with torch.cuda.stream(side):
        model(x)
    torch.cuda.current_stream(comm.device).wait_stream(side)
    torch.cuda.synchronize(comm.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(model(x))
    return graph.replay


def _time(comm: ep_ops.Communicator, replay, steps: int) -> float:
    """Return µs per step on the slowest rank, the median of ten runs."""
    synchronize = torch.cuda.synchronize if comm.device.type == "cuda" else lambda: None
    each = max(1, steps // 10)
    took = []
    for _ in range(10):
        synchronize()
        begin = time.perf_counter()
        for _ in range(each):
            replay()
        synchronize()
        took.append(1e6 * (time.perf_counter() - begin) / each)
    slowest = torch.tensor(statistics.median(took), dtype=torch.float64, device=comm.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
