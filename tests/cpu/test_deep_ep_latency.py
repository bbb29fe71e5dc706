"""Low-latency operations of DeepEP's interface: what a layer launches, when weights are sent, which kernels run."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import EXPERTS, HIDDEN, OWN, RANKS, Given, draw
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from ep_ops import Config
from ep_ops.integrations import deep_ep
from ep_ops.integrations.deep_ep import Buffer
from ep_ops.integrations.deep_ep.communicators import Communicators, latency_bound
from ep_ops.integrations.deep_ep.low_latency import sending_weights

VIEWS = ("view", "_unsafe_view", "reshape", "slice", "empty", "empty_like", "detach", "transpose")


class Operators(TorchDispatchMode):
    """Counts the operators that run, those of ep_ops by name and others together, without views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "ep":
            self.seen[func._opname] += 1
        elif func._opname not in VIEWS:
            self.seen["others"] += 1
        return func(*args, **(kwargs or {}))


HOW = ("argument", "block", "later", "other weights", "changed weights", "masked", "masked argument", "strided")


def _layers(given: list[Given], most: int) -> dict[str, Any]:
    """By how weights and ids are passed: the results, and what the layer launched."""
    mine = given[dist.get_rank()]
    buffer, out = Buffer(dist.group.WORLD, explicitly_destroy=True), {}
    expert = torch.arange(1, OWN + 1)[:, None, None] + dist.get_rank() * OWN
    for fp8 in (False, True):
        for how in HOW[:3] if fp8 else ("later", *HOW):  # the first creates communicators
            idx, weights = mine.idx.clone(), mine.weights.clone()
            if how == "strided":
                weights = torch.cat([weights, weights], 1)[:, : weights.shape[1]]
            sent: dict[str, Any] = {} if how in ("block", "later", "masked") else {"topk_weights": weights}
            seen = Operators()
            with seen:
                with sending_weights(weights) if how == "block" else contextlib.nullcontext():
                    rows, counts, handle, *_ = buffer.low_latency_dispatch(
                        mine.x, idx, most, EXPERTS, use_fp8=fp8, **sent
                    )
            if how == "other weights":
                weights = weights.clone()
            elif how == "changed weights":
                weights.mul_(2)
            elif how.startswith("masked"):
                idx = torch.where(torch.arange(idx.shape[1]) == 0, -1, idx)
            decoded = rows
            if fp8:
                decoded = (rows[0].float().unflatten(-1, (-1, 128)) * rows[1][..., None]).flatten(-2)
            place = torch.arange(decoded.shape[1]) < counts[:, None]
            y = torch.where(place[..., None], decoded * expert, torch.nan).bfloat16()
            home = torch.full_like(mine.x, torch.nan)
            with seen:
                buffer.low_latency_combine(y, idx, weights, handle, out=home)
            src_info, ranges, *sizes = handle
            assert sizes == list(handle[2:]) == [most, HIDDEN, EXPERTS] and handle[-1] == EXPERTS and len(handle) == 5
            assert torch.equal(handle[0], src_info) and torch.equal(handle[-4], ranges)
            with pytest.raises(IndexError, match="the handle has 5 entries; entry 5 was read"):
                handle[5]
            factor = torch.where(idx >= 0, (idx + 1) * weights, 0).sum(1, keepdim=True)
            tolerance = 7e-2 if fp8 else 2e-2
            torch.testing.assert_close(home.float(), mine.x.float() * factor, rtol=tolerance, atol=tolerance)
            out[f"{how} {fp8}"] = seen.seen
    buffer.destroy()
    return out


def test_a_layer_has_two_exchanges_if_weights_are_sent() -> None:
    given = draw(cases.fresh_seed())
    for seen in run_ranks(RANKS, _layers, given, 10):
        for name, count in seen.items():
            two = name.startswith(("argument", "block", "strided"))
            third = {} if two else {"dispatch_planned": 1}
            assert dict(count) == {"dispatch": 1, "combine": 1, "others": count["others"]} | third, name
            assert count["others"] <= (3 if two else 4) or name.startswith(("masked", "strided")), (name, count)


