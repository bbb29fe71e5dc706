"""Decode with an MoE layer: a step with few tokens is captured in a CUDA graph once and replayed.

    torchrun --standalone --nproc-per-node 2 examples/decode.py

Without a GPU the same steps run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ep_ops
from ep_ops.nn import MoELayer

HIDDEN, TOKENS, STEPS = 64, 8, 20


def main() -> None:
    dist.init_process_group()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    with (
        torch.no_grad(),
        ep_ops.Communicator(
            num_experts=8,
            hidden_size=HIDDEN,
            top_k=2,
            max_tokens_per_rank=256,  # for prefill; decode passes a smaller bound
            dtype=torch.bfloat16 if on_gpu else torch.float32,
        ) as comm,
    ):
        layer = MoELayer(comm, intermediate_size=128)
        first = torch.randn(TOKENS, HIDDEN, device=comm.device).to(comm.dtype)
        x = decode(layer, first, STEPS)
        expected = first
        for _ in range(STEPS):
            expected = one_step(layer, expected)
        error = float((x - expected).float().norm() / expected.float().norm())
        how = "replayed" if on_gpu else "eager"
        print(f"rank {comm.rank} of {comm.world_size}: {STEPS} steps, {how}, differ by {error:.1e} from eager ones")
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


if __name__ == "__main__":
    main()
