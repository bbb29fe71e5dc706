"""MoECommunicator against a dense model: every mode, layout and format, on one and two ranks, eager and compiled; and
what is rejected."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
from calls import counted
from graphs import captured_graphs
from moe_cases import (
    MODES,
    MOST,
    REPLICAS,
    ROWS,
    E,
    Given,
    H,
    K,
    communicator,
    computed,
    config,
    dense,
    drawn,
    layer,
    matrices,
    on_ranks,
)
from ranks import run_ranks
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from ep_ops import formats
from ep_ops.formats import FORMATS, LAYOUTS
from ep_ops.moe import (
    DispatchHandle,
    DispatchOutput,
    MoECommunicator,
    Quant,
)
from ep_ops.nn import grouped_mm, interleave


def ways() -> list[dict[str, Any]]:
    """Configurations: every layout with every mode and with every format, as far as they go together, with and without
    replicas and overlap."""
    found = []
    either = itertools.cycle([{}, {"overlap": True}, {"placement": REPLICAS}, {"placement": REPLICAS, "overlap": True}])
    for mode, rows, form in itertools.product(MODES, ROWS, ("", *FORMATS)):
        way = dict(mode=mode, layout=rows, quant=Quant(form))
        if (mode == "auto" or not form) and config(**way).problem_of_layer() is None:
            found.append({**way, **next(either)})
    found += [dict(layout=rows, capacity="exact", placement=REPLICAS) for rows in ("grouped", "token_major")]
    return found


def test_what_goes_together() -> None:
    """All but scales of whole rows with latency kernels."""
    for mode, rows, form in itertools.product(MODES, ROWS, ("", *FORMATS)):
        apart = mode == "latency" and "row" in form
        assert (config(mode=mode, layout=rows, quant=Quant(form)).problem_of_layer() is None) == (not apart)


def errors(seed: int, tokens: list[int]) -> list[tuple[dict[str, Any], float]]:
    """Return how far each way of computing the layer is from a dense one."""
    found = []
    w = matrices(seed)
    for turn, way in enumerate(ways()):
        with torch.no_grad(), communicator(**way) as moe:
            rank = moe.comm.rank
            given = drawn(seed + turn, rank, tokens[rank])
            out = layer(moe, given, w[list(moe.local_experts)], max(tokens) if turn % 2 else None)
            expected = dense(given, w)
            found.append((way, float((out - expected).norm() / expected.norm().clamp(min=1e-6))))
    return found


@pytest.mark.parametrize("tokens", [[9], [7, MOST], [0, 5]], ids=str)
def test_every_mode_layout_and_format(tokens: list[int]) -> None:
    for found in on_ranks(len(tokens), errors, cases.fresh_seed(), tokens):
        assert len(found) == len(ways())
        for way, error in found:
            inexact = "fp32" in way.get("quant", Quant()).format
            assert error < (0.04 if inexact else 1e-5), way


# ---------------------------------------------------------------------- gradients, compiled code


def gradients(seed: int, way: dict[str, Any], compiled: bool) -> list[list[Tensor]]:
    """Result and gradients of x, weights and matrices: the layer's, and those of dense ones of all ranks."""
    with communicator(**way) as moe:
        rank, ranks = moe.comm.rank, moe.comm.world_size
        tokens = [MOST - 3 * r for r in range(ranks)]
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        own = drawn(seed, rank, tokens[rank], grad=True)
        w = matrices(seed)[list(moe.local_experts)].requires_grad_()
        out = run(moe, own, w)
        out.sin().sum().backward()
        # Of a logical expert, what its replicas have.
        of_logical = torch.zeros(E, H, H).index_add_(0, torch.tensor(moe.local_experts), w.grad)
        if ranks > 1:
            dist.all_reduce(of_logical)
        everywhere = matrices(seed).requires_grad_()
        givens = [drawn(seed, r, tokens[r], grad=True) for r in range(ranks)]
        outs = [dense(given, everywhere) for given in givens]
        torch.stack([other.sin().sum() for other in outs]).sum().backward()
        mine = givens[rank]
        return [
            [out.detach(), own.x.grad, own.weights.grad, of_logical],
            [outs[rank].detach(), mine.x.grad, mine.weights.grad, everywhere.grad],
        ]


