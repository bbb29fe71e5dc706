"""Train a small MoE layer under DistributedDataParallel, each rank on its own tokens.

    torchrun --standalone --nproc-per-node 2 examples/train.py

Runs on GPUs if there are any, else on CPUs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ep_ops
from ep_ops.nn import MoELayer, clip_grad_norm_, keep_experts_apart

HIDDEN, TOKENS, STEPS = 64, 256, 60


def main() -> None:
    dist.init_process_group()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    with ep_ops.Communicator(
        num_experts=8,
        hidden_size=HIDDEN,
        top_k=2,
        max_tokens_per_rank=TOKENS,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
    ) as comm:
        train(comm)
    dist.destroy_process_group()


def train(comm: ep_ops.Communicator) -> None:
    """Train the layer to multiply tokens by a matrix, and print the first and last mean loss of all ranks."""
    layer = MoELayer(comm, intermediate_size=128)  # holds this rank's experts only
    model = DistributedDataParallel(keep_experts_apart(layer, ranks=comm.world_size))
    groups = [{"params": layer.router.parameters()}, {"params": layer.experts.parameters()}]  # tensors and DTensors
    optimizer = torch.optim.AdamW(groups, lr=1e-2)

    goal = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)) / HIDDEN**0.5
    goal = goal.to(comm.device, comm.dtype)
    draw = torch.Generator(device=comm.device).manual_seed(comm.rank)  # different tokens on each rank
    losses = []
    for _ in range(STEPS):
        x = torch.randn(TOKENS, HIDDEN, generator=draw, device=comm.device).to(comm.dtype)
        loss = (model(x) - x @ goal).float().square().mean()
        loss.backward()
        clip_grad_norm_(model, 1.0)  # the norm is equal on all ranks and counts each expert once
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    comm.check_errors()  # raises errors that kernels have reported

    mean = torch.stack([losses[0], losses[-1]]) / comm.world_size
    dist.all_reduce(mean)
    if comm.rank == 0:
        print(f"{comm.world_size} ranks, {STEPS} steps: loss {mean[0]:.3f} -> {mean[1]:.3f}")


if __name__ == "__main__":
    main()
