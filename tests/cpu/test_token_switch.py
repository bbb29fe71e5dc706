"""PyTorch's TokenSwitch interface on two ranks: its contract, and values and gradients against a dense model."""

from __future__ import annotations

import abc
import contextlib
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

NAME, OURS = "torch.distributed._token_switch", "ep_ops.integrations.token_switch"
T, E, K, H = (5, 7), 4, 3, 16  # two local experts and three ids: tokens name a rank up to two times


@dataclass(frozen=True)
class Routing:
    handle: object
    topk_idx: Tensor
    layout: str = "flat"


class TokenSwitch(abc.ABC):
    """The signatures of PyTorch's class, for versions that lack it."""

    @property
    @abc.abstractmethod
    def max_recv_tokens_per_rank(self): ...

    @abc.abstractmethod
    def create_routing(self, topk_idx, per_expert_token_counts=None, *, layout): ...

    @abc.abstractmethod
    def _alloc_dispatch_outputs(self, routing, tokens, topk_weights, max_recv_tokens, H, K): ...

    @abc.abstractmethod
    def _dispatch(self, routing, tokens, topk_weights, out_tokens, out_topk_weights, out_topk_idx): ...

    @abc.abstractmethod
    def _combine(self, routing, expert_tokens, out_tokens): ...

    def dispatch(self, routing, tokens, topk_weights, max_recv_tokens=None, *, out=None):
        raise NotImplementedError

    def combine(self, routing, expert_tokens, *, out=None):
        raise NotImplementedError


@contextlib.contextmanager
def installed() -> Iterator[Any]:
    """The integration, on PyTorch's module or, where there is none, on the signatures above."""
    lacking = importlib.util.find_spec(NAME) is None
    if lacking:
        stub: Any = types.ModuleType(NAME)
        stub.Routing, stub.TokenSwitch = Routing, TokenSwitch
        sys.modules[NAME] = stub
    try:
        yield importlib.import_module(OURS)
    finally:
        if lacking:
            del sys.modules[NAME], sys.modules[OURS]


