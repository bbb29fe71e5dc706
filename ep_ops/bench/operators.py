"""Calls of the operators on several sets of random inputs, used in turn, and a check of what they return."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ep_ops import Communicator, Dispatched, Route, arrivals, formats
from ep_ops.formats.quantize import powers

from .baselines import eager_combine, eager_dispatch
from .presets import FORMATS, SUM_FORMAT, SUMS, TOKEN_MAJOR
from .timing import leaves
from .workloads import Traffic, Workload, draw_route, goes_to, holders, measure_traffic

SETS = 4
MAX_ERROR = 0.02
"""The largest error of a combined token, relative to the norm of what it should be: bf16 sums are two orders better
than wrong rows."""


@dataclasses.dataclass
class Inputs:
    """One set. `y` are rows of the receive buffer's size, random as experts' outputs would be."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    grad_out: Tensor
    y: Tensor
    route: Route
    recv_weights: Tensor
    tokens_route: Route


class Calls:
    """Everything that is timed of one communicator and workload: `call(op)(i)` uses set i. Collective."""

    def __init__(self, comm: Communicator, workload: Workload) -> None:
        self.comm, self.workload = comm, workload
        device, tokens = comm.device, workload.tokens
        routes = [draw_route(workload, comm.rank, seed, device, comm.world_size) for seed in range(SETS)]
        traffics = [measure_traffic(route, workload.experts, comm.world_size) for route in routes]
        self.traffic: Traffic = max(traffics, key=lambda traffic: traffic.crossing)
        self.crossing = sum(traffic.crossing for traffic in traffics) / SETS  # rows, on average over the sets
        self.capacity = max(traffic.capacity for traffic in traffics)
        copies = max(sum(column) for traffic in traffics for column in zip(*traffic.rows, strict=True))
        self.room = copies + (2 if copies + 1 == self.capacity else 1)  # token-major rows; no two sizes are the same
        self.by_expert: dict[str, Any] = {"capacity": self.capacity, "max_tokens": tokens}
        self.by_token: dict[str, Any] = {"layout": "token_major", "capacity": self.room, "max_tokens": tokens}
        draw = torch.Generator(device).manual_seed(1 + comm.rank)

        def rows(count: int) -> Tensor:
            shape = (count, workload.hidden)
            return torch.randn(shape, generator=draw, dtype=workload.torch_dtype, device=device)

        self.sets = []
        for topk_idx in routes:
            x, grad_out = rows(tokens), rows(tokens)
            weights = torch.rand(topk_idx.shape, generator=draw, device=device) + 0.1
            weights /= weights.sum(1, keepdim=True)
            got = comm.dispatch(x, topk_idx, weights, **self.by_expert)
            assert got.weights is not None
            y = rows(self.capacity)
            tokens_route = comm.dispatch(x, topk_idx, weights, **self.by_token).route
            self.sets.append(Inputs(x, topk_idx, weights, grad_out, y, got.route, got.weights, tokens_route))
            del got
        self.token_rows = rows(self.room)
        self.near_rows = comm.empty_rows(self.room).copy_(self.token_rows) if comm.config.symmetric_rows else None

    def _set(self, i: int) -> Inputs:
        return self.sets[i % SETS]

    # ------------------------------------------------------------------ operators

    def call(self, op: str) -> Callable[[int], Any]:
        """Return what is timed as `op`: a combine whose sums are quantized, the method of that name, or else a
        dispatch."""
        if op in SUMS:
            return functools.partial(getattr(self, op.removesuffix("_fp8")), format=SUM_FORMAT)
        if hasattr(self, op):
            return getattr(self, op)
        dispatch = self.dispatcher(op)

        def new_tensors(i: int) -> tuple[Tensor | None, ...]:
            """All but those of a given route and the given expert ids."""
            got = dispatch(i)
            new = () if op.endswith("planned") else (got.local_idx, *got.route.tensors[1:], got.dropped)
            return got.x.view(torch.uint8) if op in FORMATS else got.x, got.scales, got.weights, *new

        return new_tensors

    def dispatcher(self, op: str) -> Callable[[int], Dispatched]:
        """Return a function that dispatches x, in a format if `op` is one of FORMATS; the cast is part of the call.
        Padding is zeroed, as with gradients enabled."""
        planned, by_token = op.endswith("planned"), "token_major" in op
        how: dict[str, Any] = {} if by_token else {"zeros": True}
        if op in FORMATS:
            how["format"], how["scales_as"] = FORMATS[op]
        if not planned:
            how |= self.by_token if by_token else self.by_expert

        def dispatch(i: int) -> Dispatched:
            s = self._set(i)
            if planned:
                return self.comm.dispatch_planned(s.x, s.tokens_route if by_token else s.route, s.topk_weights, **how)
            return self.comm.dispatch(s.x, s.topk_idx, s.topk_weights, **how)

        return dispatch

    def combine_token_major(self, i: int, format: str = "") -> Tensor:
        return self.comm.combine(self.token_rows, self._set(i).tokens_route, format=format)

    def combine_gathered(self, i: int) -> Tensor:
        """Combine rows in symmetric memory. The communicator must have `symmetric_rows`."""
        assert self.near_rows is not None
        return self.comm.combine_gathered(self.near_rows, self._set(i).tokens_route)

    def combine(self, i: int, format: str = "") -> Tensor:
        s = self._set(i)
        return self.comm.combine(s.y, s.route, s.recv_weights, format=format)

    def combine_unweighted(self, i: int) -> Tensor:
        s = self._set(i)
        return self.comm.combine(s.y, s.route)

    def combine_residual(self, i: int) -> Tensor:
        s = self._set(i)
        return self.comm.combine(s.y, s.route, s.recv_weights, residual=s.x)

    def dispatch_backward(self, i: int) -> tuple[Tensor, Tensor]:
        s = self._set(i)
        return torch.ops.ep.dispatch_backward(s.y, s.recv_weights, *s.route.tensors, *s.route.ints, self.comm.name)

    def combine_backward(self, i: int) -> tuple[Tensor, Tensor]:
        s, comm = self._set(i), self.comm
        return torch.ops.ep.combine_backward(
            s.grad_out, s.y, s.recv_weights, *s.route.tensors, s.route.num_rows, *s.route.ints, comm.name
        )

    # ------------------------------------------------------------------ compiled, with gradients

    def compiled(self) -> tuple[Callable[[int], Tensor], Callable[[int], tuple[Tensor, ...]]]:
        """Dispatch and combine as one compiled graph: forward, and forward + backward."""
        comm, sizes = self.comm, self.by_expert

        def there_and_back(x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
            got = comm.dispatch(x, topk_idx, topk_weights, **sizes)
            return comm.combine(got.x, got.route, got.weights)

        run = torch.compile(there_and_back, fullgraph=True, dynamic=False)

        def forward(i: int) -> Tensor:
            s = self._set(i)
            with torch.no_grad():
                return run(s.x, s.topk_idx, s.topk_weights)

        inputs = [(s.x.detach().requires_grad_(), s.topk_weights.detach().requires_grad_()) for s in self.sets]

        def forward_backward(i: int) -> tuple[Tensor, ...]:
            s, (x, topk_weights) = self._set(i), inputs[i % SETS]
            with torch.enable_grad():
                out = run(x, s.topk_idx, topk_weights)
                return torch.autograd.grad(out, (x, topk_weights), s.grad_out)

        return forward, forward_backward

    # ------------------------------------------------------------------ torch.distributed alone

    def eager(self) -> tuple[Callable[[int], None], Callable[[int], None]]:
        """Return dispatch and combine by sorting, all_to_all_single and indexing."""
        experts, world_size = self.workload.experts, self.comm.world_size
        sets = []
        for s in self.sets:
            rows, sent = eager_dispatch(s.x, s.topk_idx, experts, world_size)
            sets.append((torch.randn_like(rows), sent))

        def dispatch(i: int) -> None:
            s = self._set(i)
            eager_dispatch(s.x, s.topk_idx, experts, world_size)

        def combine(i: int) -> None:
            y, sent = sets[i % SETS]
            eager_combine(y, self._set(i).topk_weights, sent)

        return dispatch, combine

    # ------------------------------------------------------------------ is it right?

    def errors(self) -> dict[str, float]:
        """Return the error of each operator: the largest relative error of a row, compared with a known result.

        A token that is dispatched and combined returns unchanged, or multiplied by top-k if unweighted. The backward
        operators compute the same as a combine and a dispatch along the same route.
        """
        s, comm = self.sets[0], self.comm
        weight_sum = s.topk_weights.sum(1, keepdim=True)
        got, planned = (self.dispatcher(op)(0) for op in ("dispatch", "dispatch_planned"))
        grad_y, _ = self.combine_backward(0)
        grad_rows = comm.dispatch_planned(s.grad_out, s.route).x
        held = s.route.recv_from >= 0
        with_residual = comm.combine(got.x, got.route, got.weights, residual=s.grad_out)
        found = {
            "dispatch": (comm.combine(got.x, got.route, got.weights), s.x * weight_sum),
            "dispatch_planned": (comm.combine(planned.x, s.route, planned.weights), s.x * weight_sum),
            "combine_unweighted": (comm.combine(got.x, got.route), s.x * self.workload.top_k),
            "combine_residual": (with_residual, s.x * weight_sum + s.grad_out),
            "dispatch_backward": (self.dispatch_backward(0)[0], comm.combine(s.y, s.route)),
            "combine_backward": (grad_y[held], grad_rows[held] * s.recv_weights[held, None]),
        }
        found["combine"] = found["dispatch"]
        by_token, again = (self.dispatcher(op)(0) for op in TOKEN_MAJOR[:2])
        reached = goes_to(s.topk_idx, self.workload.experts, comm.world_size).sum(0)[:, None]
        found["dispatch_token_major"] = comm.combine(by_token.x, by_token.route), s.x * reached
        found["dispatch_token_major_planned"] = comm.combine(again.x, s.tokens_route), s.x * reached
        found["combine_token_major"] = found["dispatch_token_major"]
        if self.near_rows is not None:
            gathered = comm.combine_gathered(self.near_rows.copy_(by_token.x), by_token.route)
            found["combine_gathered"] = gathered, s.x * reached
            self.near_rows.copy_(self.token_rows)
        if self.workload.hidden % formats.format_of(SUM_FORMAT).multiple == 0:
            out = comm.combine(got.x, got.route, got.weights, format=SUM_FORMAT)
            found["combine_fp8"] = out, self._sums(s, s.topk_weights)
            out = comm.combine(by_token.x, by_token.route, format=SUM_FORMAT)
            found["combine_token_major_fp8"] = out, self._sums(s, None)
        for op in FORMATS:
            form, sent = formats.format_of(FORMATS[op][0]), self.dispatcher(op)(0)
            if sent.scales is None or self.workload.hidden % form.multiple:
                continue
            scales = sent.scales.contiguous()
            if scales.dtype == torch.int32:  # four exponents each
                count = self.workload.hidden // form.block
                exponents = scales.flatten().view(torch.uint8).view(scales.shape[0], -1)
                scales = powers(exponents[:, :count].int())
            rows = formats.dequantize(sent.x, scales, form, s.x.dtype)
            exact = formats.dequantize(*formats.quantize(s.x, form), form, s.x.dtype)
            weights, times = (None, reached) if "token_major" in op else (sent.weights, weight_sum)
            found[op] = comm.combine(rows, sent.route, weights), exact * times
        return {name: relative_error(out, expected) for name, (out, expected) in found.items()}

    def _sums(self, s: Inputs, weights: Tensor | None) -> Tensor:
        """Return what a combine returns for x, dispatched with weights or token-major, if each rank's sum is quantized.
        Sums of other NVLink domains are quantized once more.

        Products are added one by one, as combine does: weights of a token have the sum 1, and x times 1 often lies in
        the middle between two codes."""
        form, x, comm = formats.format_of(SUM_FORMAT), s.x.float(), self.comm
        rank_of, total = holders(s.topk_idx, self.workload.experts, comm.world_size), torch.zeros_like(x)

        def arrived(sums: Tensor) -> Tensor:
            return formats.dequantize(*formats.quantize(sums, form), form, torch.float32)

        for ranks in comm.config.domains:
            of_domain = torch.zeros_like(x)
            for rank in ranks:
                here = rank_of == rank
                factors = here.any(1, keepdim=True) if weights is None else weights * here
                sums = torch.zeros_like(x)
                for factor in factors.float().unbind(1):
                    sums += factor[:, None] * x
                of_domain += arrived(sums)
            total += of_domain if comm.rank in ranks else arrived(of_domain)
        return total

    def same(self, i: int, one: Any, other: Any) -> bool:
        """Return whether two results of a call with inputs `i` have the same bits where they are defined: for
        receive buffers, the rows of the segments; for token-major rows and lists of arrivals, everything up to
        the last copy."""
        s, world_size = self._set(i), self.comm.world_size
        rows = int(s.route.offs[-1]) if s.route.offs.numel() else 0
        lists = [(arrivals.size(room, world_size),) for room in (self.capacity, self.room)]
        rows_alone = self.token_rows.shape, (self.room, self.workload.hidden // 128)  # and their scales

        def defined(results: Any) -> list[Tensor]:
            found: list[Tensor] = []
            for t in leaves(results):
                if t.shape in lists:
                    found += arrivals.defined(t, world_size)
                elif t.shape in rows_alone:
                    found.append(t[: int(s.tokens_route.sources[-1])])
                else:
                    found.append(t[:rows] if t.shape[:1] == (self.capacity,) else t)
            return found

        pairs = zip(defined(one), defined(other), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a row. NaN counts as infinite."""
    distance = (out.float() - expected.float()).norm(dim=1)
    worst = float((distance / expected.float().norm(dim=1)).max()) if out.numel() else 0.0
    return worst if worst == worst else float("inf")
