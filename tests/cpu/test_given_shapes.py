"""Leading dimensions of tokens, ids and weights, ids that repeat, and addresses of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from wrong_calls import misaligned

import ep_ops
from ep_ops import nn

H, K, EXPERTS = 16, 2, 4


def made(**more: Any) -> ep_ops.Communicator:
    sizes = dict(num_experts=EXPERTS, hidden_size=H, top_k=K, max_tokens_per_rank=8, dtype=torch.float32, device="cpu")
    return ep_ops.Communicator(**sizes | dict(timeout=20) | more)


def text_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """The error of a call, or "" if it returns."""
    try:
        call(*args, **kwargs)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


# ---------------------------------------------------------------------- leading dimensions


class Flat(torch.nn.Module):
    """A router that flattens its tokens."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        tokens = x.numel() // x.shape[-1]
        return torch.tensor([[0, 1]] * tokens), torch.full((tokens, 2), 0.5), None


def check_leading() -> None:
    torch.manual_seed(dist.get_rank())
    with made() as comm:
        x, w = torch.randn(2, 3, H), torch.rand(2, 3, K)
        ids = torch.stack([torch.randperm(EXPERTS)[:K] for _ in range(6)]).view(2, 3, K)
        experts, gate = nn.Experts(comm, 8), torch.nn.Linear(H, H)
        right = experts(x, ids, w)
        assert right.shape == x.shape
        for given in (ids, ids.flatten(0, 1)), (w, w.flatten(0, 1)):
            assert given[0].shape[:-1] == x.shape[:-1]
        for some_ids in (ids, ids.flatten(0, 1)):
            for weights in (w, w.flatten(0, 1)):
                assert torch.equal(experts(x, some_ids, weights), right)
                assert torch.equal(experts(x, some_ids, weights, shared=gate), right + gate(x))
        step = torch.randn(3, 1, H)
        alone = experts(step[:, 0], ids[0], w[0])
        assert torch.equal(experts(step, ids[0], w[0], shared=gate), alone[:, None] + gate(step))
        layer = nn.MoELayer(comm, 8, router=Flat(), shared_intermediate_size=8)
        assert torch.equal(layer(step), layer(step[:, 0])[:, None]) and layer(step).shape == step.shape
        # Along a route: the shape of x, whatever that of the ids was.
        for some_ids in (ids, ids.flatten(0, 1)):
            route, _ = comm.plan(some_ids)
            for tokens, weights in ((x, w), (x, w.flatten(0, 1)), (x.flatten(0, 1), w.flatten(0, 1))):
                sent = comm.dispatch_planned(tokens, route, weights)
                assert comm.combine(sent.x, sent.route, sent.weights).shape == tokens.shape


def test_results_have_the_shape_of_x() -> None:
    run_ranks(2, check_leading)


def check_other_leading() -> list[str]:
    with made() as comm:
        x, w, ids = torch.randn(2, 3, H), torch.rand(2, 3, K), torch.tensor([0, 1]).expand(2, 3, K).contiguous()
        wrong_ids, wrong_w, wrong_x = ids.transpose(0, 1), w.transpose(0, 1), x.transpose(0, 1)
        route, _ = comm.plan(ids)
        sent = comm.dispatch(x, ids, w)
        calls: list[tuple[Any, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]] = [
            (comm.dispatch, (x, ids, w), (x, wrong_ids, w), {}),
            (comm.dispatch, (x, ids, w), (x, ids, wrong_w), {"exact": True}),
            (comm.dispatch, (x, ids, w), (x.flatten(0, 1), ids, w), {"capacity": 64}),
            (comm.dispatch_planned, (x, route, w), (wrong_x, route), {}),
            (comm.dispatch_planned, (x, route, w), (x, route, wrong_w), {}),
            (nn.Experts(comm, 8), (x, ids, w), (x, wrong_ids, wrong_w), {}),
            (nn.Experts(comm, 8), (x, ids, w), (x, wrong_ids, w), {"shared": torch.nn.Identity()}),
        ]
        found = [text_of(call, *(wrong if comm.rank else right), **more) for call, right, wrong, more in calls]
        given = wrong_x if comm.rank else x
        found.append(text_of(comm.combine, sent.x, sent.route, sent.weights, residual=given))
        comm.dispatch(x, ids, w)
        return found


