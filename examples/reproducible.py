"""Check that a token's result has the same bits in every batch and in every mode of dispatch.

    torchrun --standalone --nproc-per-node 2 examples/reproducible.py

Sends the first 1, 7, 64 and 256 tokens of a batch through an MoE layer, in every layout, with exact and fixed buffer
sizes, as whole and split operations, and with throughput and latency kernels where there are GPUs. Experts are
computed by ``few_rows_mlp``, which adds in one order. Raises AssertionError if one bit differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import ep_ops
from ep_ops import Route
from ep_ops.nn import expert_lists, few_rows_mlp, gather_rows, places_route, weights_of_places

HIDDEN, WIDTH, TOKENS, EXPERTS, TOP_K, MANY = 64, 32, 256, 16, 4, 1024
BATCHES = 1, 7, 64, TOKENS

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [T, HIDDEN], expert ids int32 [T, TOP_K], routing weights float32 [T, TOP_K] -> [T, HIDDEN]."""


# --8<-- [start:modes]
def modes(comm: ep_ops.Communicator, w_in: Tensor, w_out: Tensor) -> Iterator[tuple[str, Layer]]:
    """Yield the name and the function of each way to run the layer."""

    def experts(x: Tensor, route: Route) -> Tensor:
        return few_rows_mlp(x, w_in, w_out, route, comm.world_size)

    def grouped(max_tokens: int, **how: object) -> Layer:
        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            got = comm.dispatch(x, ids, weights, max_tokens=max_tokens, **how)  # type: ignore[arg-type]
            return comm.combine(experts(got.x, got.route), got.route, got.weights)

        return run

    def split(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        got = comm.dispatch_wait(comm.dispatch_start(x, ids, weights, max_tokens=TOKENS))
        return comm.combine_wait(comm.combine_start(experts(got.x, got.route), got.route, got.weights))

    def token_major(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        got = comm.dispatch(x, ids, weights, layout="token_major")
        lists = expert_lists(got.local_idx, comm.num_local_experts)
        route = places_route(comm, got.route, lists)
        return comm.combine(experts(gather_rows(got.x, lists), route), route, weights_of_places(got.weights, lists))

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
    with (
        ep_ops.Communicator(
            num_experts=EXPERTS, hidden_size=HIDDEN, top_k=TOP_K, max_tokens_per_rank=MANY, dtype=torch.bfloat16
        ) as comm,
        torch.no_grad(),
    ):
        torch.manual_seed(comm.rank)
        x = torch.randn(TOKENS, HIDDEN, device=comm.device, dtype=comm.dtype)
        weights, ids = torch.rand(TOKENS, EXPERTS, device=comm.device).softmax(-1).topk(TOP_K)
        new = {"device": comm.device, "dtype": comm.dtype}
        w_in = torch.randn(comm.num_local_experts, HIDDEN, 2 * WIDTH, **new) / HIDDEN**0.5
        w_out = torch.randn(comm.num_local_experts, WIDTH, HIDDEN, **new) / WIDTH**0.5
        runs = dict(modes(comm, w_in, w_out))
        expected = runs["throughput kernels"](x, ids, weights)
        for name, run in runs.items():
            for tokens in BATCHES:
                out = run(x[:tokens], ids[:tokens], weights[:tokens])
                assert torch.equal(out, expected[:tokens]), f"{name}, {tokens} tokens: other bits than {TOKENS} tokens"
        print(f"rank {comm.rank} of {comm.world_size}: the same bits in {len(runs)} modes, {BATCHES} tokens")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
