"""Check that a token's result has the same bits in every batch and in every mode of dispatch.

    torchrun --standalone --nproc-per-node 2 examples/reproducible.py

Sends the first 1, 7 and 128 tokens of a batch through an MoE layer, in every layout, with exact and fixed buffer
sizes, as whole and split operations, and with throughput and latency kernels where there are GPUs. Raises
AssertionError if one bit differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import ep_ops
from ep_ops.nn import expert_lists, expert_of_rows, gather_rows, places_route, weights_of_places

HIDDEN, TOKENS, EXPERTS, TOP_K, MANY = 64, 128, 16, 4, 1024
BATCHES = 1, 7, TOKENS

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [T, HIDDEN], expert ids int32 [T, TOP_K], routing weights float32 [T, TOP_K] -> [T, HIDDEN]."""


def expert(x: Tensor, which: Tensor, w: Tensor) -> Tensor:
    """Multiply each row by its expert's matrix, adding in one order whatever the number of rows.

    GEMM libraries choose the order by the number of rows, so a product of theirs is not batch-invariant by itself.

    Args:
        x: rows, bfloat16 [R, HIDDEN].
        which: local expert of each row, int64 [R]; -1 for rows that hold no token.
        w: matrices of local experts, bfloat16 [El, HIDDEN, HIDDEN].
    """
    total = x.new_zeros(x.shape, dtype=torch.float32)
    for h in range(HIDDEN):
        total = torch.addcmul(total, x[:, h : h + 1].float(), w[which, h].float())
    return total.to(x.dtype)


# --8<-- [start:modes]
def modes(comm: ep_ops.Communicator, w: Tensor) -> Iterator[tuple[str, Layer]]:
    """Yield the name and the function of each way to run the layer."""

    def grouped(max_tokens: int, **how: object) -> Layer:
        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            got = comm.dispatch(x, ids, weights, max_tokens=max_tokens, **how)  # type: ignore[arg-type]
            return comm.combine(expert(got.x, expert_of_rows(got.route), w), got.route, got.weights)

        return run

    def split(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        got = comm.dispatch_wait(comm.dispatch_start(x, ids, weights, max_tokens=TOKENS))
        y = expert(got.x, expert_of_rows(got.route), w)
        return comm.combine_wait(comm.combine_start(y, got.route, got.weights))

    def token_major(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        got = comm.dispatch(x, ids, weights, layout="token_major")
        lists = expert_lists(got.local_idx, comm.num_local_experts)
        route = places_route(comm, got.route, lists)
        y = expert(gather_rows(got.x, lists), expert_of_rows(route), w)
        return comm.combine(y, route, weights_of_places(got.weights, lists))

    yield "latency kernels", grouped(TOKENS)
    yield "throughput kernels", grouped(MANY)
    yield "exact sizes", grouped(MANY, exact=True)
    yield "padded", grouped(TOKENS, layout="padded", slots=comm.world_size * TOKENS)
    yield "split", split
    yield "token-major", token_major


# --8<-- [end:modes]


def main() -> None:
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    with ep_ops.Communicator(
        num_experts=EXPERTS, hidden_size=HIDDEN, top_k=TOP_K, max_tokens_per_rank=MANY
    ) as comm, torch.no_grad():  # fmt: skip
        torch.manual_seed(comm.rank)
        x = torch.randn(TOKENS, HIDDEN, device=comm.device, dtype=comm.dtype)
        weights, ids = torch.rand(TOKENS, EXPERTS, device=comm.device).softmax(-1).topk(TOP_K)
        w = torch.randn(comm.num_local_experts, HIDDEN, HIDDEN, device=comm.device, dtype=comm.dtype)
        runs = dict(modes(comm, w))
        expected = runs["throughput kernels"](x, ids, weights)
        for name, run in runs.items():
            for tokens in BATCHES:
                out = run(x[:tokens], ids[:tokens], weights[:tokens])
                assert torch.equal(out, expected[:tokens]), f"{name}, {tokens} tokens: other bits than {TOKENS} tokens"
        print(f"rank {comm.rank} of {comm.world_size}: the same bits in {len(runs)} modes, {BATCHES} tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
