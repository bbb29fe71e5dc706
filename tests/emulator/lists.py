"""Checks of the kernels that make lists of token-major rows, and the route of their places: beside plain PyTorch."""

from __future__ import annotations

import random

import torch
from places import local_ids, token_major
from torch import Tensor

from . import machine
from .formats import put_bytes
from .ranks import numbered, same
from .threads import Launch, run


class Memory:
    def __init__(self) -> None:
        self.memory = machine.new_memory(1 << 20)

    @property
    def ranks(self) -> Memory:
        """Where `put_bytes` looks for the memory."""
        return self

    def room(self, ints: int, name: str) -> int:
        return self.memory.take(max(4 * ints, 16), name)

    def found(self, at: int, shape: tuple[int, ...]) -> Tensor:
        return self.memory.tensor(at, shape, torch.int32)


def lists(draw: random.Random, experts: int, most_rows: int) -> None:
    from cute_kernels.local.expert_lists import MakeExpertLists
    from ep_ops.nn import expert_lists

    alignment, top_k = draw.choice([1, 1, 4, 16]), draw.choice([1, 3, 8])
    ids = local_ids(draw, draw.randint(1, most_rows), top_k, experts)
    capacity = alignment * draw.randint(1, 20) if draw.random() < 0.5 else None
    want = expert_lists(ids, experts, alignment=alignment, capacity=capacity)
    on, names = Memory(), ("rows", "flat", "places", "offs", "counts", "dropped")
    at = {name: on.room(getattr(want, name).numel(), name) for name in names}
    args = numbered(
        MakeExpertLists.Args, **at, local_idx=put_bytes(on, ids, "local_idx"), entries=ids.numel(), top_k=top_k,
        length=want.rows.shape[0], alignment=alignment, blocks=draw.randint(1, 3),
    )  # fmt: skip
    run([Launch(MakeExpertLists(experts), args)], draw)
    for name in names:
        same(on.found(at[name], getattr(want, name).shape), getattr(want, name), name)


def route(draw: random.Random, ranks: int, each: int, most_rows: int, copies: int | None = None) -> None:
    """Compare the route of places with plain PyTorch's. `copies`: the number of copies that the lists claim; then only
    accesses are checked."""
    from cute_kernels.local.places_route import PlacesRoute
    from ep_ops import arrivals
    from ep_ops.nn import expert_lists
    from ep_ops.nn.list_operators import places_route

    of = token_major(draw, ranks, each, most_rows)
    made = expert_lists(of.local_idx, each, alignment=draw.choice([1, 4]))
    places, length = made.places, made.rows.shape[0]
    want, want_rows = places_route(*of.tensors, places, length, of.rank, [each] * ranks)
    on, names = Memory(), ("topk_idx", "send_rows", "arrivals", "places")
    at = {name: put_bytes(on, tensor, name) for name, tensor in zip(names, (*of.tensors, places), strict=True)}
    at |= {f"new_{name}": on.room(t.numel(), name) for name, t in (("arrivals", want), ("send_rows", want_rows))}
    if copies is not None:
        on.found(at["arrivals"], of.tensors[2].shape)[-1] = copies
    tokens, top_k = of.topk_idx.shape
    args = numbered(
        PlacesRoute.Args, **at, num_rows=places.shape[0], num_places=length, tokens=tokens, top_k=top_k, ranks=ranks,
        rank=of.rank, each=each, blocks=draw.randint(1, 3),
    )  # fmt: skip
    run([Launch(PlacesRoute(), args)], draw)
    if copies is not None:
        return
    got = on.found(at["new_arrivals"], want.shape)
    for part, ours, theirs in zip(("copies", "owned", "sources"), *(arrivals.defined(t, ranks) for t in (got, want)),
                                  strict=True):  # fmt: skip
        same(ours, theirs, part)
    same(on.found(at["new_send_rows"], want_rows.shape), want_rows, "send_rows")


def garbage(draw: random.Random) -> None:
    """Whatever number of copies the lists claim, nothing outside of them is read or written."""
    for copies in (-(2**31), -1, 31, 1000, 2**31 - 1):
        route(draw, 2, 4, 30, copies)


CHECKS = {
    "lists": lambda draw: lists(draw, draw.choice([1, 3, 8]), 12),
    "lists_many_experts": lambda draw: lists(draw, 70, 40),
    "places_route": lambda draw: route(draw, draw.choice([1, 2, 5]), draw.choice([1, 4]), 30),
    "places_route_garbage": garbage,
}