@pytest.mark.parametrize(
    ("rows", "compiled", "ranks"),
    [*((rows, False, 2) for rows in ROWS), ("grouped", True, 2), ("padded", True, 1), ("token_major", True, 1)],
)
def test_gradients(rows: str, compiled: bool, ranks: int) -> None:
    """Gradients are right with replicas, statistics and split operations, and with rows quantized on the wire."""
    way = dict(layout=rows, placement=REPLICAS, statistics=True, overlap=rows != "grouped")
    way["quant"] = Quant("wire:e4m3/128/pow2" if rows == "padded" else "")
    torch._dynamo.reset()
    for got, expected in on_ranks(ranks, gradients, cases.fresh_seed(), way, compiled):
        for mine, theirs in zip(got, expected, strict=True):
            assert theirs.abs().max() > 0.1
            assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


def in_turns(moe: MoECommunicator, givens: list[Given], w: Tensor) -> list[Tensor]:
    """Micro-batches by turns, each in a flight of its own."""

    def turns(given: Given, flight: int) -> Iterator[Tensor | None]:
        request = moe.dispatch_async(given.x, given.ids, given.weights, flight=flight)
        yield None
        output, handle = request.wait()
        request = moe.combine_async(computed(moe, output, w), handle, flight=flight)
        yield None
        yield request.wait()

    return interleave(*(turns(given, flight) for flight, given in enumerate(givens)))


def two_batches(seed: int, way: dict[str, Any], compiled: bool) -> list[list[Tensor]]:
    """Results and gradients of two micro-batches, and of dense ones."""
    with communicator(**way) as moe:
        rank, found = moe.comm.rank, []
        w = matrices(seed)
        run = torch.compile(in_turns, fullgraph=True, backend="aot_eager") if compiled else in_turns
        for each in (
            lambda givens: run(moe, givens, w[list(moe.local_experts)]),
            lambda givens: [dense(given, w) for given in givens],
        ):
            givens = [drawn(seed + batch, rank, tokens, grad=True) for batch, tokens in enumerate((MOST, 5))]
            outs = each(givens)
            sum(out.sin().sum() for out in outs).backward()
            found.append([*(out.detach() for out in outs), *(t.grad for g in givens for t in (g.x, g.weights))])
        if not compiled and way["overlap"]:
            request = moe.dispatch_async(givens[0].x, givens[0].ids, flight=1)
            with pytest.raises(RuntimeError, match="flight 1 is in use"):
                moe.dispatch_async(givens[0].x, givens[0].ids, flight=1)
            request.wait()
        return found


@pytest.mark.parametrize(
    ("rows", "overlap", "compiled", "ranks"),
    [
        ("grouped", True, False, 2),
        ("token_major", True, True, 1),
        ("padded", True, False, 1),
        ("grouped", False, True, 2),
    ],
)
def test_two_batches_in_turns(rows: str, overlap: bool, compiled: bool, ranks: int) -> None:
    way = dict(layout=rows, placement=REPLICAS, statistics=True, overlap=overlap)
    torch._dynamo.reset()
    for got, expected in on_ranks(ranks, two_batches, cases.fresh_seed(), way, compiled):
        for mine, theirs in zip(got, expected, strict=True):
            assert theirs.abs().max() > 0.1
            assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


