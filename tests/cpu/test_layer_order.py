"""Checking mode names layers that ranks call in different orders."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import ep_ops
from ep_ops import nn


class Own(nn.ExpertModule):
    """A user's experts, which scale their rows."""

    def __init__(self, comm: ep_ops.Communicator) -> None:
        super().__init__()
        self.comm = comm
        self.scale = torch.nn.Parameter(self.from_local(torch.ones(comm.num_local_experts, 1)))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sent = self.comm.dispatch(x, ids, weights)
        return self.comm.combine(sent.x * self.local_weight("scale").mean(), sent.route, sent.weights)


def run(kind: str) -> str:
    torch.manual_seed(dist.get_rank())
    sizes = dict(num_experts=8, hidden_size=16, top_k=2, max_tokens_per_rank=16, dtype=torch.float32, device="cpu")
    with ep_ops.Communicator(**sizes, check="1", timeout=20) as comm:
        x, ids, weights = torch.randn(5, 16), torch.rand(5, 8).topk(2).indices, torch.rand(5, 2)
        more = (ids, weights)
        if kind == "own":
            layers: list[torch.nn.Module] = [Own(comm), Own(comm)]
        elif kind == "copies":
            layers = [nn.Experts(comm, 8)]
            layers.append(copy.deepcopy(layers[0]))
        else:
            shared = 8 if kind == "split" else 0
            layers, more = [nn.MoELayer(comm, 8, seed=seed, shared_intermediate_size=shared) for seed in (1, 2)], ()
        for layer in layers:  # one order, forward and backward
            layer(x, *more).sum().backward()
        text = ""
        try:
            for layer in layers if comm.rank == 0 else layers[::-1]:
                layer(x, *more)
        except RuntimeError as error:
            text = str(error)
        layers[0](x, *more)
        with torch.no_grad():
            sent = comm.dispatch(x, ids, weights)  # outside of layers
            comm.combine(sent.x, sent.route)
        return text


@pytest.mark.parametrize("kind", ["whole", "split", "own", "copies"])
def test_layers_in_another_order(kind: str) -> None:
    name = "Own" if kind == "own" else "Experts"
    operator = "dispatch_wait" if kind == "split" else "dispatch"
    for text in run_ranks(2, run, kind):
        assert f"ep::{operator}, operation " in text and "was called by different layers" in text, text
        assert f"rank 0: {name} 0, rank 1: {name} 1" in text, text
