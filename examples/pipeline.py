"""Train MoE blocks under pipeline parallelism: each pipeline stage spreads its experts over the ranks of that stage.

    torchrun --standalone --nproc-per-node 4 examples/pipeline.py [1f1b | gpipe | interleaved]

Prints the loss of the pipelined model and of a dense model with the same weights.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import ep_ops
from ep_ops.nn import DenseMoE, MoELayer

HIDDEN, WIDTH, TOKENS, EXPERTS, TOP_K, MICROBATCHES, STAGES = 32, 64, 24, 6, 2, 4, 2


class Block(nn.Module):
    """A residual MoE block. ``moe`` maps [tokens, hidden] to [tokens, hidden]."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.norm, self.moe = nn.RMSNorm(HIDDEN), moe

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


# --8<-- [start:train]
def pipelined_loss(kind: str, x: Tensor, target: Tensor) -> tuple[list[nn.Module], float | None]:
    """Run forward and backward of one batch.

    Args:
        kind: "gpipe", "1f1b" or "interleaved" (two blocks on each rank).
        x, target: the batch of this rank, float32 [MICROBATCHES * TOKENS, HIDDEN].

    Returns:
        This rank's blocks, with gradients, and the mean loss over micro-batches on ranks of the last stage (else None).
    """
    mesh = init_device_mesh("cpu", (STAGES, dist.get_world_size() // STAGES), mesh_dim_names=("pp", "ep"))
    comm = ep_ops.Communicator(  # one for all blocks of this rank: they have equal sizes
        mesh["ep"],
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        max_tokens_per_rank=TOKENS,
        dtype=torch.float32,
        device="cpu",
        name=f"stage{mesh.get_local_rank('pp')}",
    )
    stage_rank, each = mesh.get_local_rank("pp"), 2 if kind == "interleaved" else 1
    numbers = [stage_rank + STAGES * i for i in range(each)]  # of this rank's blocks in the model
    blocks: list[nn.Module] = [Block(MoELayer(comm, WIDTH, seed=number)) for number in numbers]
    stages = [
        PipelineStage(block, number, STAGES * each, torch.device("cpu"), group=mesh.get_group("pp"))
        for block, number in zip(blocks, numbers, strict=True)
    ]
    if kind == "interleaved":
        schedule: Any = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_of)
    else:
        schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](stages[0], MICROBATCHES, loss_fn=loss_of)
    losses: list[Tensor] = []
    last = numbers[-1] == STAGES * each - 1
    schedule.step(*([x] if stage_rank == 0 else []), **({"target": target, "losses": losses} if last else {}))
    comm.destroy()
    return blocks, float(torch.stack(losses).detach().mean()) if last else None


# --8<-- [end:train]


def dense_loss(kind: str, x: Tensor, target: Tensor) -> float:
    """The same model with all experts in one place, without micro-batches."""
    sizes: Any = type("Sizes", (), dict(top_k=TOP_K, num_experts=EXPERTS, hidden_size=HIDDEN, dtype=torch.float32))
    for number in range(STAGES * (2 if kind == "interleaved" else 1)):
        x = Block(DenseMoE(sizes, WIDTH, seed=number))(x)
    return float(loss_of(x, target).detach())


def main(kind: str = "1f1b") -> None:
    dist.init_process_group("gloo")
    rank, across = dist.get_rank(), dist.get_world_size() // STAGES
    draw = torch.Generator().manual_seed(rank % across)  # ranks of one pipeline read the same batch
    x, target = torch.randn(2, MICROBATCHES * TOKENS, HIDDEN, generator=draw)
    _, found = pipelined_loss(kind, x, target)
    if found is not None:
        print(f"rank {rank}: loss {found:.6f} in {STAGES} stages, {dense_loss(kind, x, target):.6f} densely")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
