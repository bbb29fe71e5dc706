"""Checks of the kernels of SwiGLU: no ranks, one launch each."""

from __future__ import annotations

import math
import random
from typing import Any

import quantized
import torch
from segments import segments
from torch import Tensor

from . import machine
from .formats import put_bytes
from .memory import POISON
from .ranks import numbered, same
from .threads import Launch, run

POISON_BYTE = POISON & 0xFF


class Rows:
    """The rows of a route, drawn at random; x and a gradient hold NaN outside of kept rows."""

    def __init__(self, draw: random.Random, hidden: int, slots: int, experts: int, alignment: int) -> None:
        self.draw, self.hidden, self.slots, self.alignment = draw, hidden, slots, alignment
        self.memory = machine.new_memory(1 << 22)
        self.of = segments(draw, slots, experts, alignment, behind=2, most=5)
        self.rows, self.kept, self.padding = self.of.rows, self.of.kept, self.of.padding
        size = 10 ** draw.uniform(-3, 2)
        self.x = self.of.poisoned(2 * hidden, torch.float32, draw, size)
        self.grad = self.of.poisoned(hidden, torch.float32, draw)
        self.live = torch.zeros(self.rows, dtype=torch.bool)
        self.live[self.of.live] = True

    def launch(self, kernel: Any, out_bytes: int, scale_bytes: int = 0) -> tuple[int, int]:
        """Addresses of the result and of its scales."""
        ints = [torch.tensor(values, dtype=torch.int32) for values in (self.of.offs, self.of.counts)]
        at = dict(zip(("offs", "counts"), (self.memory.put(each, "ints") for each in ints), strict=True))
        for name, values in (("x", self.x), ("grad", self.grad)):
            at[name] = put_bytes(self, values, name)
        out, scales = (self.memory.take(max(size, 16), name) for size, name in
                       ((out_bytes, "out"), (scale_bytes, "scales")))  # fmt: skip
        args = numbered(
            kernel.Args, **at, weights=0, out=out, scales=scales, made=0, dots=0, num_rows=self.rows, slots=self.slots,
            experts=len(self.of.counts), alignment=self.alignment, blocks=self.draw.randint(1, 2),
        )  # fmt: skip
        run([Launch(kernel, args)], self.draw)
        return out, scales

    @property
    def ranks(self) -> Rows:
        """Where `put_bytes` looks for the memory."""
        return self

    def wanted(self) -> Tensor:
        """fp64 [kept, F]"""
        gate, up = self.x[self.kept].double().chunk(2, 1)
        return gate / (1 + (-gate).exp()) * up

    def launch_weighted(self, kernel: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weights, the gradient of x, the weighted result, and the gradients of the weights."""
        weights = self.of.poisoned(1, torch.float32, self.draw)
        ints = [torch.tensor(values, dtype=torch.int32) for values in (self.of.offs, self.of.counts)]
        at = dict(zip(("offs", "counts"), (self.memory.put(each, "ints") for each in ints), strict=True))
        for name, values in (("x", self.x), ("grad", self.grad), ("weights", weights)):
            at[name] = put_bytes(self, values, name)
        shapes = {"out": (self.rows, 2 * self.hidden), "made": (self.rows, self.hidden), "dots": (self.rows, 1)}
        made = {name: self.memory.take(4 * math.prod(shape), name) for name, shape in shapes.items()}
        args = numbered(
            kernel.Args, **at, **made, scales=0, num_rows=self.rows, slots=0, experts=len(self.of.counts),
            alignment=self.alignment, blocks=self.draw.randint(1, 2),
        )  # fmt: skip
        run([Launch(kernel, args)], self.draw)
        got = (self.memory.tensor(made[name], shape, torch.float32) for name, shape in shapes.items())
        return weights, *got  # type: ignore[return-value]

    def wanted_gradient(self) -> Tensor:
        exact = self.x[self.kept].double().requires_grad_()
        gate, up = exact.chunk(2, 1)
        (gate / (1 + (-gate).exp()) * up).backward(self.grad[self.kept].double())
        assert exact.grad is not None
        return exact.grad

    def check(self, got: Tensor, want: Tensor) -> None:
        scale = want.abs().amax(1, keepdim=True) + 1e-30
        worst = ((got[self.kept].double() - want).abs() / scale).max()
        assert worst < 1e-5, f"off by {worst:.1e}"
        assert (got[self.padding] == 0).all(), "padding is not zero"
        assert (got[~self.live].view(torch.int32) == POISON).all(), "written where no row is"


def forward(draw: random.Random, backward: bool, hidden: int, slots: int = 0, experts: int = 5) -> None:
    from cute_kernels.local.swiglu import SwiGLURows

    on = Rows(draw, hidden, slots, experts, draw.choice([1, 3]) if experts > 32 else 4)
    width = 2 * hidden if backward else hidden
    out, _ = on.launch(SwiGLURows(hidden, "fp32", backward), 4 * on.rows * width)
    on.check(on.memory.tensor(out, (on.rows, width), torch.float32), on.wanted_gradient() if backward else on.wanted())


def weighted(draw: random.Random, hidden: int, experts: int = 5) -> None:
    from cute_kernels.local.swiglu import SwiGLURows

    on = Rows(draw, hidden, 0, experts, draw.choice([1, 3]) if experts > 32 else 4)
    weights, of_x, made, dots = on.launch_weighted(SwiGLURows(hidden, "fp32", True, weighted=True))
    by = weights[on.kept].double()
    on.check(of_x, on.wanted_gradient() * by)
    on.check(made, on.wanted() * by)
    products = on.wanted() * on.grad[on.kept].double()
    assert ((dots[on.kept].double() - products.sum(1, True)).abs() <= 1e-5 * products.abs().sum(1, True)).all()
    assert (dots[on.padding] == 0).all() and (dots[~on.live].view(torch.int32) == POISON).all()


def cast(draw: random.Random, name: str, layout: str, hidden: int, slots: int = 0) -> None:
    """Codes and scales of what the same kernel without a format makes, and where they lie."""
    from cute_kernels.local.swiglu import SwiGLURows

    on = Rows(draw, hidden, slots, 4, 4)
    out, _ = on.launch(SwiGLURows(hidden, "fp32"), 4 * on.rows * hidden)
    plain = on.memory.tensor(out, (on.rows, hidden), torch.float32)
    codes, scales = quantized.quantized(plain[on.kept], name)
    every = torch.zeros(on.rows, scales.shape[1], dtype=torch.float64)
    every[on.kept] = scales
    sizes = [-(-count // on.alignment) * on.alignment for count in on.of.counts]
    if layout != "rows":
        low, high = (
            quantized.laid(every, on.live, layout, sizes, slots, False, fill).contiguous().view(-1).view(torch.uint8)
            for fill in (0.0, math.nan)
        )
        known = low == high
        if layout == "columns":
            known = known.view(-1, 4).all(1).repeat_interleave(4)
    else:
        low = every.float() if name != "32/mx" else every.clone().apply_(quantized.byte_of).to(torch.uint8)
        low = low.view(on.rows, -1).view(torch.uint8)
        known = on.live[:, None].expand_as(low).reshape(-1)
        low = low.reshape(-1)
    out, lie = on.launch(SwiGLURows(hidden, "fp32", False, f"e4m3/{name}", layout), on.rows * hidden, low.numel())
    got = on.memory.tensor(out, (on.rows, hidden), torch.uint8)
    same(got[on.kept].int(), codes.int(), "codes")
    assert (got[on.padding] == 0).all() and (got[~on.live] == POISON_BYTE).all()
    there = on.memory.tensor(lie, (low.numel(),), torch.uint8)
    same(there[known].int(), low[known].int(), "scales")


CHECKS = {
    "swiglu": lambda draw: forward(draw, False, draw.choice([4, 132, 640])),
    "swiglu_many_experts": lambda draw: forward(draw, draw.random() < 0.5, 8, experts=71),
    "swiglu_slots": lambda draw: forward(draw, draw.random() < 0.5, 36, slots=8),
    "swiglu_backward": lambda draw: forward(draw, True, draw.choice([4, 132, 388])),
    "swiglu_weighted": lambda draw: weighted(draw, draw.choice([4, 132, 388, 1040]), draw.choice([5, 5, 40])),
    "swiglu_pow2": lambda draw: cast(draw, "128/pow2", draw.choice(["rows", "columns", "packed"]), 640),
    "swiglu_fp32": lambda draw: cast(draw, "128/fp32", draw.choice(["rows", "columns"]), 256, slots=4),
    "swiglu_mx": lambda draw: cast(draw, "32/mx", draw.choice(["rows", "packed"]), 160, draw.choice([0, 4])),
}