def given(rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, ids and weights of a rank. The first token of rank 0 names one expert only, the second one none."""
    draw = torch.Generator().manual_seed(10 * seed + rank)
    ids = torch.rand(T[rank], E, generator=draw).argsort(1)[:, :K]
    if rank == 0:
        ids[0, 1:], ids[1] = -1, -1
    return torch.randn(T[rank], H, generator=draw), ids, torch.rand(T[rank], K, generator=draw)


def arriving(rank: int, seed: int) -> list[tuple[int, int]]:
    """(source rank, token) of the rows that arrive at ``rank`` in the flat layout."""
    held = {2 * rank, 2 * rank + 1}
    return [(r, t) for r in range(2) for t, row in enumerate(given(r, seed)[1].tolist()) if {*row} & held]


def weight_of_experts() -> Tensor:
    return torch.randn(E, H, H, generator=torch.Generator().manual_seed(5)) / 4


def dense(x: Tensor, ids: Tensor, weights: Tensor, w: Tensor) -> Tensor:
    each = torch.einsum("th,ehg->teg", x, w)
    return sum(
        torch.where(ids[:, k : k + 1] >= 0, weights[:, k : k + 1] * each[torch.arange(len(x)), ids[:, k].clamp(0)], 0)
        for k in range(K)
    )  # type: ignore[return-value]


def through_flat(rows: Tensor, weights: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """Experts on rows of tokens: those that are named, times their weights."""
    named = (ids.unsqueeze(2) == torch.arange(2)) * weights.unsqueeze(2)
    return torch.einsum("rke,rh,ehg->rg", named, rows, w)


def contract() -> None:
    rank = dist.get_rank()
    with installed() as module:
        switch = module.EpOpsTokenSwitch(None, E, max(T), 2 * max(T), H * 4, dtype=torch.float32)
        with pytest.raises(RuntimeError, match="no communicator before the first create_routing"):
            _ = switch.comm
        x, ids, weights = given(rank, 1)
        counts = torch.full((3,), -7, dtype=torch.int32)
        flat = switch.create_routing(ids, counts, layout="flat")
        everyone = torch.cat([given(r, 1)[1] for r in range(2)])
        assert counts.tolist() == [*((everyone == e).sum().item() for e in (2 * rank, 2 * rank + 1)), -7]
        with switch.comm:
            rows, row_weights, row_ids = switch.dispatch(flat, x, weights, 2 * max(T))
            sources, n = arriving(rank, 1), len(arriving(rank, 1))
            assert rows.shape == (2 * max(T), H) and row_ids.dtype == torch.int64
            for row, (source, token) in enumerate(sources):  # in this order
                its_x, its_ids, its_weights = given(source, 1)
                assert torch.equal(rows[row], its_x[token])
                named = {
                    e - 2 * rank: w for e, w in zip(its_ids[token].tolist(), its_weights[token].tolist(), strict=True)
                }
                found = dict(zip(row_ids[row].tolist(), row_weights[row].tolist(), strict=True))
                assert {e: w for e, w in found.items() if e >= 0} == {e: w for e, w in named.items() if e in (0, 1)}
                assert found.get(-1, 0) == 0
            ranks_of = torch.tensor([len({e // 2 for e in row if e >= 0}) for row in ids.tolist()]).unsqueeze(1)
            torch.testing.assert_close(switch.combine(flat, rows[:n]), ranks_of * x)
            # Another routing in between, then the first one again, into tensors of the caller: the same rows.
            other = switch.create_routing(given(rank, 2)[1], layout="expert_major")
            more, more_weights, none = switch.dispatch(other, x, weights, 9)
            assert none is None and more.shape == (9, H) and more_weights.shape == (9,)
            out = switch._alloc_dispatch_outputs(flat, x, weights, n, H, K)
            assert switch.dispatch(flat, -x, weights, out=out) is out
            assert torch.equal(out[0], -rows[:n]) and torch.equal(out[1], row_weights[:n])
            assert torch.equal(out[2], row_ids[:n])
            back = torch.full_like(x, torch.nan)
            assert switch.combine(flat, out[0], out=back) is back
            torch.testing.assert_close(back, -ranks_of * x)
            misuse(module, switch, flat, x, weights)


def misuse(module: Any, switch: Any, routing: Any, x: Tensor, weights: Tensor) -> None:
    with pytest.raises(ValueError, match="layout is 'rank_major'; allowed: 'flat', 'expert_major'"):
        switch.create_routing(routing.topk_idx, layout="rank_major")
    with pytest.raises(ValueError, match="max_recv_tokens is None; allowed: an int unless out= is given"):
        switch.dispatch(routing, x, weights)
    with pytest.raises(ValueError, match="max_recv_tokens is 15; allowed: 0 to max_recv_tokens_per_rank, 14"):
        switch.dispatch(routing, x, weights, 15)
    with pytest.raises(ValueError, match="the number of expert_tokens is 15; allowed: 0 to"):
        switch.combine(routing, torch.zeros(15, H))
    with pytest.raises(ValueError, match="max_token_bytes is 7; allowed: a multiple of 2, for torch.bfloat16"):
        module.EpOpsTokenSwitch(None, E, 4, 8, 7)


def gradients(layout: str) -> None:
    """Return the gradients of the sum over ranks: tokens, routing weights, experts."""
    rank = dist.get_rank()
    with installed() as module:
        rows = 2 * max(T) * (1 if layout == "flat" else 2)
        switch = module.EpOpsTokenSwitch(None, E, max(T), rows, H * 4, dtype=torch.float32)
        x, ids, weights = given(rank, 3)
        x.requires_grad_(), weights.requires_grad_()
        mine = weight_of_experts()[2 * rank : 2 * rank + 2].requires_grad_()
        counts = torch.zeros(2, dtype=torch.int32)
        routing = switch.create_routing(ids, counts, layout=layout)
        with switch.comm:
            received, row_weights, row_ids = switch.dispatch(routing, x, weights, switch.max_recv_tokens_per_rank)
            if layout == "flat":
                n = len(arriving(rank, 3))
                y = through_flat(received[:n], row_weights[:n], row_ids[:n], mine)
            else:
                first, second = received[: counts.sum()].split(counts.tolist())
                y = torch.cat([first @ mine[0], second @ mine[1]]) * row_weights[: counts.sum()].unsqueeze(1)
            out = switch.combine(routing, y)
            (out.square().sum() * (rank + 1)).backward()
        w = weight_of_experts().requires_grad_()
        batches = [given(r, 3) for r in range(2)]
        for its_x, _, its_weights in batches:
            its_x.requires_grad_(), its_weights.requires_grad_()
        outs = [dense(its_x, its_ids, its_weights, w) for its_x, its_ids, its_weights in batches]
        sum(one.square().sum() * (r + 1) for r, one in enumerate(outs)).backward()
        torch.testing.assert_close(out, outs[rank])
        named = ids >= 0  # a weight without an expert has no gradient
        torch.testing.assert_close(weights.grad * named, batches[rank][2].grad * named)
        assert weights.grad.abs().max() > 0.01
        torch.testing.assert_close(x.grad, batches[rank][0].grad)
        torch.testing.assert_close(mine.grad, w.grad[2 * rank : 2 * rank + 2])


def too_many_rows() -> None:
    """Tokens beyond max_recv_tokens_per_rank are dropped and counted."""
    rank = dist.get_rank()
    with installed() as module:
        switch = module.EpOpsTokenSwitch(None, E, max(T), 3, H * 4, dtype=torch.float32)
        x, ids, weights = given(rank, 4)
        routing = switch.create_routing(ids, layout="flat")
        with switch.comm:
            rows, _, _ = switch.dispatch(routing, x, weights, 3)
            out = switch.combine(routing, rows)
        assert int(routing.handle.dropped.sum()) > 0
        for token in range(T[rank]):
            times = sum((rank, token) in arriving(r, 4)[:3] for r in range(2))
            torch.testing.assert_close(out[token], times * x[token])


def everything() -> None:
    contract(), gradients("flat"), gradients("expert_major"), too_many_rows()


def test_contract_and_gradients() -> None:
    run_ranks(2, everything)


def test_signatures() -> None:
    """Methods have the signatures of PyTorch's class, where PyTorch has it."""
    with installed() as module:
        kind, base = module.EpOpsTokenSwitch, module.EpOpsTokenSwitch.__mro__[1]
        for name in ("create_routing", "dispatch", "combine", "_dispatch", "_combine", "_alloc_dispatch_outputs"):
            found, wanted = (inspect.signature(getattr(one, name)).parameters for one in (kind, base))
            assert [*found] == [*wanted] and [p.kind for p in found.values()] == [p.kind for p in wanted.values()]
        assert not kind.__abstractmethods__


def test_without_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    with pytest.raises(ImportError, match="needs a PyTorch that has torch.distributed._token_switch"):
        importlib.import_module(OURS)
