"""Decode with an MoE layer: a step with few tokens is captured in a CUDA graph once and replayed.

    torchrun --standalone --nproc-per-node 2 examples/decode.py

On GPUs the layer has the sizes of Qwen3-30B, and the time of a step is compared with the time in which memory delivers
the weights of the experts that tokens name. Without a GPU the same steps run eagerly, on a small layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ep_ops
from ep_ops.nn import MoELayer

TOKENS, STEPS = 8, 20


class Sizes(NamedTuple):
    hidden: int
    width: int
    experts: int
    top_k: int


SMALL, QWEN3_30B = Sizes(64, 128, 8, 2), Sizes(2048, 768, 128, 8)


def main() -> None:
    dist.init_process_group()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    sizes = QWEN3_30B if on_gpu else SMALL
    with (
        torch.no_grad(),
        ep_ops.Communicator(
            num_experts=sizes.experts,
            hidden_size=sizes.hidden,
            top_k=sizes.top_k,
            max_tokens_per_rank=256,  # for prefill; decode passes a smaller bound
            dtype=torch.bfloat16 if on_gpu else torch.float32,
        ) as comm,
    ):
        layer = MoELayer(comm, intermediate_size=sizes.width)
        first = torch.randn(TOKENS, sizes.hidden, device=comm.device).to(comm.dtype)
        x = decode(layer, first, STEPS)
        expected = first
        for _ in range(STEPS):
            expected = one_step(layer, expected)
        error = float((x - expected).float().norm() / expected.float().norm())
        how = "replayed" if on_gpu else "eager"
        print(f"rank {comm.rank} of {comm.world_size}: {STEPS} steps, {how}, differ by {error:.1e} from eager ones")
        if on_gpu:
            took, floor = replay_us(captured(layer, first.clone())), floor_us(layer, first)
            ratio, routing = took / floor, router_us(layer, first)
            print(
                f"rank {comm.rank}: {took:.0f} µs per step, {ratio:.2f} × the {floor:.0f} µs for reading weights; "
                f"{routing:.0f} µs of it in the router"
            )
        comm.check_errors()
    dist.destroy_process_group()


def one_step(layer: MoELayer, x: Tensor) -> Tensor:
    """x [at most TOKENS, HIDDEN] on every rank. ``max_tokens`` must be equal on all ranks. A small value selects
    the latency kernels and a small receive buffer."""
    return nn.functional.rms_norm(x + layer(x, max_tokens=TOKENS), x.shape[-1:])


def decode(layer: MoELayer, x: Tensor, steps: int) -> Tensor:
    """Return x after ``steps`` steps."""
    x = x.clone()
    run = captured(layer, x) if x.is_cuda else lambda: x.copy_(one_step(layer, x))
    for _ in range(steps):
        run()
    return x


def captured(layer: MoELayer, x: Tensor) -> Callable[[], None]:
    """Capture one step in place on x as a CUDA graph. All ranks capture it, and replay it equally often."""
    layer.comm.warmup()  # compiles all kernels, which is not possible during a capture
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        one_step(layer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(one_step(layer, x))
    return graph.replay


def router_us(layer: MoELayer, x: Tensor) -> float:
    """Return µs of the replayed router alone, which is several small kernels of PyTorch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.router(x)
    return replay_us(graph.replay)


def replay_us(run: Callable[[], None]) -> float:
    """Return µs of a call of ``run``, which replays a graph."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    begin.record()
    for _ in range(STEPS):
        run()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / STEPS


def floor_us(layer: MoELayer, x: Tensor) -> float:
    """Return the µs in which memory, by its data sheet, delivers the weights of this rank's experts that tokens of all
    ranks name."""
    comm, gpu = layer.comm, torch.cuda.get_device_properties(x.device)
    topk_idx, *_ = layer.router(x)
    named = torch.zeros(comm.num_experts, device=x.device)
    named[topk_idx.flatten().long()] = 1
    dist.all_reduce(named, op=dist.ReduceOp.MAX)
    here = named[comm.first_local_expert :][: comm.num_local_experts].sum()
    expert = sum(weight.shape[1:].numel() * weight.element_size() for weight in layer.experts.parameters())
    return float(here) * expert / (2e3 * gpu.memory_clock_rate * gpu.memory_bus_width / 8) * 1e6


if __name__ == "__main__":
    main()
