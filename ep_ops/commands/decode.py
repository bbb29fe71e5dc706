"""`ep-ops demo --decode`: a decode step of a stack of MoE layers, captured once and replayed.

Every layer is an ``ep_ops.nn.MoELayer`` with a residual connection. On GPUs the whole step is one CUDA graph, and its
time is compared with the time in which memory delivers the weights of the experts that tokens name.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ep_ops
from ep_ops.commands.demo import Options
from ep_ops.commands.launch import process_group
from ep_ops.nn import MoELayer

EXPERTS, TOP_K, LAYERS = 64, 8, 4


class DecodeLayer(nn.Module):
    """An MoE layer and a residual connection."""

    def __init__(self, comm: ep_ops.Communicator, options: Options, seed: int) -> None:
        super().__init__()
        self.tokens = options.tokens
        self.moe = MoELayer(comm, options.hidden_size * 3 // 4, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x + self.moe(x, max_tokens=self.tokens), x.shape[-1:])


def decode(rank: int, store: str, world_size: int, options: Options) -> None:
    """Run one process of the demo, which prints µs per step and compares replayed steps with eager ones. CPUs run eager
    steps again."""
    with process_group(rank, store, world_size, options.device) as device, torch.no_grad():
        with options.communicator(EXPERTS, TOP_K, options.tokens, device) as comm:
            _steps(comm, options)


def _steps(comm: ep_ops.Communicator, options: Options) -> None:
    layers = [DecodeLayer(comm, options, seed) for seed in range(LAYERS)]
    model = nn.Sequential(*layers)
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
    floor = _floor(comm, layers, x) if on_gpu else None
    comm.check_errors()
    if comm.rank == 0:
        print(
            f"{comm.world_size} ranks, {comm.backend.name} backend: {LAYERS} layers of {EXPERTS}"
            f" experts, top {TOP_K}, hidden {options.hidden_size}, {options.tokens} tokens per rank\n"
            f"{options.steps} decode steps: {took:.0f} µs per step, {took / LAYERS:.0f} µs per layer;"
            f" {'replays differ from eager steps' if on_gpu else 'a second run differs'} by {error:.1e}"
        )
        if floor is not None:
            print(
                f"{took / floor:.2f} × the {floor:.0f} µs in which memory delivers the weights of the named experts, by"
                " the data sheet; ep-ops bench decode measures memory and compares GEMMs"
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


def _floor(comm: ep_ops.Communicator, layers: list[DecodeLayer], x: Tensor) -> float:
    """Return the time in which memory delivers the weights that one step reads, on the rank that reads most, in µs."""
    named = torch.zeros((), dtype=torch.float64, device=comm.device)
    for layer in layers:
        topk_idx, *_ = layer.moe.router(x)
        counts = torch.zeros(comm.num_experts, device=comm.device)
        counts[topk_idx.flatten().long()] = 1
        dist.all_reduce(counts)
        named += (counts[comm.first_local_expert :][: comm.num_local_experts] > 0).sum()
        x = layer(x)
    dist.all_reduce(named, op=dist.ReduceOp.MAX)
    weights = layers[0].moe.experts.parameters()
    expert = sum(weight.shape[1:].numel() * weight.element_size() for weight in weights)
    return float(named) * expert / memory_speed(comm.device) * 1e6


def memory_speed(device: torch.device) -> float:
    """Return the bytes per second of a GPU's memory by its data sheet: its clock in kHz, with two transfers a cycle,
    times its bus width in bits."""
    gpu = torch.cuda.get_device_properties(device)
    return 2 * 1e3 * gpu.memory_clock_rate * gpu.memory_bus_width / 8


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
