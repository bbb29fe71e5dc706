"""Checks of the kernel that sums rows: no ranks, one launch each."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from . import machine
from .formats import put_bytes
from .ranks import numbered, same
from .threads import Launch, run


class Given:
    """Rows at random, of which those that nobody names hold NaN."""

    def __init__(self, draw: random.Random, terms: int, hidden: int) -> None:
        self.memory = machine.new_memory(1 << 22)
        self.rows, given = draw.randint(1, 9), draw.randint(1, 7)
        generator = torch.Generator().manual_seed(draw.getrandbits(40))
        self.indices = torch.randint(-2, given, (self.rows, terms), generator=generator).int()
        self.x = torch.randn(given, hidden, generator=generator)
        self.x[~torch.isin(torch.arange(given), self.indices)] = torch.nan
        self.weights = torch.randn(self.rows, terms, generator=generator)

    @property
    def ranks(self) -> Given:
        """Where `put_bytes` looks for the memory."""
        return self

    def wanted(self, weighted: bool) -> Tensor:
        out = torch.zeros(self.rows, self.x.shape[1])
        for row, own in enumerate(self.indices.tolist()):
            for k, index in enumerate(own):
                if index >= 0:
                    out[row] += self.x[index] * self.weights[row, k] if weighted else self.x[index]
        return out


def check(draw: random.Random, terms: int, weighted: bool, alone: bool = False) -> None:
    from cute_kernels.local.sum_rows import SumRows

    hidden = draw.choice([4, 132, 640])
    on, kernel = Given(draw, terms, hidden), SumRows(hidden, "fp32", weighted, alone)
    tensors = (("x", on.x), ("indices", on.indices), ("weights", on.weights))
    at: dict[str, Any] = {name: put_bytes(on, tensor, name) for name, tensor in tensors}
    out = on.memory.take(4 * on.rows * hidden, "out")
    args = numbered(kernel.Args, **at, out=out, ends=0, rows=on.rows, terms=terms, experts=0, blocks=draw.randint(1, 3))
    run([Launch(kernel, args)], draw)
    same(on.memory.tensor(out, (on.rows, hidden), torch.float32), on.wanted(weighted), "sums")


def check_copies(draw: random.Random) -> None:
    """Rows up to the last end; what follows stays as it was."""
    from cute_kernels.local.sum_rows import SumRows

    hidden = draw.choice([4, 132, 640])
    on, kernel = Given(draw, 1, hidden), SumRows(hidden, "fp32", False, True, True)
    ends = torch.tensor(sorted(draw.randint(0, on.rows) for _ in range(draw.randint(1, 4))), dtype=torch.int32)
    at: dict[str, Any] = {name: put_bytes(on, tensor, name) for name, tensor in (
        ("x", on.x), ("indices", on.indices), ("ends", ends), ("out", torch.full((on.rows, hidden), 7.0)),
    )}  # fmt: skip
    numbers = dict(rows=on.rows, terms=1, experts=len(ends), blocks=draw.randint(1, 3))
    run([Launch(kernel, numbered(kernel.Args, **at, weights=0, **numbers))], draw)
    wanted = torch.where(torch.arange(on.rows)[:, None] < ends[-1], on.wanted(False), 7.0)
    same(on.memory.tensor(at["out"], (on.rows, hidden), torch.float32), wanted, "copies")


CHECKS = {
    "sum_rows": lambda draw: check(draw, draw.choice([2, 8, 32]), False),
    "sum_rows_weighted": lambda draw: check(draw, draw.choice([1, 3]), True),
    "sum_rows_many_terms": lambda draw: check(draw, draw.choice([33, 70]), draw.random() < 0.5),
    "sum_rows_alone": lambda draw: check(draw, 1, False, True),
    "copies": check_copies,
}
