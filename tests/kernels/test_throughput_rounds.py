"""The throughput path passes the right arguments to its kernels where a call takes several rounds."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from launches import PROBLEM, Recorder, throughput
from operate import Delivery, Sizes, row_format

from cute_kernels import marks
from cute_kernels.heap import Problem
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.publish_tokens import PublishTokens
from cute_kernels.throughput.pull import Pull
from ep_ops.backends.budget import Budget
from ep_ops.backends.cute.ahead import throughput_kernels
from ep_ops.backends.cute.throughput import ThroughputPath
from ep_ops.formats import format_of, quantize
from ep_ops.records import Route

ROUND = 32
"""Tokens of a round."""


def in_rounds(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> tuple[ThroughputPath, Recorder]:
    problem = dataclasses.replace(problem, max_tokens=ROUND, route_tokens=problem.max_tokens)
    return throughput(Budget(20, 30), monkeypatch, problem)


def test_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A route is announced once for all tokens; rows move in rounds of as many as the memory holds."""
    path, recorder = in_rounds(PROBLEM, monkeypatch)
    x, weights = torch.zeros(70, 64, dtype=torch.bfloat16), torch.zeros(70, 4)
    idx = torch.zeros(70, 4, dtype=torch.int32)
    recv_x, _, recv_weights, *placed = path.dispatch(x, weights, idx, Sizes(480, 16, 0, 100), Delivery())
    plan, *moving = recorder.launched
    assert plan[0] == Publish(recorder.problem, True, False, False, True) and plan[2]["tokens"] == 70
    assert [type(kernel) for kernel, *_ in moving] == [Publish, Pull] * 4
    assert [given["tokens"] for kernel, _, given in moving if isinstance(kernel, Publish)] == [32, 32, 6, 0]
    pulls = [given for kernel, _, given in moving if isinstance(kernel, Pull)]
    assert [given["max_tokens"] for given in pulls] == [32, 32, 32, 4]
    assert [given["zeros"] for given in pulls] == [1, 0, 0, 0], "padding is cleared once"
    assert len({id(given["recv_x"]) for given in pulls}) == 1 and pulls[0]["recv_x"] is recv_x
    assert pulls[1]["x"].data_ptr() == x[32:].data_ptr() and pulls[1]["arrivals"] is not placed[1]

    route = Route(idx, *placed[:4], 16, 480, 100)
    first = len(recorder.launched)
    out = path.combine(recv_x, recv_weights, route, x)
    path.dispatch_backward(recv_x, recv_weights, route)
    path.combine_backward(x, recv_x, recv_weights, route)
    adding = [given for kernel, _, given in recorder.launched[first:] if isinstance(kernel, Combine)]
    assert [given["tokens"] for given in adding] == 2 * [32, 32, 6, 0]
    assert adding[1]["out"].data_ptr() == out[32:].data_ptr()
    assert adding[2]["residual"].data_ptr() == x[64:].data_ptr() and adding[1]["y"] is recv_x
    assert len(recorder.launched) == first + 4 + 4 + 8
    path.combine_gathered(route, torch.zeros(3, dtype=torch.int64), 480)
    assert len(recorder.launched) == first + 17 and recorder.launched[-1][2]["tokens"] == 70, "nothing is staged"
    # Ranks that passed other bounds find out, whichever round they are in.
    assert {marks.unpack(terms)[1].max_tokens for _, terms, _ in recorder.launched} == {100}
    recorder.launched.clear()
    path.dispatch(x[:9], None, idx[:9], Sizes(480, 16, 0, 32), Delivery())
    assert [type(kernel) for kernel, *_ in recorder.launched] == [Publish, Pull], "of few enough there is one round"


@pytest.mark.parametrize("ranks", [3, 1])
@pytest.mark.parametrize("name", ["", "e4m3/128/pow2", "wire:e4m3/32/mx"])
def test_rounds_of_all_kinds(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of every format, grouped by expert or token-major, with weights or without, launch kernels that are
    compiled before, each with its round's tokens, and with outputs that are those of all rounds."""
    experts = (3, 0, 5) if ranks == 3 else (8,)
    path, recorder = in_rounds(Problem(ranks, experts, 4, 128, "bf16", 512), monkeypatch)
    x, idx = torch.zeros(70, 128, dtype=torch.bfloat16), torch.zeros(70, 4, dtype=torch.int32)
    layout = "" if not name or ":" in name else "columns"
    inputs = [(x, None), quantize(x, format_of(name))] if layout else [(x, None)]
    for token_major, weighted, (rows, scales) in itertools.product((False, True), (False, True), inputs):
        recorder.launched.clear()
        weights = torch.zeros(70, 4) if weighted else None
        how = "token_major" if token_major else "grouped"
        sizes, delivery = Sizes(480, 1 if token_major else 16, 0, 100, how), Delivery(scales, name, layout)
        recv_x, recv_scales, recv_weights, *placed = path.dispatch(rows, weights, idx, sizes, delivery)
        route = Route(idx, *placed[:4], sizes.alignment, 480, 100, None, 0, how)
        plan, *moving = recorder.launched
        assert plan[0] == (PublishTokens if token_major else Publish)(recorder.problem, True, False, False, True)
        path.along("dispatch_planned", rows, weights, route, delivery)
        compiled = set(throughput_kernels(recorder.problem))
        if name:
            compiled |= set(throughput_kernels(recorder.problem, row_format(delivery)))
        assert {kernel for kernel, *_ in recorder.launched} <= compiled
        published = [told for kernel, _, told in moving if not isinstance(kernel, Pull)]
        pulled = [told for kernel, _, told in moving if isinstance(kernel, Pull)]
        assert len(pulled) == 4 and len(published) == (4 if ranks > 1 or name or weighted else 0)
        for number, told in enumerate(published):
            here = slice(ROUND * number, ROUND * (number + 1))
            for argument, whole in (("x", rows), ("topk_idx", idx), ("topk_weights", weights), ("scales", scales)):
                want = None if whole is None else whole[here]
                got = told.get(argument)
                assert (got is None) == (want is None), argument
                assert want is None or (got.shape == want.shape and got.data_ptr() == want.data_ptr()), argument
            assert told["capacity"] == 0, "a round clears nothing behind the last copy"
        for told in pulled:
            assert told["recv_x"] is recv_x and told["num_rows"] == 480 and told["slots"] == 0
            assert told["recv_weights"] is recv_weights and (not layout or told["recv_scales"] is recv_scales)
            assert told["offs"] is placed[2] and told["counts"] is placed[3]
        assert [told["max_tokens"] for told in pulled] == [ROUND] * 3 + [4]
        assert [told["zeros"] for told in pulled] == [int(not token_major), 0, 0, 0]
        if weighted and token_major:
            assert not recv_weights.any(), "what no round clears"