def test_handles_are_tensors() -> None:
    """Handles pass from one compiled function to another, to a second dispatch, and back; siblings and other placements
    use the code that is there."""
    seed = cases.fresh_seed()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = lambda function: torch.compile(function, fullgraph=True, dynamic=False, backend=counter)  # noqa: E731
    with communicator(placement=REPLICAS, statistics=True) as first:

        @compiled
        def there(
            moe: MoECommunicator, x: Tensor, ids: Tensor, weights: Tensor
        ) -> tuple[DispatchOutput, DispatchHandle]:
            return moe.dispatch(x, ids, weights)

        @compiled
        def again(moe: MoECommunicator, x: Tensor, handle: DispatchHandle) -> tuple[DispatchOutput, DispatchHandle]:
            return moe.dispatch(x, None, previous_handle=handle)

        @compiled
        def back(moe: MoECommunicator, rows: Tensor, handle: DispatchHandle, offs: Tensor, w: Tensor) -> Tensor:
            return moe.combine(grouped_mm(rows, w, offs), handle)

        placements = [REPLICAS, (4, 1, 0, 2, 2, 2, 3, 1), tuple(range(E)) + (0, 0, 0)]
        asked = [0, 0]
        with torch.no_grad():
            for turn, (placement, moe) in enumerate(itertools.product(placements, (first, first.sibling()))):
                given, w = drawn(seed + turn, 0, MOST), matrices(seed)
                moe.place(placement)
                assert moe.local_experts == moe.placement == placement
                local = w[list(placement)]
                output, handle = there(moe, given.x, given.ids, given.weights)
                assert_close(back(moe, output.x, handle, output.offs, local), dense(given, w))
                output, more = again(moe, given.x + 1, handle)
                plain = dataclasses.replace(given, x=given.x + 1, weights=torch.ones(MOST, K))
                assert more.weights is None
                assert_close(back(moe, output.x, more, output.offs, local), dense(plain, w))
                asked[turn % 2] += 2 * int((given.ids >= 0).sum())
                assert int(moe.load().sum()) == asked[turn % 2]  # each counts for itself
                assert moe.comm.statistics().dispatches == 2 * (turn + 1)
        # there, again, and back with weights and without
        assert counter.frame_count == 4


OTHERS = 2
"""Calls that other releases than Python 3.11 and torch 2.13 may take more."""


def test_it_costs_nothing_over_the_operators() -> None:
    """Without a placement and statistics, the same operators run, with a few more calls of Python."""
    given = drawn(0, 0, MOST)
    with communicator() as moe, torch.no_grad():

        def by_hand(x: Tensor) -> Tensor:
            sent = moe.comm.dispatch(x, given.ids.int(), given.weights)
            return moe.comm.combine(sent.x, sent.route, sent.weights)

        def by_moe(x: Tensor) -> Tensor:
            output, handle = moe.dispatch(x, given.ids.int(), given.weights)
            return moe.combine(output.x, handle)

        assert captured_graphs(by_hand, given.x) == captured_graphs(by_moe, given.x)
        torch._dynamo.reset()
        for run in (by_hand, by_moe):  # the first calls fill caches
            run(given.x)
        few, many = (counted(lambda run=run: run(given.x)) for run in (by_hand, by_moe))
        print(few, many)
        assert 0 < many[0] - few[0] <= 13 + OTHERS and many[1] - few[1] <= 5 + OTHERS


def test_modes_and_sizes() -> None:
    """The inner communicator gets the options of the mode, and buffers the sizes for all tokens or for few."""
    for mode, bound in (("auto", 7), ("throughput", 0), ("latency", MOST)):
        with communicator(mode=mode, latency_max_tokens=7 if mode == "auto" else None) as moe:
            assert moe.comm.config.latency_max_tokens == bound
    rows = {
        # layout, capacity: rows of 12 tokens, of 2
        ("grouped", None): ((112, H), (80, H)),  # 24 + 5 * 15, and 4 + 5 * 15, in multiples of 16
        ("grouped", 96): ((96, H), (80, H)),
        ("padded", None): ((E, 16, H), (E, 16, H)),
        ("padded", 4): ((E, 4, H), (E, 2, H)),
        ("token_major", None): ((MOST, H), (2, H)),
        ("token_major", 5): ((5, H), (2, H)),
        ("grouped", "exact"): (None, None),
    }
    given = drawn(0, 0, 2)
    for (layout, capacity), shapes in rows.items():
        alignment = 2 if (layout, capacity) == ("padded", 4) else 16
        with communicator(layout=layout, capacity=capacity, alignment=alignment) as moe, torch.no_grad():
            for max_tokens, shape in zip((None, 2), shapes, strict=True):
                output, handle = moe.dispatch(given.x, given.ids, max_tokens=max_tokens)
                if shape is None:
                    assert output.x.shape == (int(output.offs[-1]), H)
                else:
                    assert output.x.shape == shape, (layout, capacity, max_tokens)
                assert handle.route.max_tokens == (max_tokens or MOST)
            _, handle = moe.dispatch(given.x[:0], given.ids[:0], max_tokens=0)  # of no rank any token
            assert handle.route.max_tokens == 0 and not handle.route.counts.any()


