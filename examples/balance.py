"""Balance an MoE layer whose router prefers some experts by replicas that are placed according to the measured load.

    torchrun --standalone --nproc-per-node 2 examples/balance.py

Prints the number of rows of the busiest rank, as a multiple of the mean, before and after, and the cost of moving
weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ep_ops.moe import MoECommunicator, MoECommunicatorConfig, Move, balanced, moves
from ep_ops.nn import grouped_mm

HIDDEN, TOKENS, EXPERTS, TOP_K, SPARE, STEPS = 64, 200, 16, 2, 2, 5


def layer(moe: MoECommunicator, x: Tensor, experts: Tensor, weights: Tensor, w: Tensor) -> Tensor:
    """x [T, H], expert ids and weights [T, K], w [local experts, H, H] -> [T, H]."""
    output, handle = moe.dispatch(x, experts, weights)
    return moe.combine(grouped_mm(output.x, w, output.offs), handle)


# --8<-- [start:move]
def move(moe: MoECommunicator, parameters: Sequence[Tensor], wanted: Sequence[Move]) -> None:
    """Copy the weights of moved experts in ``parameters``, [local experts, ...], to their new places. Collective."""
    held, first = moe.comm.experts_per_rank, moe.comm.first_local_expert
    rank_of = [dist.get_global_rank(moe.comm.group, rank) for rank, count in enumerate(held) for _ in range(count)]
    mine = range(first, first + moe.comm.num_local_experts)
    transfers: list[dist.P2POp] = []
    arrived: list[tuple[Tensor, Tensor]] = []
    for parameter in parameters:
        of = parameter.detach()
        for _, source, place, crosses in wanted:
            if source in mine and crosses:
                transfers.append(dist.P2POp(dist.isend, of[source - first], rank_of[place], moe.comm.group))
            if place in mine:
                copy = torch.empty_like(of[0]) if crosses else of[source - first].clone()
                arrived.append((of[place - first], copy))
                if crosses:
                    transfers.append(dist.P2POp(dist.irecv, copy, rank_of[source], moe.comm.group))
    for request in dist.batch_isend_irecv(transfers) if transfers else []:
        request.wait()
    for there, copy in arrived:
        there.copy_(copy)


def rebalance(moe: MoECommunicator, parameters: Sequence[Tensor]) -> tuple[int, int]:
    """Place experts according to the counted load, and reset the load.

    Returns:
        Number of experts that moved, and bytes of weights that were sent between ranks.
    """
    held, before = moe.comm.experts_per_rank, moe.placement
    assert before is not None
    after = balanced(moe.load().tolist(), held, before)
    wanted = moves(before, after, held)
    move(moe, parameters, wanted)
    moe.place(after)
    moe.reset_load()
    each = sum(parameter[0].nbytes for parameter in parameters)
    return len(wanted), each * sum(one.crosses for one in wanted)


# --8<-- [end:move]


def busiest(moe: MoECommunicator, before: Tensor) -> float:
    """Return the rows of the busiest rank since it had received ``before``, as a multiple of the mean."""
    rows = moe.comm.statistics().rows.sum() - before
    all_rows = [torch.empty_like(rows) for _ in range(moe.comm.world_size)]
    dist.all_gather(all_rows, rows)
    return float(torch.stack(all_rows).max() / torch.stack(all_rows).float().mean())


def main() -> None:
    dist.init_process_group()
    spare = SPARE * dist.get_world_size()  # physical experts in addition to one for each expert
    config = MoECommunicatorConfig(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        max_tokens_per_rank=TOKENS,
        dtype=torch.float32,
        placement=[*range(EXPERTS), *range(spare)],
        statistics=True,
    )
    with MoECommunicator(config, device="cpu") as moe:
        draw = torch.Generator().manual_seed(0)
        everywhere = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=draw) / HIDDEN**0.5
        preferred = torch.linspace(3, 0, EXPERTS)  # added to the router's random scores
        w = everywhere[list(moe.local_experts)]
        draw.manual_seed(moe.comm.rank + 1)  # different tokens on each rank
        batches = []
        for _ in range(STEPS):
            weights, experts = (torch.randn(TOKENS, EXPERTS, generator=draw) + preferred).topk(TOP_K)
            batches.append((torch.randn(TOKENS, HIDDEN, generator=draw), experts, weights.softmax(-1)))

        outs = [layer(moe, *batch, w) for batch in batches]
        before = busiest(moe, torch.tensor(0))
        moved, crossed = rebalance(moe, [w])
        rows = moe.comm.statistics().rows.sum()
        again = [layer(moe, *batch, w) for batch in batches]
        after = busiest(moe, rows)
        error = max(float((a - b).norm() / a.norm()) for a, b in zip(outs, again, strict=True))
        print(
            f"rank {moe.comm.rank} of {moe.comm.world_size}: the busiest rank had {before:.2f} times the mean, now"
            f" {after:.2f}; {moved} of {moe.num_physical_experts} experts moved, {crossed} bytes to other ranks;"
            f" results differ by {error:.1e}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
