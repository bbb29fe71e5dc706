"""Train experts as batched products over the padded layout, [local experts, slots, hidden].

    torchrun --standalone --nproc-per-node 2 examples/padded.py

Prints by how much the result and the gradients differ from those of the grouped layout.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import ep_ops
from ep_ops.nn import grouped_mm, mask_rows

HIDDEN, WIDTH, TOKENS, EXPERTS, TOP_K = 64, 96, 100, 8, 4


# --8<-- [start:layer]
def padded(
    comm: ep_ops.Communicator, x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, slots: int
) -> Tensor:
    """Run an MoE layer whose experts are two batched products.

    Args:
        x: tokens [T, H]. ids, weights: expert ids and routing weights [T, K].
        w_in, w_out: of local experts, [El, H, F] and [El, F, H].
        slots: rows of each local expert, a multiple of ``comm.alignment``. Rows that do not fit are dropped.
    """
    got = comm.dispatch(x, ids, weights, layout="padded", slots=slots)
    h = mask_rows(got.x, got.route).view(comm.num_local_experts, slots, -1)
    y = torch.bmm(torch.relu(torch.bmm(h, w_in)), w_out).flatten(0, 1)
    return comm.combine(mask_rows(y, got.route), got.route, got.weights)


# --8<-- [end:layer]


def grouped(comm: ep_ops.Communicator, x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Run the same layer on rows grouped by expert, of which none is dropped."""
    got = comm.dispatch(x, ids, weights)
    y = grouped_mm(torch.relu(grouped_mm(got.x, w_in, got.route.offs)), w_out, got.route.offs)
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
        weights, ids = torch.rand(TOKENS, EXPERTS).softmax(-1).topk(TOP_K)
        w_in = torch.randn(comm.num_local_experts, HIDDEN, WIDTH) / HIDDEN**0.5
        w_out = torch.randn(comm.num_local_experts, WIDTH, HIDDEN) / WIDTH**0.5
        leaves = [t.requires_grad_() for t in (x, weights, w_in, w_out)]
        slots = -(-comm.world_size * TOKENS // comm.alignment) * comm.alignment  # the worst case: nothing is dropped
        results = []
        for out in (
            padded(comm, x, ids, weights, w_in, w_out, slots),
            grouped(comm, x, ids, weights, w_in, w_out),
        ):
            results.append([out.detach(), *torch.autograd.grad(out.square().mean(), leaves)])
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True)]
        print(f"rank {comm.rank} of {comm.world_size}: results and gradients differ by {max(errors):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
