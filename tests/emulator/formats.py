"""Checks of dispatches in a format, of both kinds of kernel, against tests/quantized.py."""

from __future__ import annotations

import dataclasses
import math
import random
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import quantized
import torch
from torch import Tensor

from . import latency, machine, repeats, throughput
from .memory import POISON
from .numbers import Int32, Int64
from .ranks import same
from .routes import Shape
from .threads import Launch, run

POISON_BYTE = POISON & 0xFF


class Call:
    """How the rows of a dispatch travel and arrive, and what that makes of a rank's tensors."""

    def __init__(self, name: str, layout: str, given: bool, zeros: bool = True) -> None:
        self.name, self.layout, self.given, self.zeros = name, layout, given, zeros
        self.short = name.removeprefix("e4m3/")

    def odd(self, on: Any) -> None:
        """Numbers that rounding and scales are about take the place of some of x."""
        draw = on.draw
        for tokens, at in zip(on.truth.tokens, on.at, strict=True):
            x = tokens.x
            x *= 10.0 ** torch.tensor([draw.uniform(-6, 6) for _ in range(x.shape[0])])[:, None]
            for row in x:
                kind = draw.random()
                if kind < 0.2:
                    row[draw.randrange(row.numel())] = draw.choice([float("inf"), float("nan"), -float("inf")])
                elif kind < 0.4:
                    first = draw.randrange(-(-row.numel() // 128)) * 128
                    row[first : first + 128] = draw.choice([0.0, -0.0, 1e-30, 448.0, 1.75, 3.0e38])
            on.ranks.floats(at["x"], *x.shape)[:] = x

    def inputs(self, on: Any) -> None:
        """Room for scales; and x as codes, if it is given so."""
        self.codes, self.scales = [], []
        for tokens, at in zip(on.truth.tokens, on.at, strict=True):
            codes, scales = quantized.quantized(tokens.x, self.short)
            self.codes.append(codes)
            self.scales.append(scales)
            if self.given:
                at["x"] = put_bytes(on, codes, "x")
                at["scales"] = put_bytes(on, self.stored(scales), "scales")

    def stored(self, scales: Tensor) -> Tensor:
        """Return scales as they come with x, or lie in rows."""
        if self.short != "32/mx":
            return scales.float()
        bytes_ = [[quantized.byte_of(s) if s == s else 255 for s in row] for row in scales.tolist()]
        return torch.tensor(bytes_, dtype=torch.uint8).view(scales.shape)

    def room(self, on: Any, rank: int) -> dict[str, int]:
        """Reserve memory for a rank's outputs."""
        case = on.truth.case
        rows, hidden, slots = case.capacity[rank], on.shape.hidden, case.slots[rank]
        lines = quantized.up(slots, 4) * case.experts_per_rank[rank] if slots else quantized.up(rows, 4)
        count = self.scales[0].shape[1]
        held = case.experts_per_rank[rank]
        kind, _, consumer = self.layout.partition("/")
        tiles = held * quantized.up(slots, 128) // 128 if slots else quantized.total_tiles(consumer, rows, held)
        quads = -(-count // 4)
        words = {
            "": 0, "rows": rows * count, "columns": lines * count, "packed": lines * quads,
            "swizzled": 128 * tiles * quads,
        }[kind]  # fmt: skip
        if self.layout:
            at = {"recv_x": on.ranks.blank(-(-rows * hidden // 4), "recv_x")}
        else:
            at = {"recv_x": on.ranks.blank(rows * hidden, "recv_x")}
        if self.layout == "rows" and self.short == "32/mx":
            words = -(-words // 4)
        self.words = words
        return {**at, "recv_scales": on.ranks.blank(words, "recv_scales") if words else 0, "zeros": self.zeros}

    def check(self, on: Any, rank: int, at: dict[str, int]) -> None:
        truth, case = on.truth, on.truth.case
        rows, hidden, count = case.capacity[rank], on.shape.hidden, self.scales[0].shape[1]
        codes = torch.zeros(rows, hidden, dtype=torch.uint8)
        scales = torch.zeros(rows, count, dtype=torch.float64)
        owned = torch.zeros(rows, dtype=torch.bool)
        for row, source, token, _ in truth.owned(rank):
            codes[row], scales[row], owned[row] = self.codes[source][token], self.scales[source][token], True
        defined = truth.rows[rank].covered if self.zeros else owned
        if self.layout == "":
            want = quantized.dequantized(codes, scales, torch.float32)
            want[~owned] = 0
            got = on.ranks.floats(at["recv_x"], rows, hidden)
            wrong = (got != want) & ~(got.isnan() & want.isnan())
            assert not wrong[defined].any(), f"numbers of rank {rank}"
            untouched(on.ranks.view(at["recv_x"], rows, hidden)[~defined], f"rows of rank {rank}")
            return
        got = on.ranks.memory.tensor(at["recv_x"], (rows, hidden), torch.uint8)
        same(got[defined].int(), codes[defined].int(), f"codes of rank {rank}")
        untouched(got[~defined], f"codes of rank {rank}")
        slots = case.slots[rank]
        if not case.experts_per_rank[rank]:
            return
        swizzled = self.layout.startswith("swizzled")
        sizes = []
        if swizzled:  # token-major rows have no segments
            sizes = [quantized.up(count, case.alignment) for count in truth.plans[rank].counts.tolist()]
        if self.layout == "rows":
            wants = [self.stored(torch.where(defined[:, None], scales, fill)).reshape(-1) for fill in (0.0, 1.0)]
        else:
            wants = [
                quantized.laid(scales, defined, self.layout, sizes, slots, swizzled and self.zeros, fill)
                for fill in (0.0, float("nan"))
            ]
        low, high = (want.contiguous().view(-1).view(torch.uint8) for want in wants)
        there = on.ranks.memory.tensor(at["recv_scales"], (low.numel(),), torch.uint8)
        known = low == high
        if self.layout != "packed" and self.short != "32/mx":  # bytes of different floats may be the same
            known = known.view(-1, 4).all(1).repeat_interleave(4)
        same(there[known].int(), low[known].int(), f"scales of rank {rank}")
        if swizzled:
            untouched(there[~known], f"scales of rank {rank}")


def untouched(bytes_: Tensor, what: str) -> None:
    assert (bytes_.contiguous().view(-1).view(torch.uint8) == POISON_BYTE).all(), f"{what}: written where nothing lies"


def put_bytes(on: Any, tensor: Tensor, name: str) -> int:
    """The address of a copy."""
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    address = on.ranks.memory.take(max(raw.numel(), 16), name)
    on.ranks.memory.tensor(address, raw.shape, torch.uint8)[:] = raw
    return address


def many(shape: Shape, draw: random.Random, call: Call, known: bool = True) -> None:
    """Throughput kernels, along a new route and along the same again."""
    from cute_kernels import marks
    from cute_kernels.throughput.publish import Publish
    from cute_kernels.throughput.pull import Pull

    on = throughput.Steps(shape, draw)
    on.inputs()
    call.odd(on)
    call.inputs(on)
    for along in (False, True)[: 1 + known]:
        launches: list[Launch] = []
        terms = marks.pack(
            "dispatch_planned" if along else "dispatch", on.truth.case.max_tokens, True, format=call.name
        )
        none = dict.fromkeys(("send_rows", "offs", "counts", "dropped"), 0) if along else {}
        for rank in range(on.ranks.world_size):
            on.renew(rank)
            on.at[rank].update(call.room(on, rank))
            first = len(launches)
            publish = Publish(on.problem, not along, True, True, False, call.name, call.given)
            launches.append(on.launch(rank, publish, terms, blocks=throughput.TILES + on.staging, **none))
            pull = Pull(on.problem, True, False, not along, False, call.name, call.layout)
            launches.append(on.launch(rank, pull, terms, first, blocks=2 + on.joining * along))
            if not along:
                late = Pull(on.problem, True, False, True, True, call.name, call.layout)
                launches.append(on.launch(rank, late, terms, first + 1, blocks=on.joining))
        on.ranks.run(launches)
        if not along:
            on.truth.check_plan(on.ranks, on.at)
        for rank, at in enumerate(on.at):
            call.check(on, rank, at)
            check_weights(on, rank, at, call.zeros)


def few(
    shape: Shape, draw: random.Random, call: Call, split: bool = False, blocks: Any = (2, 0, 3), distinct: bool = False
) -> None:
    """Latency kernels, twice. `distinct`: they reject entries that repeat, of which there are none."""
    if distinct:
        shape = dataclasses.replace(shape, slots=(0,))
    on = latency.Pair(shape, draw, blocks, blocks)
    on.variant = (call.name, call.layout, call.given)
    for _ in range(2):
        on.inputs()
        if distinct:
            repeats.replace_ids(on, on.ranks, shape, draw)
            for at, ids in zip(on.at, on.truth.case.topk_idx, strict=True):
                at["topk_idx"] = on.ranks.memory.put(ids, "topk_idx")
        call.odd(on)
        call.inputs(on)
        on.given = [call.room(on, rank) for rank in range(on.ranks.world_size)]
        for at, given in zip(on.at, on.given, strict=True):
            at["recv_x"] = given["recv_x"]
            if distinct:
                given["slots"] = repeats.DISTINCT
            if call.given:
                given["scales"] = at["scales"]
        on.run("dispatch", True, split)
        on.truth.check_plan(on.ranks, on.at)
        for rank, (at, given) in enumerate(zip(on.at, on.given, strict=True)):
            call.check(on, rank, {**at, **given})
            check_weights(on, rank, at, call.zeros)


def check_weights(on: Any, rank: int, at: dict[str, int], zeros: bool) -> None:
    want = on.truth.rows[rank]
    rows = want.covered.clone()
    if not zeros:
        rows[:] = False
        rows[[row for row, *_ in on.truth.owned(rank)]] = True
    same(on.ranks.floats(at["recv_weights"], *want.weights.shape)[rows], want.weights[rows], f"weights of rank {rank}")


class Places:
    """One warp that asks for the places of rows, and clears what lies behind the kept ones of each expert."""

    options: ClassVar[dict[str, Any]] = {"block": (32, 1, 1)}

    def __init__(self, tiles: Any, to: Any, rows: list[int], segments: list[tuple[int, int, int, int]]) -> None:
        self.tiles, self.to, self.rows, self.segments = tiles, to, rows, segments
        self.found: dict[int, int] = {}

    def kernel(self, _: Any) -> None:
        for row in self.rows:
            self.found[row] = int(self.tiles.scales_at(self.to, Int32(row)))
        for segment in self.segments:
            self.tiles.clear(self.to, *map(Int32, segment))


class One(NamedTuple):
    blocks: int = 1


def places(draw: random.Random) -> None:
    """Check the places of swizzled scales, for more rows and experts than kernels are emulated with: each row of each
    segment, and those behind the kept ones, which are cleared. Then, of segments that cannot be, none is outside of the
    scales."""
    from cute_kernels.delivery import Arrived
    from cute_kernels.swizzled import Begins, Tiles
    from cute_kernels.views import Ints

    experts, alignment, count = draw.choice([1, 3, 40]), draw.choice([1, 16, 128]), draw.choice([4, 7])
    most = 300 if experts < 40 else 130
    kept = [draw.choice([0, draw.randint(1, 30), draw.randint(100, most)]) for _ in range(experts)]
    sizes = [quantized.up(n, alignment) for n in kept]
    slots = draw.choice([0, quantized.up(max(sizes), 4)])
    begins = [e * slots if slots else sum(sizes[:e]) for e in range(experts)]
    rows = slots * experts or sum(sizes) + draw.randint(0, 90)
    number = torch.arange(rows)[:, None]
    scales = 2.0 ** torch.cat([number % 200, number // 200, *[number % 7] * (count - 2)], 1).sub(100).double()
    held, padded = torch.zeros(2, rows, dtype=torch.bool)
    for begin, n, size in zip(begins, kept, sizes, strict=True):
        held[begin : begin + n], padded[begin : begin + size] = True, True
    for consumer in ("torch", "quack", "flashinfer"):
        scales[padded & ~held] = 0
        want, other = (
            quantized.laid(scales, padded, f"swizzled/{consumer}", sizes, slots, True, fill).flatten()
            for fill in (0.0, math.nan)
        )
        memory = machine.new_memory(1 << 22)
        offs = torch.tensor([b + s for b, s in zip(begins, sizes, strict=True)], dtype=torch.int32)
        lie, ends = memory.take(max(want.numel(), 16), "scales"), memory.put(offs, "offs")
        starts = [Int32(begin) for begin in begins] if draw.random() < 0.5 else None
        words = -(-count // 4)
        given = Begins(Int32(experts), Ints(Int64(ends)), starts)
        to = Arrived(Int64(0), Int64(0), Int64(lie), Int32(rows), Int32(slots), given)
        segments = list(zip(range(experts), begins, kept, sizes, strict=True))
        asked = held.nonzero().flatten().tolist()
        kernel = Places(Tiles(consumer, words), to, asked, segments)
        run([Launch(kernel, One())], draw)
        there = memory.tensor(lie, (want.numel(),), torch.uint8)
        for row in asked:
            for word in range(words):
                first = kernel.found[row] - lie + 512 * word
                assert torch.equal(there[first : first + 4], torch.full((4,), POISON_BYTE).byte()), "cleared or shared"
                there[first : first + 4] = want[first : first + 4]
                own = [quantized.byte_of(s) for s in scales[row, 4 * word : 4 * word + 4].tolist()]
                assert want[first : first + 4].tolist() == own + [0] * (4 - len(own)), f"row {row} of {consumer}"
        known = want == other
        assert torch.equal(there[known], want[known]), f"scales of {consumer}"
        untouched(there[~known], f"scales of {consumer}")
        wild = torch.tensor([draw.randint(-(2**31), 2**31 - 1) for _ in offs], dtype=torch.int32)
        memory.tensor(ends, (experts,), torch.int32)[:] = wild
        to = to._replace(begins=Begins(Int32(experts), Ints(Int64(ends))))
        kernel = Places(Tiles(consumer, words), to, draw.sample(range(rows), min(rows, 20)), [])
        run([Launch(kernel, One())], draw)
        assert all(lie <= at and at + 512 * (words - 1) + 4 <= lie + want.numel() for at in kernel.found.values())


class Parts:
    """One warp that quantizes rows, part by part, the last one first."""

    options: ClassVar[dict[str, Any]] = {"block": (32, 1, 1)}

    def __init__(self, form: Any, dtype: str, x: int, rows: list[int]) -> None:
        self.form, self.x, self.rows = form, x, rows
        self.problem = SimpleNamespace(
            hidden_size=form.hidden_size, dtype=dtype, row_bytes=form.hidden_size * (4 if dtype == "fp32" else 2)
        )

    def kernel(self, _: Any) -> None:
        from cute_kernels.throughput.stage_quantized import parts_of, quantize_part

        ranks: Any = SimpleNamespace(heap=SimpleNamespace(problem=self.problem))
        args = SimpleNamespace(x=Int64(self.x))
        for token, row in enumerate(self.rows):
            for part in reversed(range(parts_of(self.form, False, self.problem.dtype))):
                quantize_part(self.form, False, ranks, args, Int32(token), Int64(row), Int32(part))


def parts(draw: random.Random) -> None:
    """Rows of several parts, the last of them not whole, of two dtypes: every code and every scale of a row, where it
    is staged, and nothing behind them."""
    from cute_kernels.formats import Form

    for name in ("128/pow2", "128/fp32", "32/mx", "row/fp32"):
        for dtype, hidden in (("bf16", 1120), ("fp32", 608)) if name == "32/mx" else (("bf16", 1152), ("fp32", 640)):
            form, memory = Form(f"e4m3/{name}", hidden), machine.new_memory(1 << 18)
            x = torch.randn(2, hidden, generator=torch.Generator().manual_seed(draw.getrandbits(32)))
            x[0] *= 10.0 ** torch.linspace(-6, 6, hidden)
            x[1, draw.randrange(hidden)] = draw.choice([math.inf, math.nan, 3e38])
            x = x.bfloat16() if dtype == "bf16" else x
            given = memory.put(x.view(torch.int32), "x")
            rows = [memory.take(form.staged_bytes + 16, "row") for _ in x]
            run([Launch(Parts(form, dtype, given, rows), One())], draw)
            codes, scales = quantized.quantized(x.float(), name)
            for row, want, its in zip(rows, codes, scales.tolist(), strict=True):
                there = memory.tensor(row, (form.staged_bytes + 16,), torch.uint8)
                assert torch.equal(there[:hidden], want.view(torch.uint8)), f"codes of {name}, {dtype}"
                if form.in_bytes:
                    stored = [quantized.byte_of(scale) if scale == scale else 255 for scale in its]
                    exact = torch.tensor(stored + [0] * (-len(its) % 4), dtype=torch.uint8)
                else:
                    exact = torch.tensor(its).float().view(torch.uint8)
                assert torch.equal(there[hidden : hidden + exact.numel()], exact), f"scales of {name}, {dtype}"
                untouched(there[hidden + exact.numel() :], f"row of {name}, {dtype}")


def swizzled(draw: random.Random) -> str:
    return f"swizzled/{draw.choice(['torch', 'quack', 'flashinfer'])}"


CHECKS = {
    "formats_columns": lambda draw: many(
        Shape((2, 3), 3, 4, hidden=640, alignment=4, slots=(0, 8)), draw, Call("e4m3/128/pow2", "columns", False)
    ),
    "formats_packed": lambda draw: many(
        Shape((3, 0, 2), 3, 3, hidden=128, slots=(0, 5), share=0.5), draw, Call("e4m3/128/pow2", "packed", False), False
    ),
    "formats_fp32": lambda draw: many(
        Shape((2, 2), 2, 4, hidden=384, alignment=4), draw, Call("e4m3/128/fp32", "rows", False, zeros=False), False
    ),
    "formats_mx": lambda draw: many(
        Shape((2, 2), 2, 4, hidden=160, alignment=4), draw,
        Call("e4m3/32/mx", draw.choice(["rows", "packed"]), draw.random() < 0.5), False,
    ),
    "formats_row": lambda draw: many(
        Shape((2, 2), 2, 4, hidden=48), draw, Call("e4m3/row/fp32", "rows", draw.random() < 0.5), False
    ),
    "formats_given": lambda draw: many(
        Shape((2, 2), 3, 4, hidden=256, alignment=2), draw, Call("e4m3/128/pow2", "columns", True)
    ),
    "formats_wire": lambda draw: many(
        Shape((2, 2), 2, 4, hidden=256, alignment=2), draw,
        Call(draw.choice(["e4m3/128/pow2", "e4m3/32/mx", "e4m3/row/fp32"]), "", False), False,
    ),
    "formats_across": lambda draw: many(
        Shape((2, 2, 2), 4, 3, hidden=256, alignment=2, domains=((0,), (1,), (2,)), wire="nvshmem"), draw,
        Call(draw.choice(["e4m3/128/pow2", "e4m3/32/mx"]), draw.choice(["", "rows", "packed"]), draw.random() < 0.3),
    ),
    "formats_across_pairs": lambda draw: many(
        Shape((2,) * 4, 2, 3, hidden=128, domains=((0, 1), (2, 3)), wire="nvlink"), draw,
        Call("e4m3/128/pow2", "columns", False), False,
    ),
    "formats_one_rank": lambda draw: many(
        Shape((4,), 2, 3, hidden=128, alignment=2), draw, Call("e4m3/128/fp32", "columns", False)
    ),
    "formats_parts": parts,
    "formats_places": lambda draw: [places(draw) for _ in range(3)],
    "formats_swizzled": lambda draw: many(
        Shape((3, 0, 4), 4, 3, hidden=160, alignment=draw.choice([1, 4]), slots=(0, 0, 8)), draw,
        Call("e4m3/32/mx", swizzled(draw), draw.random() < 0.5, zeros=draw.random() < 0.7), draw.random() < 0.5,
    ),
    "formats_few_swizzled": lambda draw: few(
        Shape((2, 0, 9), 5, 3, hidden=160, alignment=draw.choice([1, 4]), slots=(0, 0, 8)), draw,
        Call("e4m3/32/mx", swizzled(draw), draw.random() < 0.5, zeros=draw.random() < 0.7),
    ),
    "distinct_swizzled": lambda draw: few(
        Shape((2, 0, 9), 5, 3, hidden=160, alignment=draw.choice([1, 4])), draw,
        Call("e4m3/32/mx", swizzled(draw), False, zeros=draw.random() < 0.7), distinct=True,
    ),
    "formats_few": lambda draw: few(
        Shape((2, 3), 5, 4, hidden=640, alignment=4, slots=(0, 8)), draw,
        Call("e4m3/128/pow2", draw.choice(["rows", "columns", "packed"]), draw.random() < 0.3),
    ),
    "formats_few_mx": lambda draw: few(
        Shape((2, 0, 2), 9, 3, hidden=480, alignment=2), draw,
        Call("e4m3/32/mx", draw.choice(["rows", "packed"]), draw.random() < 0.5, zeros=False), split=True,
    ),
    "formats_few_wire": lambda draw: few(
        Shape((2, 2), 2, 4, hidden=512, alignment=2), draw,
        Call(draw.choice(["e4m3/128/fp32", "e4m3/32/mx"]), "", False),
    ),
    "formats_few_across": lambda draw: few(
        Shape(
            (2, 3), 3, 4, hidden=512, alignment=4, domains=((0,), (1,)), wire="nvshmem", rows=draw.choice((1, 3))
        ),
        draw, Call("e4m3/128/pow2", draw.choice(["rows", "columns", ""]), False),
    ),
    "formats_few_one_rank": lambda draw: few(
        Shape((4,), 3, 3, hidden=256, slots=(0, 6)), draw, Call("e4m3/128/fp32", "columns", False), blocks=(0, 0, 3)
    ),
}  # fmt: skip
