"""Compare an MoE layer that calls ``all_to_all_single`` with one that uses ep_ops: results and gradients.

    torchrun --standalone --nproc-per-node 2 examples/port_all_to_all.py

The hand-written layer needs a number of ranks that divides the 8 experts. ep_ops runs on any number of ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

import ep_ops
from ep_ops.nn import grouped_mm

HIDDEN, TOKENS, EXPERTS, TOP_K = 64, 100, 8, 2


# --8<-- [start:before]
def by_hand(x: Tensor, experts: Tensor, weights: Tensor, w: Tensor) -> Tensor:
    """x [T, H], expert ids and weights [T, K], w [local experts, H, H] -> [T, H]."""
    ranks, (local, *_) = dist.get_world_size(), w.shape
    order = experts.flatten().argsort(stable=True)  # every (token, k), sorted by expert
    token = order // experts.shape[1]
    send_counts = experts.flatten().bincount(minlength=ranks * local)  # rows for each expert
    recv_counts = torch.empty_like(send_counts)
    dist.all_to_all_single(recv_counts, send_counts)  # rows of each rank for each local expert
    send = send_counts.view(ranks, local).sum(1).tolist()  # synchronizes the host
    receive = recv_counts.view(ranks, local).sum(1).tolist()

    rows = all_to_all_single_autograd(x[token], receive, send, dist.group.WORLD)
    expert = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(recv_counts)
    by_expert = expert.argsort(stable=True)  # received rows are in the order of source ranks
    offs = recv_counts.view(ranks, local).sum(0).cumsum(0).int()
    y = grouped_mm(rows[by_expert], w, offs)[by_expert.argsort()]

    back = all_to_all_single_autograd(y, send, receive, dist.group.WORLD)
    weighted = back * weights.flatten()[order].unsqueeze(1)
    return torch.zeros_like(x, dtype=weighted.dtype).index_add(0, token, weighted).to(x.dtype)


# --8<-- [end:before]


# --8<-- [start:after]
def with_ep_ops(comm: ep_ops.Communicator, x: Tensor, experts: Tensor, weights: Tensor, w: Tensor) -> Tensor:
    """x [T, H], expert ids and weights [T, K], w [local experts, H, H] -> [T, H]."""
    got = comm.dispatch(x, experts, weights)
    y = grouped_mm(got.x, w, got.route.offs)
    return comm.combine(y, got.route, got.weights)


# --8<-- [end:after]


def main() -> None:
    dist.init_process_group()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    with ep_ops.Communicator(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        max_tokens_per_rank=TOKENS,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
    ) as comm:
        x = torch.randn(TOKENS, HIDDEN, device=comm.device).to(comm.dtype)
        weights, experts = torch.rand(TOKENS, EXPERTS, device=comm.device).softmax(-1).topk(TOP_K)
        w = (torch.randn(comm.num_local_experts, HIDDEN, HIDDEN, device=comm.device) / HIDDEN**0.5).to(comm.dtype)
        learns = [t.requires_grad_() for t in (x, weights, w)]
        results = []
        for out in (by_hand(x, experts, weights, w), with_ep_ops(comm, x, experts, weights, w)):
            gradients = torch.autograd.grad(out.float().square().mean(), learns)
            results.append([out.detach(), *gradients])
        errors = [float((a - b).float().norm() / b.float().norm()) for a, b in zip(*results, strict=True)]
        print(f"rank {comm.rank} of {comm.world_size}: results and gradients differ by {max(errors):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
