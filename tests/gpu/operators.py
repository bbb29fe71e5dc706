"""Runs every operator of a communicator on one route, through torch.ops.ep, and compares two communicators."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import torch
import torch.distributed as dist
from sharing import TURNS
from torch import Tensor

import ep_ops
from ep_ops import arrivals
from ep_ops.backends.cute.backend import CuteBackend

HIDDEN = {torch.bfloat16: 24, torch.float16: 1032, torch.float32: 8200}
"""Rows below 512 bytes, of an odd number of vectors, and of several pieces."""
CASES = [(name, torch.bfloat16) for name in cases.CASE_NAMES]
CASES += [(name, torch.float16) for name in ("random", "over_capacity", "padded")]
CASES += [(name, torch.float32) for name in ("uneven_experts", "padded_over")]
"""Routes and dtypes that every kind of kernel is tested with."""


def case_config(case: cases.RouteCase, dtype: torch.dtype) -> dict[str, Any]:
    """Sizes for a case. Kernels are compiled for these sizes, so tests share them."""
    return dict(
        num_experts=case.num_experts, experts_per_rank=case.experts_per_rank, hidden_size=HIDDEN[dtype],
        top_k=case.top_k, max_tokens_per_rank=48, dtype=dtype, alignment=case.alignment,
    )  # fmt: skip


def size_config(hidden: int) -> dict[str, Any]:
    """Sizes of a large model. Tests share them, too."""
    return dict(num_experts=256, hidden_size=hidden, top_k=8, max_tokens_per_rank=4096)


def ranks() -> tuple[int, int]:
    """This rank and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def make_comm(backend: str, name: str, latency_max_tokens: int | None = 0, **config: Any) -> ep_ops.Communicator:
    """Throughput kernels, unless it is said otherwise."""
    given = {"timeout": 10.0 * TURNS, **config}
    return ep_ops.Communicator(
        backend=backend, name=f"{name}/{backend}", device="cuda", latency_max_tokens=latency_max_tokens, **given
    )


def of_kernels(comm: ep_ops.Communicator) -> CuteBackend:
    """The backend of a communicator whose backend is "cute"."""
    assert isinstance(comm.backend, CuteBackend)
    return comm.backend


@dataclasses.dataclass
class Call:
    """One rank's arguments."""

    topk_idx: Tensor
    capacity: int
    alignment: int
    slots: int
    max_tokens: int

    def sizes(self, comm: ep_ops.Communicator) -> tuple[Any, ...]:
        return (
            self.capacity, self.alignment, self.slots, self.max_tokens, comm.num_local_experts, comm.world_size,
            comm.name, "padded" if self.slots else "grouped",
        )  # fmt: skip


def covered(route: tuple[Tensor, ...], alignment: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Masks [R]: rows that hold something, and padding."""
    _, _, lists, offs, counts = route
    held = arrivals.recv_from(lists, num_rows) >= 0
    padding = torch.zeros_like(held)
    for end, count in zip(offs.tolist(), counts.tolist(), strict=True):
        padding[end - (-count) % alignment : end] = True
    return held, padding


def unequal(one: ep_ops.Route, other: ep_ops.Route) -> Tensor:
    """How many numbers of what arrives differ, where they are defined; stays on the device."""
    lists = zip(*(arrivals.defined(route.arrivals, ranks()[1]) for route in (one, other)), strict=True)
    return torch.stack([(mine != theirs).sum() for mine, theirs in lists]).sum()


def without_scales(dispatched: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the results of a dispatch except recv_scales, which are empty."""
    assert dispatched[1].shape == (0,)
    return (dispatched[0], *dispatched[2:])


def run_all(comm: ep_ops.Communicator, call: Call, x: Tensor, weights: Tensor, y: Tensor, row_weights: Tensor) -> dict:
    """Results by name. `y` and `row_weights` may hold NaN in rows outside the route: nobody may read them."""
    ops = torch.ops.ep
    sizes = call.sizes(comm)
    layout, slots = sizes[-1], call.slots
    idx, align = call.topk_idx, call.alignment
    out: dict[str, Any] = {"plan": ops.plan(idx, *sizes)}
    out["dispatch"] = without_scales(ops.dispatch(x, weights, idx, *sizes))
    out["dispatch unweighted"] = without_scales(ops.dispatch(x, None, idx, *sizes))
    out["dynamic"] = without_scales(
        ops.dispatch_dynamic(x, weights, idx, align, call.max_tokens, *sizes[4:-1], "grouped")
    )
    route = (idx, *out["plan"][:4])
    rows = call.capacity
    held, padding = covered(route, align, rows)
    y = torch.where((held | padding)[:, None], y, torch.nan)
    row_weights = torch.where(held, row_weights, torch.where(padding, 0.0, torch.nan))
    tail = (align, call.max_tokens, comm.name)
    out["planned"] = without_scales(ops.dispatch_planned(x, weights, *route, rows, *tail, layout, slots))
    out["planned unweighted"] = without_scales(ops.dispatch_planned(x, None, *route, rows, *tail, layout, slots))
    out["combine"] = ops.combine(y, None, *route, *tail)
    out["combine weighted"] = ops.combine(y, row_weights, *route, *tail)
    out["combine residual"] = ops.combine(y, None, *route, *tail, x)
    out["combine weighted residual"] = ops.combine(y, row_weights, *route, *tail, x)
    out["dispatch backward"] = ops.dispatch_backward(y, row_weights, *route, *tail)
    out["dispatch backward x"] = ops.dispatch_backward(y, None, *route, *tail)
    out["dispatch backward w"] = ops.dispatch_backward(None, row_weights, *route, *tail)
    out["combine backward"] = ops.combine_backward(x, y, row_weights, *route, rows, *tail)
    out["combine backward y"] = ops.combine_backward(x, None, row_weights, *route, rows, *tail)
    out["combine backward 1"] = ops.combine_backward(x, None, None, *route, rows, *tail)
    return out


ARRIVALS = {"plan": 1, "dispatch": 3, "dispatch unweighted": 3, "dynamic": 3}
"""Result -> which of its tensors holds what arrives."""


def compare(got: dict, expected: dict, call: Call) -> None:
    """Every number equal, but dot products, whose order over the hidden size is free."""
    for name, values in expected.items():
        for i, (mine, theirs) in enumerate(
            zip(got[name], values, strict=True) if isinstance(values, (tuple, list)) else [(got[name], values)]
        ):
            where = f"{name}[{i}]"
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, (where, mine.shape, theirs.shape)
            by_rows = name in ("dispatch", "dispatch unweighted", "planned", "planned unweighted") or name.startswith(
                "combine backward"
            )
            if i == ARRIVALS.get(name):
                mine, theirs = (
                    torch.cat([part.flatten() for part in arrivals.defined(lists, ranks()[1])])
                    for lists in (mine, theirs)
                )
            elif name == "dynamic" and i < 2:
                mine, theirs = _only(mine, theirs, (None, *expected["dynamic"][2:6]), call.alignment)
            elif by_rows and i < 2 and mine.numel():
                mine, theirs = _only(mine, theirs, (None, *expected["plan"][:4]), call.alignment)
            if name == "combine backward" and i == 1:
                torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3, msg=lambda m, w=where: f"{w}: {m}")
            else:
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=lambda m, w=where: f"{w}: {m}")


def _only(mine: Tensor, theirs: Tensor, route: tuple, alignment: int) -> tuple[Tensor, Tensor]:
    if mine.shape[0] == 0:
        return mine, theirs
    held, padding = covered(route, alignment, mine.shape[0])
    return mine[held | padding], theirs[held | padding]