def _no_tokens(given: list[Given]) -> None:
    mine, buffer = given[dist.get_rank()], Buffer(dist.group.WORLD, explicitly_destroy=True)
    for wrong in (mine.weights.tolist(), mine.weights[:, :1]):
        with pytest.raises((TypeError, ValueError), match="topk_weights"):
            buffer.low_latency_dispatch(mine.x, mine.idx, 8, EXPERTS, topk_weights=wrong)
        rows, _, handle, *_ = buffer.low_latency_dispatch(
            mine.x, mine.idx, 8, EXPERTS, use_fp8=False, topk_weights=mine.weights
        )
        home = buffer.low_latency_combine(rows.nan_to_num(), mine.idx, mine.weights, handle)[0]
        assert home.shape == mine.x.shape and not home.isnan().any()
    buffer.destroy()


def test_a_rank_without_tokens() -> None:
    run_ranks(RANKS, _no_tokens, draw(cases.fresh_seed(), (0, 3)))


# ---------------------------------------------------------------------- which kernels run


def config(**others: Any) -> Config:
    sizes: dict[str, Any] = dict(num_experts=16, hidden_size=2048, top_k=4, max_tokens_per_rank=1024, backend="cute")
    return dataclasses.replace(Config(**sizes | others), world_size=2, device_type="cuda", experts_per_rank=(8, 8))


def test_the_bound_of_the_latency_kernels() -> None:
    def bound(**others: Any) -> float:
        return latency_bound(SimpleNamespace(config=config(**others)))  # type: ignore[arg-type]

    with mock.patch("ep_ops.backends.problem", return_value=None):  # there is no GPU
        assert [bound(), bound(latency_max_tokens=1024), bound(latency_max_tokens=0)] == [256, 1024, 0]
    assert bound(backend="reference") == float("inf")


def _warned(most: int, asked: int | None) -> tuple[list[str], int | None]:
    Communicators.latency_max_tokens = asked
    x, idx = torch.ones(3, HIDDEN).bfloat16(), torch.zeros(3, 1).long()
    buffer, texts = Buffer(dist.group.WORLD, explicitly_destroy=True), []
    with mock.patch("ep_ops.integrations.deep_ep.low_latency.latency_bound", return_value=256):
        for tokens in (256, most, most):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                buffer.low_latency_dispatch(x, idx, tokens, EXPERTS, use_fp8=False)
            texts += [f"{one.filename[-23:]} {one.message}" for one in caught if one.category is RuntimeWarning]
    (made,) = buffer.communicators._made.values()
    buffer.destroy()
    Communicators.latency_max_tokens = None
    return texts, made.config.latency_max_tokens


@pytest.mark.parametrize("asked", [None, 512])
def test_one_warning_if_the_throughput_kernels_run(asked: int | None) -> None:
    for texts, given in run_ranks(1, _warned, 300, asked):
        assert given == asked
        (text,) = texts
        assert text.startswith("test_deep_ep_latency.py low_latency_dispatch: num_max_dispatch_tokens_per_rank is 300,")
        assert "at most 256 tokens of each rank" in text


def test_install_sets_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Communicators, "latency_max_tokens", None)
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep)
    deep_ep.install()
    assert Communicators.latency_max_tokens is None
    monkeypatch.setenv("EP_OPS_DEEP_EP_LATENCY_TOKENS", "1024")
    deep_ep.install()
    assert Communicators.latency_max_tokens == 1024
    deep_ep.install(latency_max_tokens=512)
    assert Communicators.latency_max_tokens == 512
    for wrong, name in ((0, "latency_max_tokens is 0"), (None, "EP_OPS_DEEP_EP_LATENCY_TOKENS is 'few'")):
        monkeypatch.setenv("EP_OPS_DEEP_EP_LATENCY_TOKENS", "few")
        with pytest.raises(ValueError, match=f"{name}; expected a positive integer"):
            deep_ep.install(latency_max_tokens=wrong)
    assert Communicators.latency_max_tokens == 512
