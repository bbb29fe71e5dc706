"""Run an MoE layer on token-major rows: one row for each (token, rank), which the experts' GEMM gathers by lists.

    torchrun --standalone --nproc-per-node 2 examples/token_major.py

Compares results and gradients with those of rows that are grouped by expert.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import ep_ops
from ep_ops.nn import expert_lists, gather_mm, grouped_mm, places_route, weights_of_places

HIDDEN, TOKENS, EXPERTS, TOP_K = 64, 100, 8, 4


# --8<-- [start:layer]
def token_major(comm: ep_ops.Communicator, x: Tensor, experts: Tensor, weights: Tensor, w: Tensor) -> Tensor:
    """x [T, H], expert ids and weights [T, K], w [local experts, H, H] -> [T, H]."""
    got = comm.dispatch(x, experts, weights, layout="token_major")  # rows [R, H], local ids and weights [R, K]
    lists = expert_lists(got.local_idx, comm.num_local_experts)
    y = gather_mm(got.x, w, lists)  # ep_ops.integrations.quack provides a GEMM that copies no rows
    route = places_route(comm, got.route, lists)  # of the rows of y, one for each (row, k)
    return comm.combine(y, route, weights_of_places(got.weights, lists))


# --8<-- [end:layer]


def grouped(comm: ep_ops.Communicator, x: Tensor, experts: Tensor, weights: Tensor, w: Tensor) -> Tensor:
    """x [T, H], expert ids and weights [T, K], w [local experts, H, H] -> [T, H]."""
    got = comm.dispatch(x, experts, weights)
    y = grouped_mm(got.x, w, got.route.offs)
    return comm.combine(y, got.route, got.weights)


def main() -> None:
    dist.init_process_group()
    with ep_ops.Communicator(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        max_tokens_per_rank=TOKENS,
        dtype=torch.float32,
        device="cpu",
    ) as comm:
        x = torch.randn(TOKENS, HIDDEN)
        weights, experts = torch.rand(TOKENS, EXPERTS).softmax(-1).topk(TOP_K)
        w = torch.randn(comm.num_local_experts, HIDDEN, HIDDEN) / HIDDEN**0.5
        learns = [t.requires_grad_() for t in (x, weights, w)]
        results = []
        for out in (token_major(comm, x, experts, weights, w), grouped(comm, x, experts, weights, w)):
            gradients = torch.autograd.grad(out.square().mean(), learns)
            results.append([out.detach(), *gradients])
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
        print(f"rank {comm.rank} of {comm.world_size}: results and gradients differ by {max(errors):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