def test_other_leading_dimensions_raise_on_all_ranks() -> None:
    names = ("topk_idx", "topk_weights", "topk_idx", "x", "topk_weights", "topk_idx", "topk_idx", "residual")
    for rank, found in enumerate(run_ranks(2, check_other_leading)):
        for name, text in zip(names, found, strict=True):
            begin = f"ValueError: {name} has shape (" if rank else "rejected by rank 1: "
            assert begin in text and f"{name} has shape (" in text and "; allowed: [" in text, text


# ---------------------------------------------------------------------- ids that repeat

REPEATED = torch.tensor([[0, 1], [2, 2], [-1, -1], [3, 0]], dtype=torch.int32)


def check_repeats() -> list[str]:
    with made() as comm:
        x, w = torch.randn(4, H), torch.rand(4, K)
        right = torch.tensor([[0, 1], [2, 3], [-1, -1], [3, 0]], dtype=torch.int32)
        ids = REPEATED if comm.rank else right
        started = dict(shared=torch.nn.Identity())
        experts = nn.Experts(comm, 8)
        found = [
            text_of(comm.plan, ids), text_of(comm.dispatch, x, ids, w), text_of(comm.dispatch, x, ids.long(), w),
            text_of(comm.dispatch_start, x, ids, w), text_of(experts, x, ids, w),
            text_of(experts, x, ids, w, **started),
        ]  # fmt: skip
        for room in dict(capacity=64), dict(exact=True), dict(layout="padded", slots=16), dict(layout="token_major"):
            sent = comm.dispatch(x, REPEATED, w, **room)  # each repeat has a row of its own, or an entry in its row
            assert int(sent.route.counts.sum()) == 2 * 3 and not sent.dropped.any()
        for _ in range(4):
            comm.dispatch(x, right, w)  # remembered
        found.append(text_of(comm.dispatch, x, ids, w))
        return found


def test_repeated_ids_are_invalid_without_sizes() -> None:
    for rank, found in enumerate(run_ranks(2, check_repeats)):
        for text in found:
            assert "topk_idx[1, 1] names an expert again on rank 1" in text and "pad with -1" in text
            assert ("rejected by rank 1" in text) is (rank == 0)


@pytest.mark.parametrize("capacity", [None, 16])
def test_dropped_rows_are_counted(capacity: int | None) -> None:
    """Dropped rows are counted, also without a capacity of the layer, and in compiled code that runs a checkpoint."""
    from torch.utils.checkpoint import checkpoint

    with made(max_tokens_per_rank=32, alignment=1) as comm:
        layer, x = nn.MoELayer(comm, 8, capacity=capacity), torch.randn(32, H, requires_grad=True)
        run = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager", fullgraph=True)
        run(x).sum().backward()
        assert int(layer.experts.dropped.sum()) == (0 if capacity is None else 64 - capacity)
        layer(x)
        layer.experts._count(torch.tensor([1, 0, 0, 0], dtype=torch.int32))
        assert int(layer.experts.dropped.sum()) == 1 + (0 if capacity is None else 2 * (64 - capacity))


# ---------------------------------------------------------------------- addresses


def test_addresses_in_remembered_calls() -> None:
    """Remembered calls check addresses on every backend, because kernels read pairs of ints and vectors of 16 bytes."""
    with made() as comm, torch.no_grad():
        x, w, ids = torch.randn(4, H), torch.rand(4, K), torch.tensor([[0, 1]] * 4, dtype=torch.int32)
        for _ in range(4):
            sent = comm.dispatch(x, ids, w)
            right = comm.combine(sent.x, sent.route, sent.weights)
        odd = sent.route._replace(arrivals=misaligned(sent.route.arrivals))
        assert odd.arrivals.data_ptr() % 8 == 4
        for call in (comm.combine, comm.combine_start):
            text = text_of(call, sent.x, odd, sent.weights)
            assert text.startswith("ValueError: arrivals begins at address 0x") and "storage_offset 1" in text, text
            assert "multiples of 8 bytes" in text
        assert "arrivals begins at" in text_of(comm.dispatch_planned, x, odd, w)
        assert "x begins at" in text_of(comm.dispatch, misaligned(x), ids, w)
        assert torch.equal(comm.combine(sent.x, sent.route, misaligned(sent.weights)), right)  # 4 bytes suffice
        again = comm.dispatch(x, misaligned(ids), misaligned(w))
        assert torch.equal(again.x.nan_to_num(7), sent.x.nan_to_num(7))