# ---------------------------------------------------------------------- rejections


@pytest.mark.parametrize(("operator", "call"), [
    ("combine_start", lambda moe, given: moe.combine_async(given.x, None, flight=1)),
    ("dispatch_start", lambda moe, given: moe.dispatch_async(given.x, given.ids, quant="e4m3", flight=1)),
    ("dispatch_start", lambda moe, given: moe.dispatch_async(given.x, given.ids, max_tokens="few", flight=1)),
])  # fmt: skip
def test_other_ranks_are_told_the_flight(operator: str, call: Any) -> None:
    """A start is rejected in its own flight, because the other one may be in use."""
    with communicator(overlap=True) as moe:
        with pytest.raises((TypeError, ValueError)), mock.patch.object(moe.comm.backend, "reject") as told:
            call(moe, drawn(0, 0, 2))
        told.assert_called_once_with(operator, mock.ANY, 1, MOST)


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    (dict(mode="fast"), "mode is 'fast'; allowed: one of 'auto', 'latency', 'throughput'"),
    (dict(layout="flat"), "layout is 'flat'; allowed: one of"),
    (dict(capacity="all"), "capacity is 'all'; allowed: None, 'exact' or an int"),
    (dict(capacity="exact", layout="padded"), "layout 'padded' has a fixed number of slots"),
    (dict(capacity=0, layout="padded"), "capacity is 0; allowed with layout 'padded'"),
    (dict(quant="e4m3"), "quant is 'e4m3'; allowed: an ep_ops.moe.Quant"),
    (dict(combine_format="e4m3/32/mx"), "combine_format is 'e4m3/32/mx'; allowed for a combine: ''"),
    (dict(combine_format="wire:e4m3/128/pow2", hidden_size=96), "hidden_size is 96; format 'wire:e4m3/128/pow2' takes"),
    (dict(quant=Quant("e4m3/32/mx"), hidden_size=40), "hidden_size is 40; format 'e4m3/32/mx' takes multiples of 32"),
    (dict(quant=Quant("e5m2")), "format is 'e5m2'; allowed"),
    (dict(quant=Quant("e4m3/row/fp32", "columns")), "scales_as is 'columns'; allowed for format"),
    (dict(quant=Quant("e4m3/32/mx", "", torch.ones(1))), "quant has scales; allowed"),
    (dict(quant=Quant(None)), "format of quant is None; allowed: a str"),  # type: ignore[arg-type]
    (dict(mode="latency", quant=Quant("e4m3/32/mx", 5)), "scales_as of quant is 5; allowed: a str"),  # type: ignore[arg-type]
    (dict(mode="throughput", latency_max_tokens=8), "latency_max_tokens is 8; mode 'throughput' has no bound"),
    (dict(mode="latency", capacity="exact"), "mode 'latency' has no kernels for exact sizes"),
    (dict(mode="latency", quant=Quant("e4m3/row/fp32")), "mode 'latency' has no kernels for one scale a row"),
    (dict(mode="latency", max_tokens_per_rank=100_000), "mode 'latency' takes at most [1-9][0-9]* of"),
    (dict(mode="latency", dtype=torch.float64), "mode 'latency' has no kernels .* 'reference' only; allowed: mode"),
    (dict(placement=5), "placement is 5; allowed:"),
    (dict(placement=(0, 1, 2, 3, 5)), r"placement\[4\] is 5; allowed: logical experts, 0..4"),
    (dict(placement=(0, 1, 2, 4, 4)), "placement leaves out logical expert 3"),
    (dict(placement=(0,), num_experts=0), "num_experts is 0; allowed: a positive int"),
    (dict(placement=(), num_experts=-1), "num_experts is -1; allowed: a positive int"),
    (dict(top_k=0), "top_k is 0; allowed: an int from 1 to 32"),
)  # fmt: skip


