"""Tokens of all ranks for tests of DeepEP's interface, and what plain loops make of them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

EXPERTS, TOP_K, HIDDEN = 6, 3, 128
TOKENS = (5, 9)  # of each rank
RANKS = len(TOKENS)
OWN = EXPERTS // RANKS  # experts of a rank


@dataclasses.dataclass
class Given:
    """Inputs of one rank."""

    x: Tensor
    idx: Tensor  # int64
    weights: Tensor
    bias: tuple[Tensor, Tensor]

    def to(self, device: str) -> Given:
        """Return a copy on a device."""
        return Given(
            self.x.to(device), self.idx.to(device), self.weights.to(device), tuple(b.to(device) for b in self.bias)
        )

    @property
    def ranks(self) -> list[set[int]]:
        """Where each token goes."""
        return [{expert // OWN for expert in experts if expert >= 0} for experts in self.idx.tolist()]


def draw(seed: int, tokens: tuple[int, ...] = TOKENS, none: float = 0.25) -> list[Given]:
    generator = torch.Generator().manual_seed(seed)
    given = []
    for count in tokens:
        idx = torch.rand(count, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
        idx[torch.rand(idx.shape, generator=generator) < none] = -1
        x, *bias = (torch.randn(count, HIDDEN, generator=generator).bfloat16() for _ in range(3))
        given.append(Given(x, idx, torch.rand(idx.shape, generator=generator), tuple(bias)))
    return given


def coming(given: list[Given], rank: int) -> list[tuple[int, int]]:
    """(source rank, token) of the rows here."""
    return [(s, t) for s, one in enumerate(given) for t, ranks in enumerate(one.ranks) if rank in ranks]


def sums(given: list[Given], values: list[Tensor]) -> list[Tensor]:
    """``values`` [N, .] of each rank's rows, added up at their owners in fp32."""
    out = [torch.zeros(one.x.shape[0], values[0].shape[1]) for one in given]
    for rank, rows in enumerate(values):
        for row, (source, token) in enumerate(coming(given, rank)):
            out[source][token] += rows[row].float()
    return out


def same(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
