"""The throughput path passes the right arguments to its kernels where rows travel in a format."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from launches import PROBLEM, joins, throughput
from operate import Delivery, Sizes, row_format

from cute_kernels import marks
from cute_kernels.heap import Problem
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.publish_tokens import PublishTokens
from cute_kernels.throughput.pull import Pull
from ep_ops.backends.budget import Budget
from ep_ops.backends.cute.ahead import throughput_kernels
from ep_ops.formats import format_of, quantize
from ep_ops.records import Route


@pytest.mark.parametrize("beyond", [0, 66], ids=["fixed", "joining"])
def test_launches_in_a_format(beyond: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel knows what rows travel as; those that are told to be compiled ahead are those that run."""
    path, recorder = throughput(Budget(20, 30, beyond=beyond), monkeypatch)
    name = "e4m3/32/mx"
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    codes, scales = quantize(x, format_of(name))
    sizes = Sizes(48, 16, 0, 100)
    for weights in (None, torch.zeros(7, 4)):
        for rows, given in ((x, None), (codes, scales)):
            delivery = Delivery(given, name, "packed")
            recv_x, recv_scales, recv_weights, *placed = path.dispatch(rows, weights, idx, sizes, delivery)
            assert recv_x.dtype == torch.float8_e4m3fn and recv_scales.shape == (1, 48)
            assert recv_weights.shape == (0 if weights is None else 48,)
            route = Route(idx, *placed[:4], 16, 48, 100)
            assert len(path.along("dispatch_planned", rows, weights, route, delivery)) == 3
    wanted = throughput_kernels(PROBLEM, row_format(Delivery(None, name, "packed")))
    # A format takes all blocks that may join from the beginning.
    assert {kernel for kernel, _, _ in recorder.launched} == {kernel for kernel in wanted if not joins(kernel)}
    for kernel, terms, values in recorder.launched:
        assert marks.unpack(terms)[1].format == name
        if isinstance(kernel, Publish):
            assert (values["scales"] is not None) == kernel.given
        else:
            assert values["dealt"] == max(20, beyond) and values["zeros"] == 1 and values["recv_scales"] is not None


def test_padding_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    path, recorder = throughput(Budget(20, 30), monkeypatch)
    x, idx = torch.zeros(7, 64, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32)
    out = path.dispatch(x, None, idx, Sizes(48, 16, 0, 100), Delivery(zeros=False))
    assert out[0].dtype == torch.bfloat16 and out[1].shape == (0,)
    assert [values["zeros"] for kernel, _, values in recorder.launched if isinstance(kernel, Pull)] == [0]


@pytest.mark.parametrize("name", ["e4m3/128/pow2", "wire:e4m3/32/mx"])
def test_token_major_launches_in_a_format(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(3, (3, 0, 5), 4, 128, "bf16", 512)
    path, recorder = throughput(Budget(20, 30), monkeypatch, problem)
    x, idx, wire = torch.zeros(7, 128, dtype=torch.bfloat16), torch.zeros(7, 4, dtype=torch.int32), ":" in name
    layout = "" if wire else "columns"
    inputs = [(x, None)] if wire else [(x, None), quantize(x, format_of(name))]
    for weights in (None, torch.zeros(7, 4)):
        for rows, given in inputs:
            delivery = Delivery(given, name, layout)
            out = path.dispatch(rows, weights, idx, Sizes(48, 1, 0, 100, "token_major"), delivery)
            recv_x, recv_scales, recv_weights, *placed, recv_idx = out
            assert recv_x.dtype == (torch.bfloat16 if wire else torch.float8_e4m3fn) and recv_idx.shape == (48, 4)
            assert recv_scales.shape == ((0,) if wire else (1, 48))
            route = Route(idx, *placed[:4], 1, 48, 100, layout="token_major")
            assert len(path.along("dispatch_planned", rows, weights, route, delivery)) == 3
    compiled = set(throughput_kernels(problem, row_format(Delivery(None, name, layout))))
    launched = {kernel for kernel, _, _ in recorder.launched}
    assert launched <= compiled
    tokens = {kernel for kernel in compiled if isinstance(kernel, PublishTokens)}
    assert tokens and tokens <= launched and all(kernel.format == name.removeprefix("wire:") for kernel in tokens)
