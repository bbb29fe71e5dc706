"""What binds two micro-batches in turns, and a shared expert between the halves of an operation: variants of what is
launched beside what, timed by turns, so that clocks that fall as a GPU grows hot are the same for all of them.

ep-ops bench overlap --variants
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ep_ops.nn import grouped_mm, interleave, swiglu_rows

from .layers import Batch, Layer
from .operators import MAX_ERROR, relative_error
from .ranks import Run
from .short_blocks import ExpertProducts, has_triton, tile_products

LAYERS = 4
SHARED_SMS = (8, 16, 24, 32, 40)
TRAINED_SMS = (None, 32)
LEFT = (8, 16)
"""Multiprocessors that torch's first grouped GEMM leaves, where it runs alone: whether it heeds that."""
HOT_ROW = 12
"""Calls behind each other, in which the GPU draws all the power that it may."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """How two micro-batches are run in turns. Budgets are in multiprocessors (SMs)."""

    product: str = "grouped"  # the experts' GEMM: torch's, "tiles" or "streams" (short_blocks.py)
    dispatch: int | None = None  # budget of the dispatch that runs beside a GEMM; None: the model's
    combine: int | None = None
    whole_ends: bool = False  # the first dispatch and the last combine, beside which nothing runs, are whole operations
    leave: int = 0  # multiprocessors that torch's grouped GEMM beside an operation leaves free
    turns: bool = True  # False: one after the other
    layers: int = 1  # one behind the other: between the first dispatch and the last combine nothing is exposed

    def __str__(self) -> str:
        start = f"{self.product}: " if self.layers == 1 else f"{self.product}: {self.layers} layers, "
        if not self.turns:
            return start + "one after the other"
        parts = ["default SMs" if self.dispatch is None else f"{self.dispatch} and {self.combine} SMs"]
        if self.whole_ends:
            parts.append("ends whole")
        if self.leave:
            parts.append(f"GEMM leaves {self.leave}")
        return start + "in turns, " + ", ".join(parts)


def variants(products: Sequence[str]) -> list[Variant]:
    found = []
    for product in products:
        found += [Variant(product, turns=False), Variant(product), Variant(product, whole_ends=True)]
        if product != "streams":
            found += [Variant(product, sms, sms, True) for sms in (8, 24)]
        if product == "grouped":
            left = (2, 4, 6), (3, 4, 6), (3, 6, 8), (4, 6, 8), (6, 8, 12)
            found += [Variant(product, dispatch, combine, True, leave) for dispatch, combine, leave in left]
            found += [Variant(turns=False, layers=LAYERS), Variant(dispatch=3, combine=6, leave=8, layers=LAYERS)]
        if product != "streams":
            found.append(Variant(product, layers=LAYERS))
    return found


@contextlib.contextmanager
def leaving(sms: int) -> Iterator[None]:
    """Products that are launched inside use so many multiprocessors fewer, where torch heeds that."""
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(sms or None)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)


class Experts:
    """The experts of a layer by one kind of product."""

    def __init__(self, layer: Layer, product: str) -> None:
        self.layer, self.comm, self.name = layer, layer.comm, product
        self._ends = [batch.rows.route.offs.tolist() for batch in layer.batches]
        self._streams = ExpertProducts(layer.comm.device) if product == "streams" else None

    def __call__(self, rows: Tensor, route: Any, batch: int, leave: int = 0) -> Tensor:
        """`leave`: multiprocessors that the first product leaves free. Communication is over before it ends."""
        w_in, w_out, *_ = self.layer.weights
        with leaving(leave) if leave else contextlib.nullcontext():
            y = self._product(rows, w_in, route.offs, batch)
        return self._product(swiglu_rows(y, route), w_out, route.offs, batch)

    def _product(self, x: Tensor, w: Tensor, offs: Tensor, batch: int) -> Tensor:
        if self.name == "grouped":
            return grouped_mm(x, w, offs)
        if self._streams is None:
            return tile_products(x, w, offs)
        return self._streams(x, w, offs, self._ends[batch])

    def alone(self, i: int = 0, leave: int = 0) -> list[Tensor]:
        return [self(b.rows.x, b.rows.route, n, leave) for n, b in enumerate(self.layer.batches)]

    def call(self, variant: Variant) -> Callable[[int], list[Tensor]]:
        def in_turns(i: int = 0) -> list[Tensor]:
            return interleave(*(self._steps(variant, n, b) for n, b in enumerate(self.layer.batches)))

        def serial(i: int = 0) -> list[Tensor]:
            found = []
            for n, b in enumerate(self.layer.batches):
                x = b.x
                for _ in range(variant.layers):
                    rows = self._dispatch(b, x)
                    x = self.comm.combine(self(rows.x, rows.route, n), rows.route, rows.weights)
                found.append(x)
            return found

        return in_turns if variant.turns else serial

    def _dispatch(self, b: Batch, x: Tensor) -> Any:
        return self.comm.dispatch(x, b.topk_idx, b.topk_weights, zeros=True, **self.layer.sizes)

    def _steps(self, v: Variant, flight: int, b: Batch) -> Iterator[Tensor | None]:
        comm, x = self.comm, b.x
        for number in range(v.layers):
            if v.whole_ends and flight == 0 and number == 0:
                rows = self._dispatch(b, x)
                yield None
            else:
                with comm.sm_budget(dispatch=v.dispatch):
                    dispatch = comm.dispatch_start(
                        x, b.topk_idx, b.topk_weights, zeros=True, flight=flight, **self.layer.sizes
                    )
                yield None
                rows = comm.dispatch_wait(dispatch)
            y = self(rows.x, rows.route, flight, v.leave)
            if v.whole_ends and flight == 1 and number == v.layers - 1:
                yield None  # the other one's combine is awaited
                x = comm.combine(y, rows.route, rows.weights)
            else:
                with comm.sm_budget(combine=v.combine):
                    combine = comm.combine_start(y, rows.route, rows.weights, flight=flight)
                yield None
                x = comm.combine_wait(combine)
        yield x


def in_shared(layer: Layer, operation: str, sms: int | None) -> Callable[[int], Any]:
    """The shared expert between the halves of a "dispatch", "combine" or "dispatch_tokens" with a budget."""
    comm = layer.comm

    def call(i: int = 0) -> Any:
        b = layer.batches[i % 2]
        with comm.sm_budget(dispatch=sms, combine=sms):
            started: Any
            if operation == "dispatch":
                started = comm.dispatch_start(b.x, b.topk_idx, b.topk_weights, zeros=True, **layer.sizes)
            elif operation == "combine":
                started = comm.combine_start(b.rows.x, b.rows.route, b.rows.weights)
            else:
                started = comm.dispatch_tokens_start(b.x, b.topk_idx, b.topk_weights)
        beside = layer.shared(b.x)
        return getattr(comm, f"{operation}_wait")(started), beside

    return call


def dispatch_tokens(layer: Layer) -> Callable[[int], Any]:
    def call(i: int = 0) -> Any:
        b = layer.batches[i % 2]
        return layer.comm.dispatch_tokens(b.x, b.topk_idx, b.topk_weights)

    return call


def measure(layer: Layer, run: Run) -> list[dict[str, Any]]:
    """All variants: in turns, of the shared expert, and forward and backward by budget. Collective."""
    with torch.no_grad():
        found = _of_turns(layer, run, products_of(layer))
        run.say("variants of turns are measured")
        found += _of_shared(layer, run)
        run.say("variants of the shared expert are measured")
    return found + _of_training(layer, run)


def products_of(layer: Layer) -> list[str]:
    if layer.comm.device.type == "cpu":
        return ["grouped"]
    return ["grouped", *(["tiles"] if has_triton() else []), "streams"]


def _of_turns(layer: Layer, run: Run, products: Sequence[str]) -> list[dict[str, Any]]:
    experts = {name: Experts(layer, name) for name in products}
    calls: dict[str, Callable[[int], Any]] = {f"{name}: GEMMs": of.alone for name, of in experts.items()}
    for leave in LEFT:
        calls[f"grouped: GEMMs, of which the first leaves {leave}"] = partial(experts["grouped"].alone, leave=leave)
    layers, errors = dict.fromkeys(calls, 1), {}
    expected = {n: experts["grouped"].call(Variant(turns=False, layers=n))(0) for n in (1, LAYERS)}
    for variant in variants(products):
        call = calls[str(variant)] = experts[variant.product].call(variant)
        layers[str(variant)] = variant.layers
        pairs = zip(call(0), expected[variant.layers], strict=True)
        errors[str(variant)] = max(relative_error(*pair) for pair in pairs)
    errors = run.worst(errors)
    if max(errors.values()) > MAX_ERROR:
        raise RuntimeError(f"results are wrong by {errors}")
    rested = run.timer.by_turns(calls, run.args.iterations)
    hot = run.timer.by_turns(calls, max(1, run.args.iterations // 3), row=HOT_ROW, rest=False)
    found = []
    for name, timing in rested.items():
        rested[name], hot[name] = timing.each(layers[name]), hot[name].each(layers[name])
    for name, timing in rested.items():
        own = f"{name.split(':')[0]}: GEMMs"
        one: dict[str, Any] = {"what": name, **timing.record(), "of its GEMMs": timing.over(rested[own])}
        one |= {"of torch's GEMMs": timing.over(rested["grouped: GEMMs"]), "us hot": hot[name].median}
        found.append(one | {"of its GEMMs, hot": hot[name].over(hot[own])})
    return found


def fastest(layer: Layer, found: Sequence[dict[str, Any]]) -> dict[str, Callable[[], list[Tensor]]]:
    """The variants in turns that took least beside their own GEMMs, and of all."""
    measured = {one["what"]: one for one in found}
    turns = [v for v in variants(products_of(layer)) if v.turns and v.product != "streams" and str(v) in measured]
    best = {min(turns, key=lambda v: measured[str(v)][key]) for key in ("of its GEMMs", "us")} if turns else set()
    return {str(variant): partial(Experts(layer, variant.product).call(variant), 0) for variant in best}


def _of_shared(layer: Layer, run: Run) -> list[dict[str, Any]]:
    alone: dict[str, Callable[[int], Any]] = {
        "dispatch": layer.dispatch, "combine": layer.combine, "dispatch_tokens": dispatch_tokens(layer)
    }  # fmt: skip
    calls: dict[str, Callable[[int], Any]] = {"shared": layer.shared_alone, **alone}
    named = {}
    for operation in alone:
        for sms in (None, *SHARED_SMS):
            name = f"shared in {operation}, {sms or 'default'} SMs"
            calls[name], named[name] = in_shared(layer, operation, sms), operation
    took = run.timer.by_turns(calls, run.args.iterations)
    found: list[dict[str, Any]] = [{"what": name, **took[name].record()} for name in ("shared", *alone)]
    for name, operation in named.items():
        apart, shared, both = (took[n].median for n in (operation, "shared", name))
        found.append({"what": name, **took[name].record(), "hidden": (apart + shared - both) / min(apart, shared)})
    return found


def _of_training(layer: Layer, run: Run) -> list[dict[str, Any]]:
    def within(sms: int | None, step: Callable[[], list[Tensor]]) -> Callable[[int], Any]:
        def call(i: int = 0) -> None:
            with layer.comm.sm_budget(dispatch=sms, combine=sms):
                layer.train(step)(i)

        return call

    part = ", forward + backward"
    calls: dict[str, Callable[[int], Any]] = {f"GEMMs{part}": layer.gemms_train}
    for sms in TRAINED_SMS:
        for name, step in (("one after the other", layer.serial), ("in turns", layer.in_turns)):
            calls[f"{name}{part}, {sms or 'default'} SMs"] = within(sms, step)
    layer.gradients(True)
    took = run.timer.by_turns(calls, max(1, run.args.iterations // 3), row=2)
    layer.gradients(False)
    gemms = took[f"GEMMs{part}"]
    return [{"what": name, **timing.record(), "of its GEMMs": timing.over(gemms)} for name, timing in took.items()]


def table(found: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows for people."""
    keys = ("of its GEMMs", "of its GEMMs, hot", "of torch's GEMMs", "hidden")
    rows: list[tuple[str, ...]] = [("variant", "ms", *keys)]
    for one in found:
        rows.append((one["what"], f"{one['us'] / 1e3:.3f}", *(f"{one[k]:.3f}" if k in one else "" for k in keys)))
    return rows