@pytest.mark.parametrize(("way", "text"), WRONG, ids=lambda value: "" if isinstance(value, str) else str(value)[:40])
def test_configurations_that_cannot_be(way: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        communicator(**way)
    with communicator():  # nothing is left of it
        pass


def rejected() -> list[str]:
    """On each rank, what calls raise that one rank or all ranks get wrong; each by itself."""
    rank, said = dist.get_rank(), []

    def note(call: Any) -> None:
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        said.append(str(error.value))

    given = drawn(0, rank, MOST)
    note(lambda: communicator(mode="auto" if rank else "slow"))
    note(lambda: communicator(placement=REPLICAS if rank else REPLICAS[::-1]))
    note(lambda: MoECommunicator(config(), device="cpu" if rank else "cuda:9"))
    with communicator(placement=REPLICAS) as moe, torch.no_grad():
        note(lambda: moe.place(REPLICAS if rank else (0, 1, 2)))
        note(lambda: moe.place(REPLICAS if rank else REPLICAS[::-1]))
        note(lambda: moe.sibling((0, 1, 2, 3, 4)))
        assert moe.placement == REPLICAS
        bad = given.ids.clone()
        bad[3, 1] = E if rank else bad[3, 1]
        note(lambda: moe.dispatch(given.x, bad))
        many = torch.zeros(MOST + 1, K, dtype=torch.int64)
        note(lambda: moe.dispatch(torch.zeros(MOST + 1, H), many) if rank else moe.dispatch(given.x, given.ids))
        note(lambda: moe.dispatch(given.x, given.ids, quant=None if rank else "e4m3/32/mx"))  # type: ignore[arg-type]
        output, handle = moe.dispatch(given.x, given.ids)
        note(lambda: moe.dispatch(given.x, None if rank else given.ids, previous_handle=handle))
        note(moe.reset_load)
        wrong: Any = handle if rank else handle.route
        note(lambda: moe.combine(output.x, wrong))
        note(lambda: moe.dispatch(given.x, None, previous_handle=wrong))
        unnamed: Any = None if rank else Quant(None)  # type: ignore[arg-type]
        note(lambda: moe.dispatch(given.x, given.ids, quant=unnamed))
        note(lambda: moe.dispatch(given.x, None, quant=unnamed, previous_handle=handle))
        assert moe.combine(output.x, handle).shape == (MOST, H)  # it goes on
    with communicator(layout="padded", overlap=True) as slots, torch.no_grad():
        output, handle = slots.dispatch(given.x, given.ids)
        note(lambda: slots.combine_async(output.x, None if rank else handle))  # type: ignore[arg-type]
        for bound in ("12", 2.5):
            odd: Any = bound if rank else MOST
            note(lambda odd=odd: slots.dispatch_async(given.x, given.ids, max_tokens=odd, flight=1))
        number: Any = None if rank else 3
        note(lambda: slots.dispatch_async(given.x, given.ids, quant=number, flight=1))
        slots.dispatch_async(given.x, given.ids, flight=1).wait()
    with communicator(mode="latency") as few, torch.no_grad():
        note(lambda: few.place(range(E)))
        _, handle = few.dispatch(given.x, given.ids)
        note(lambda: few.dispatch(given.x, None, previous_handle=handle))
        note(lambda: few.dispatch(given.x, given.ids, quant=Quant("wire:e4m3/row/fp32")))
    return said


def test_latency_kernels_within_bounded_memory() -> None:
    """Latency kernels take no more tokens than a round has."""
    with pytest.raises(ValueError, match="mode 'latency' takes at most 0 of .* within staging_bytes 1000; allowed"):
        MoECommunicator(config(mode="latency", staging_bytes=1000), device="cpu")


def test_what_is_rejected_is_rejected_on_all_ranks() -> None:
    first, second = run_ranks(2, rejected)
    wanted = [
        ("mode is 'slow'", "rejected by rank 0: mode is 'slow'"),
        ("ranks disagree on placement", "ranks disagree on placement"),
        ("device is 'cuda:9', but torch", "rejected by rank 0: device is 'cuda:9', but torch"),
        ("placement leaves out logical expert 3", "rejected by rank 0: placement leaves out"),
        ("ranks disagree on placement", "ranks disagree on placement"),
        ("placement has 5 places; allowed: 8, as configured",) * 2,
        ("rejected by rank 1: topk_idx[3, 1] is 8 on rank 1", "topk_idx[3, 1] is 8 on rank 1"),
        ("rejected by rank 1: topk_idx has 13 tokens", "topk_idx has 13 tokens"),
        ("quant is 'e4m3/32/mx'; allowed", "rejected by rank 0: quant is"),
        ("topk_ids is given with previous_handle", "rejected by rank 0: topk_ids is given"),
        ("statistics is False in the configuration",) * 2,
        ("handle is a Route; allowed: a DispatchHandle", "rejected by rank 0: handle is a Route"),
        ("previous_handle is a Route; allowed: a DispatchHandle", "rejected by rank 0: previous_handle is a Route"),
        ("format of quant is None; allowed: a str", "dispatch: rejected by rank 0: format of quant is None"),
        ("format of quant is None; allowed: a str", "dispatch_planned: rejected by rank 0: format of quant is None"),
        ("rejected by rank 1: handle is None", "handle is None; allowed: a DispatchHandle"),
        ("rejected by rank 1: max_tokens is '12'", "max_tokens is '12'; allowed: an int"),
        ("rejected by rank 1: max_tokens is 2.5", "max_tokens is 2.5; allowed: an int"),
        ("quant is 3; allowed", "rejected by rank 0: quant is 3"),
        ("placement is given, but the configuration has none",) * 2,
        ("previous_handle is given; mode 'latency'",) * 2,
        ("format is 'wire:e4m3/row/fp32'; mode 'latency'",) * 2,
    ]
    assert len(first) == len(second) == len(wanted)
    for mine, theirs, (here, there) in zip(first, second, wanted, strict=True):
        assert here in mine and there in theirs, (mine, theirs)


def test_all_layouts_of_scales_are_known() -> None:
    """Views of padded rows and of scales fit together, whatever the layout."""
    given = drawn(0, 0, MOST)
    for scales_as in LAYOUTS:
        form = "e4m3/128/pow2" if scales_as == "columns" else "e4m3/32/mx"
        with communicator(layout="padded", quant=Quant(form, scales_as)) as moe, torch.no_grad():
            output, handle = moe.dispatch(given.x, given.ids, given.weights)
            assert output.x.shape == (E, 16, H) and output.x.dtype == torch.float8_e4m3fn
            assert output.weights is not None and output.weights.shape == (E, 16) and output.scales is not None
            codes, scales = formats.quantize(given.x, formats.format_of(form))
            passed, _ = moe.dispatch(codes, given.ids, None, Quant(form, scales_as, scales))
            live = torch.arange(16) < output.counts[:, None]
            assert torch.equal(passed.x.view(torch.uint8)[live], output.x.view(torch.uint8)[live])
            assert passed.weights is None and torch.equal(output.dropped, torch.zeros(E, dtype=torch.int32))
