"""The planner chooses kernels, their variants and the roles of their blocks as recorded in `choices.txt`.

The record has a section for all calls with the same choices, and in it a line for each set of machines (GPU and number
of ranks) with the same ones. A choice begins with the number of tokens of a rank from which on it is made. A change
that is meant to choose otherwise shows in the difference of the file, which `PYTHONPATH=.:tests:tests/kernels python
tests/kernels/test_choices.py` writes anew.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import torch
from launches import Recorder
from operate import RECEIVE, SEND, Delivery, On, Sizes

from cute_kernels.heap import Problem
from cute_kernels.slices import Slices
from ep_ops.backends.cute import outputs
from ep_ops.backends.cute.latency import LatencyPath
from ep_ops.backends.cute.residency import most_pulling
from ep_ops.backends.cute.sm_model import TokenTraffic, default_budget
from ep_ops.backends.cute.throughput import ThroughputPath
from ep_ops.backends.cute.tuning import KNOBS, Row
from ep_ops.records import Route

RECORDED = Path(__file__).with_name("choices.txt")
GPUS = {"H100": "NVIDIA H100 80GB HBM3", "H200": "NVIDIA H200"}
"""Names of GPUs as drivers report them. All have 132 multiprocessors."""
SMS = 132
RANKS = (1, 2, 4, 8)
MODELS = {
    "256 experts, top 8, 7168": (256, 8, 7168),
    "128 experts, top 8, 2048": (128, 8, 2048),
    "16 experts, top 1, 4096": (16, 1, 4096),
}
TOKENS = (1, 2, 4, 15, 16, 32, 63, 64, 128, 256, 257, 512, 1024, 2048, 2049, 3072, 4096, 6144, 8192)
LATENCY = 256
FORMATS = {
    "": Delivery(), " e4m3/128/pow2=columns": Delivery(None, "e4m3/128/pow2", "columns"),
    " e4m3/32/mx=packed": Delivery(None, "e4m3/32/mx", "packed"), " wire:e4m3/32/mx": Delivery(None, "wire:e4m3/32/mx"),
}  # fmt: skip
LAYOUTS = ("grouped", "token_major", "padded")
ROLES = ("dealt", "pushers", "joining", "senders", "first_receiver", "blocks")
"""The numbers of a launch that are chosen. The others are sizes of the call."""


def new(kind: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=kind, device="meta")


class Machine:
    """A rank of a communicator whose launches are noted."""

    def __init__(self, ranks: int, gpu: str, model: tuple[int, int, int], *rows: Row) -> None:
        experts, top_k, hidden = model
        self.problem = p = Problem(ranks, (experts // ranks,) * ranks, top_k, hidden, "bf16", max(TOKENS))
        slices = Slices(p.row_bytes, p.dtype).slices
        traffic = TokenTraffic.of(p, slices)
        self.recorder = recorder = Recorder(p, SMS, gpu)
        recorder.tuning.put(*rows)
        budget = default_budget(traffic, recorder.tuning, SMS, most_pulling(p, SMS), None, None)
        made: Any = outputs.Outputs(p, p.local_experts, recorder.device)
        side: Any = object()
        self.few = On(LatencyPath(recorder, made, LATENCY))  # type: ignore[arg-type]
        self.many = On(ThroughputPath(recorder, made, budget, traffic))  # type: ignore[arg-type]
        self.beside = On(ThroughputPath(recorder, made, budget, traffic, side))  # type: ignore[arg-type]

    def path(self, args: Any) -> Any:
        from ep_ops.specs import spec_of

        return self.few if self.few.takes(spec_of(args), args) else self.many

    def calls(self, tokens: int) -> Iterator[tuple[str, Any]]:
        """Yield each call with so many tokens on every rank, as a name and what runs it."""
        p = self.problem
        x, idx = new(torch.bfloat16, tokens, p.hidden_size), new(torch.int32, tokens, p.top_k)
        weights = new(torch.float32, tokens, p.top_k)
        for layout, (name, delivery) in itertools.product(LAYOUTS, FORMATS.items()):
            rows = tokens * p.world_size * (1 if layout == "token_major" else p.top_k)
            slots = -(-rows // p.local_experts) if layout == "padded" else 0
            capacity = slots * p.local_experts if slots else rows
            sizes = Sizes(capacity, 1, slots, tokens, layout)
            if not name:
                yield f"plan, {layout}", lambda sizes=sizes: self.many.plan(idx, sizes)
            if layout == "token_major" and "columns" in name:
                continue
            for given, weighted in ((None, ""), (weights, ", weighted")):
                args = self.many.dispatch_args(x, given, idx, sizes, delivery)
                yield f"dispatch, {layout}{weighted}{name}", self.path(args).bound(args)
                if not weighted:
                    yield f"split dispatch, {layout}{name}", self.beside.bound(args)
                    if tokens <= LATENCY:
                        for part, half in ((SEND, "start"), (RECEIVE, "wait")):
                            yield f"latency dispatch_{half}, {layout}{name}", self.few.bound(args, part)
                route = self.route(idx, capacity, tokens, slots, layout)
                planned = (x, given, route, delivery)
                yield (
                    f"dispatch_planned, {layout}{weighted}{name}",
                    lambda planned=planned: self.many.dispatch_planned(*planned),
                )
        yield from self.backs(tokens, x, idx, weights)

    def route(self, idx: Any, rows: int, tokens: int, slots: int = 0, layout: str = "grouped") -> Route:
        p = self.problem
        local = new(torch.int32, p.local_experts)
        lists = new(torch.int32, 4 * rows + p.world_size + 3)
        return Route(idx, idx, lists, local, local, 1, rows, tokens, None, slots, layout)

    def backs(self, tokens: int, x: Any, idx: Any, weights: Any) -> Iterator[tuple[str, Any]]:
        """Yield the calls that bring rows home, and the derivatives."""
        p = self.problem
        for name, each in (("", p.top_k), (", a row a copy", 1)):
            rows = tokens * p.world_size * each
            route = self.route(idx, rows, tokens)
            y, of_rows = new(torch.bfloat16, rows, p.hidden_size), new(torch.float32, rows)
            for weighted, sums in itertools.product((None, of_rows), ("", "wire:e4m3/32/mx")):
                more = (", weighted" if weighted is not None else "") + (f" {sums}" if sums else "")
                args = self.many.combine_args(y, weighted, route, None, sums)
                yield f"combine{name}{more}", self.path(args).bound(args)
                if weighted is None:
                    yield f"split combine{name}{more}", self.beside.bound(args)
                    if tokens <= LATENCY:
                        for part, half in ((SEND, "start"), (RECEIVE, "wait")):
                            yield f"latency combine_{half}{name}{more}", self.few.bound(args, part)
            yield f"combine with a residual{name}", lambda y=y, route=route: self.many.combine(y, None, route, x)
        rows = tokens * p.world_size * p.top_k
        route = self.route(idx, rows, tokens)
        y, of_rows = new(torch.bfloat16, rows, p.hidden_size), new(torch.float32, rows)
        yield "combine_gathered", lambda: self.many.combine_gathered(route, new(torch.int64, p.world_size), rows)
        yield "combine_backward", lambda: self.many.combine_backward(x, y, None, route)
        yield "combine_backward, weighted", lambda: self.many.combine_backward(x, y, of_rows, route)
        for layout in LAYOUTS[:2]:
            each = 1 if layout == "token_major" else p.top_k
            along = self.route(idx, tokens * p.world_size * each, tokens, 0, layout)
            grads = new(torch.bfloat16, along.num_rows, p.hidden_size), new(torch.float32, along.num_rows, p.top_k)
            for rows_, scalars in ((True, False), (True, True), (False, True)):
                given = [grad if there else None for grad, there in zip(grads, (rows_, scalars), strict=True)]
                what = " and ".join(["rows"] * rows_ + ["weights"] * scalars)
                yield (
                    f"dispatch_backward, {layout}, of {what}",
                    lambda given=given, along=along: self.many.dispatch_backward(*given, along),
                )

    def chosen(self, call: Any) -> str:
        """Return what a call launches."""
        self.recorder.launched.clear()
        call()
        return " + ".join(described(kernel, given) for kernel, _, given in self.recorder.launched)


def described(kernel: Any, given: dict[str, Any]) -> str:
    """Return a launch as text: the kernel, what it is compiled for, the roles of its blocks."""
    fields = [(field.name, getattr(kernel, field.name)) for field in dataclasses.fields(kernel)]
    fields = [(name, value) for name, value in fields if name not in ("problem", "tokens") and value not in (False, "")]
    variant = " ".join(name if value is True else f"{name}={value}" for name, value in fields)
    roles = " ".join(f"{name} {given[name]}" for name in ROLES if name in given)
    return f"{type(kernel).__name__}({variant}) {roles}"


def runs(machine: Machine) -> dict[str, list[str]]:
    """Return for each call from which number of tokens on what is chosen."""
    found: dict[str, list[str]] = {}
    last: dict[str, str] = {}
    for tokens in TOKENS:
        for name, call in machine.calls(tokens):
            choice = machine.chosen(call)
            if last.get(name) != choice:
                found.setdefault(name, []).append(f"{tokens}: {choice}")
                last[name] = choice
    return found


def record() -> str:
    lines = []
    for title, model in MODELS.items():
        of = {f"{gpu} x{ranks}": runs(Machine(ranks, GPUS[gpu], model)) for ranks in RANKS for gpu in GPUS}
        tables: dict[str, list[str]] = {}
        for call in dict.fromkeys(call for found in of.values() for call in found):
            same: dict[tuple[str, ...], list[str]] = {}
            for machine, found in of.items():
                same.setdefault(tuple(found.get(call, ["never"])), []).append(machine)
            text = "".join(
                f"  {', '.join(machines)}\n" + "".join(f"    {choice}\n" for choice in choices)
                for choices, machines in same.items()
            )
            tables.setdefault(text, []).append(call)
        lines.append(f"{title}\n")
        lines += ["".join(f" {call}\n" for call in calls) + text for text, calls in tables.items()]
    return "".join(lines)


def on_meta(patch: Any) -> None:
    """Make results without memory."""
    made = lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="meta")  # noqa: E731
    patch.setattr(outputs, "allocator", lambda device: lambda: made)


def recorded_on_meta(patch: Any) -> str:
    """Return the record, made without memory for results."""
    on_meta(patch)
    return record()


def test_choices_are_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    before, now = RECORDED.read_text(), recorded_on_meta(monkeypatch)
    found = list(difflib.unified_diff(before.splitlines(), now.splitlines(), "recorded", "now", lineterm="", n=3))
    assert not found, "the planner chooses otherwise; if that is meant, see above:\n" + "\n".join(found[:80])


EXTREMES = [
    [Row(operation, {knob: value for knob in KNOBS[operation]}) for operation in KNOBS] for value in (0, 1, 1024)
]
"""Rows of knobs as small and as large as files may have them."""


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_choose_differently_run_the_same_operations(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether rows are pushed, and where they are added, follows from what ranks agree on, never from a rank's GPU or
    its rows of the table: all launch kernels of the same variants with the same terms, except the grid of blocks that
    join, which no peer waits for. However small or large knobs are, a grid has a block of each kind that others wait
    for, and no more blocks than fit."""
    on_meta(monkeypatch)
    model = MODELS["256 experts, top 8, 7168"]
    machines = [Machine(ranks, gpu, model) for gpu in (*GPUS.values(), "NVIDIA B200", "another")]
    machines += [Machine(ranks, "NVIDIA H100 PCIe", model, *rows) for rows in EXTREMES]

    def launched(machine: Machine, tokens: int) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for name, call in machine.calls(tokens):
            machine.recorder.launched.clear()
            call()
            for kernel, _, given in machine.recorder.launched:
                assert 1 <= given["blocks"] <= SMS, (name, kernel, given["blocks"])
                if "pushers" in given:
                    assert 1 <= given["pushers"] < given["blocks"] >= 2
                if "senders" in given and kernel.send and ranks > 1:
                    assert given["senders"] >= 1
                if "senders" in given and kernel.receive:
                    assert given["first_receiver"] < given["blocks"]
            found[name] = [
                (kernel, terms) for kernel, terms, _ in machine.recorder.launched if not getattr(kernel, "joins", False)
            ]
        return found

    for tokens in (1, 4096):
        first, *others = (launched(machine, tokens) for machine in machines)
        assert all(other == first for other in others)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        RECORDED.write_text(recorded_on_meta(patch))
