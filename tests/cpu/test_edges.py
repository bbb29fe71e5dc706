"""Sizes and arguments at the edge: one number at most, a rank without experts, what no operator is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import ep_ops
from ep_ops import nn
from ep_ops.moe import MoECommunicator, MoECommunicatorConfig, balanced
from ep_ops.nn import (
    DenseMoE,
    MoELayer,
    expert_lists,
    gather_mm,
    gather_rows,
    grouped_mm,
    keep_experts_apart,
    of_rows,
    reduce_rows,
)  # fmt: skip

SIZES: dict[str, Any] = dict(hidden_size=16, max_tokens_per_rank=8, dtype=torch.float32, backend="reference")


def made(**more: Any) -> ep_ops.Communicator:
    return ep_ops.Communicator(**{**SIZES, "num_experts": 4, "top_k": 2, **more})


# ---------------------------------------------------------------------- one number at most


def _one_choice(tokens: list[int]) -> None:
    """Each token names one expert of rank 1, or none."""
    rank = torch.distributed.get_rank()
    with made(top_k=1) as comm:
        x = torch.randn(tokens[rank], 16, generator=torch.Generator().manual_seed(rank))
        idx = torch.full((tokens[rank], 1), 3, dtype=torch.int32)
        idx[1:2] = -1
        weights = torch.full((tokens[rank], 1), 0.5)
        sent = comm.dispatch(x, idx, weights, layout="token_major")
        out = comm.combine(sent.x * sent.weights.sum(1, keepdim=True), sent.route)
        assert torch.equal(out, torch.where(idx >= 0, x * 0.5, 0))
        held = int(sent.route.sources[-1])
        assert held == (sum(min(count, 1) + max(count - 2, 0) for count in tokens) if rank else 0)
        assert sent.local_idx[:held].eq(1).all() and sent.weights[:held].eq(0.5).all()


@pytest.mark.parametrize("tokens", [[0, 3], [1, 0], [1, 1], [2, 1], [0, 0]])
def test_token_major_rows_of_one_expert_each(tokens: list[int]) -> None:
    run_ranks(2, _one_choice, tokens)


def _no_experts(by_place: bool, compiled: bool) -> None:
    """Frozen weights: the graph hangs on x alone."""
    rank = torch.distributed.get_rank()
    draw = torch.Generator().manual_seed(rank)
    with made(num_experts=2, experts_per_rank=[2, 0]) as comm:
        x = torch.randn(5, 16, generator=draw).requires_grad_()
        idx = torch.tensor([[0, 1]] * 5, dtype=torch.int32)
        w = torch.eye(16).repeat(comm.num_local_experts, 1, 1) * 3

        def layer(x: Tensor) -> Tensor:
            if by_place:
                sent = comm.dispatch(x, idx, layout="token_major")
                lists = expert_lists(sent.local_idx, comm.num_local_experts)
                return comm.combine(reduce_rows(gather_mm(sent.x, w, lists), lists), sent.route)
            rows = comm.dispatch(x, idx)
            return comm.combine(grouped_mm(rows.x, w, rows.route.offs), rows.route)

        run: Callable[[Tensor], Tensor] = (
            torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        )
        out = run(x)
        out.sum().backward()
        assert torch.equal(out, 6 * x) and torch.equal(x.grad, torch.full_like(x, 6.0))


@pytest.mark.parametrize("by_place", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_backward_of_a_rank_without_experts(by_place: bool, compiled: bool) -> None:
    run_ranks(2, _no_experts, by_place, compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_matrices_leave_zeros_with_gradients(dtype: torch.dtype) -> None:
    x = torch.randn(3, 8, dtype=dtype, requires_grad=True)
    w = torch.zeros(0, 8, 16, dtype=dtype, requires_grad=True)
    out = grouped_mm(x, w, torch.zeros(0, dtype=torch.int32))
    assert out.shape == (3, 16) and not out.any()
    gx, gw = torch.autograd.grad(out.sum(), (x, w))
    assert gx.shape == x.shape and not gx.any() and gw.shape == w.shape


@pytest.mark.parametrize("top_k", [1, 2])
def test_dense_layer_takes_a_batch(top_k: int) -> None:
    with made(top_k=top_k) as comm:
        layer, dense = MoELayer(comm, 32), DenseMoE(comm, 32)
        x = torch.randn(2, 4, 16)
        torch.testing.assert_close(layer(x), dense(x))
        torch.testing.assert_close(dense(x).view(8, 16), dense(x.view(8, 16)))


# ---------------------------------------------------------------------- told to all ranks

REJECTED: dict[str, tuple[Callable[[ep_ops.Communicator, Tensor, Tensor], Any], str]] = {
    "large ids": (lambda c, x, idx: c.dispatch(x, idx.long() + 2**32), " is 2147483647 or more on rank 0"),
    "small ids": (lambda c, x, idx: c.dispatch(x, idx.long() - 2**32), " is -2 on rank 0; expert ids are"),
    "alignment": (lambda c, x, idx: c.dispatch(x, idx, alignment=0), "alignment is 0; allowed: 1.."),
    "capacity": (lambda c, x, idx: c.dispatch(x, idx, capacity=32.0), "capacity is 32.0; allowed: an int"),
    "max_tokens": (lambda c, x, idx: c.dispatch(x, idx, max_tokens="8"), "max_tokens is '8'; allowed: an int"),
    "slots": (lambda c, x, idx: c.plan(idx, slots=1.5), "slots is 1.5; allowed: an int"),
    "plan": (lambda c, x, idx: c.plan(None), "topk_idx is None; allowed: a tensor"),
    "list": (lambda c, x, idx: c.dispatch(x.tolist(), idx), "x is a list; allowed: a tensor"),
    "no ids": (lambda c, x, idx: c.dispatch(x, None), "topk_idx is None; allowed: a tensor"),
    "format": (lambda c, x, idx: c.dispatch(x, idx, format=None), "format is None; allowed: a str"),
    "zeros": (lambda c, x, idx: c.dispatch(x, idx, zeros="no"), "zeros is a str; allowed: a bool"),
    "tokens: max_tokens": (
        lambda c, x, idx: c.dispatch(x, idx, max_tokens="8", layout="token_major"),
        "max_tokens is '8'; allowed: an int",
    ),
    "tokens: bound": (
        lambda c, x, idx: c.dispatch(x, idx, max_tokens=3.5, layout="token_major"),
        "max_tokens is 3.5; allowed: an int",
    ),
    "layout": (
        lambda c, x, idx: c.dispatch(x, idx, layout="by_token"),
        "layout is 'by_token'; allowed: 'grouped', 'padded', 'token_major'",
    ),
    "no layout": (lambda c, x, idx: c.dispatch(x, idx, layout=None), "layout is None; allowed: a str"),
    "padded without slots": (
        lambda c, x, idx: c.dispatch(x, idx, layout="padded"),
        "slots is 0, with layout 'padded'; allowed: positive multiples of alignment",
    ),
    "slots without padded": (
        lambda c, x, idx: c.dispatch(x, idx, slots=16),
        "slots is 16, with layout 'grouped'; allowed: 0 (only layout 'padded' has slots)",
    ),
    "slots and capacity": (
        lambda c, x, idx: c.dispatch(x, idx, layout="padded", slots=16, capacity=64),
        "capacity is 64 and slots is 16; allowed: one of the two",
    ),
    "exact: padded": (
        lambda c, x, idx: c.dispatch(x, idx, layout="padded", exact=True),
        "exact is True, with layout 'padded', capacity None and slots 0; allowed: layout 'grouped' or 'token_major'",
    ),
    "exact: capacity": (
        lambda c, x, idx: c.dispatch(x, idx, capacity=64, exact=True),
        "exact is True, with layout 'grouped', capacity 64 and slots 0; allowed",
    ),
    "exact: max_tokens": (
        lambda c, x, idx: c.dispatch(x, idx, max_tokens="8", exact=True), "max_tokens is '8'; allowed: an int"
    ),
    "tokens: alignment": (
        lambda c, x, idx: c.dispatch(x, idx, layout="token_major", alignment=4),
        "alignment is 4; allowed with layout 'token_major': 1",
    ),
    "tokens: route": (
        lambda c, x, idx: c.dispatch_planned(x, (idx,)), "route is a tuple; allowed: a Route"
    ),
}  # fmt: skip
OTHERS: dict[str, Callable[[ep_ops.Communicator, Tensor, Tensor], Any]] = {
    "slots": lambda c, x, idx: c.plan(idx),
    "plan": lambda c, x, idx: c.plan(idx),
    "tokens: max_tokens": lambda c, x, idx: c.dispatch(x, idx, layout="token_major"),
    "tokens: bound": lambda c, x, idx: c.dispatch(x, idx, layout="token_major"),
    "tokens: alignment": lambda c, x, idx: c.dispatch(x, idx, layout="token_major"),
    **{
        f"exact: {what}": lambda c, x, idx: c.dispatch(x, idx, exact=True)
        for what in ("padded", "capacity", "max_tokens")
    },
}
"""What the other ranks call then, where that is no dispatch."""


def _rejecting(name: str, grad: bool) -> None:
    call, text = REJECTED[name]
    x, idx = torch.randn(4, 16), torch.tensor([[0, 1]] * 4, dtype=torch.int32)
    with made() as comm, torch.set_grad_enabled(grad):
        known = comm.dispatch(x, idx, layout="token_major").route if name == "tokens: route" else None
        if comm.rank == 0:
            with pytest.raises((TypeError, ValueError)) as told:
                call(comm, x, idx)
                comm.check_errors()
        else:
            with pytest.raises(ValueError, match="rejected by rank 0") as told:
                if known is not None:
                    comm.dispatch_planned(x, known)
                OTHERS.get(name, lambda c, x, idx: c.dispatch(x, idx))(comm, x, idx)
                comm.check_errors()
        assert text in str(told.value)
        rows = comm.dispatch(x, idx)  # and all goes on
        assert torch.equal(comm.combine(rows.x, rows.route), 2 * x)


@pytest.mark.parametrize("name", [name for name in REJECTED if "ids" not in name])
@pytest.mark.parametrize("grad", [False, True])
def test_what_one_rank_gets_wrong_all_are_told(name: str, grad: bool) -> None:
    run_ranks(2, _rejecting, name, grad)


def test_routes_are_not_what_holds_them() -> None:
    with made() as comm:
        rows = comm.dispatch(torch.randn(4, 16), torch.tensor([[0, 1]] * 4, dtype=torch.int32))
        along = comm.combine, comm.combine_gathered, comm.combine_start, comm.dispatch_planned
        for call in along:
            with pytest.raises(TypeError, match="route is a Dispatched; allowed: a Route"):
                call(rows.x, rows)
        copies = comm.dispatch(torch.randn(4, 16), torch.tensor([[0, 1]] * 4, dtype=torch.int32), layout="token_major")
        lists = nn.expert_lists(copies.local_idx, comm.num_local_experts)
        for local in (
            lambda: nn.swiglu_rows(rows.x, rows), lambda: nn.expert_of_rows(rows),
            lambda: nn.of_rows(torch.zeros(comm.num_local_experts), rows),
            lambda: nn.places_route(comm, rows, lists),
        ):  # fmt: skip
            with pytest.raises(TypeError, match="route is a Dispatched; allowed: a Route"):
                local()
        with pytest.raises(TypeError, match="started is a StartedDispatch; allowed: what combine_start returned"):
            comm.combine_wait(comm.dispatch_start(torch.randn(4, 16), torch.tensor([[0, 1]] * 4, dtype=torch.int32)))
        with pytest.raises(TypeError, match="started is a Dispatched; allowed: what dispatch_start returned"):
            comm.dispatch_wait(rows)


def test_records_are_not_the_tensors_that_they_hold() -> None:
    with made() as comm:
        x, idx = torch.randn(4, 16), torch.tensor([[0, 1]] * 4, dtype=torch.int32)
        rows, copies = comm.dispatch(x, idx), comm.dispatch(x, idx, torch.ones(4, 2), layout="token_major")
        w, lists = (
            torch.zeros(comm.num_local_experts, 16, 16),
            nn.expert_lists(copies.local_idx, comm.num_local_experts),
        )
        route, offs = rows.route, rows.route.offs
        assert copies.weights is not None
        wrong = {
            "x": (
                lambda r: nn.grouped_mm(r, w, offs), lambda r: nn.weights_gradient(r, rows.x, offs),
                lambda r: nn.gather_mm(r, w, lists), lambda r: nn.gather_rows(r, lists),
                lambda r: nn.mask_rows(r, route), lambda r: comm.dispatch_planned(r, route),
                lambda r: nn.expert_mlp(comm, r, idx, torch.ones(4, 2), w, w[:, :8]),
            ),
            "offs": (lambda r: nn.grouped_mm(rows.x, w, r), lambda r: nn.weights_gradient(rows.x, rows.x, r)),
            "w": (lambda r: nn.grouped_mm(rows.x, r, offs), lambda r: nn.gather_mm(copies.x, r, lists)),
            "grad": (lambda r: nn.weights_gradient(rows.x, r, offs),),
            "rows": (lambda r: nn.scaled_grouped_mm(r, rows.x, w, offs),),
            "scales": (lambda r: nn.scaled_grouped_mm(rows.x, r, w, offs),),
            "gate_and_up": (
                lambda r: nn.swiglu_rows(r, route), lambda r: nn.swiglu_quantized(r, route), lambda r: nn.swiglu(r),
            ),
            "values": (lambda r: nn.of_rows(r, route),),
            "local_idx": (lambda r: nn.expert_lists(r, comm.num_local_experts),),
            "y": (lambda r: nn.reduce_rows(r, lists), lambda r: comm.combine(r, route)),
            "weights": (
                lambda r: nn.weights_of_places(r, lists), lambda r: nn.reduce_rows(lists.rows[:, None], lists, r),
            ),
        }  # fmt: skip
        of_lists = (
            lambda r: nn.gather_mm(copies.x, w, r), lambda r: nn.gather_rows(copies.x, r),
            lambda r: nn.reduce_rows(copies.x, r), lambda r: nn.weights_of_places(copies.weights, r),
            lambda r: nn.places_route(comm, copies.route, r),
        )  # fmt: skip
        for record, kind in ((rows, "Dispatched"), (route, "Route")):
            for name, calls in wrong.items():
                for call in calls:
                    with pytest.raises(TypeError, match=f"^{name} is a {kind}; allowed: a tensor"):
                        call(record)
            for call in of_lists:
                with pytest.raises(TypeError, match=f"^lists is a {kind}; allowed: an ExpertLists"):
                    call(record)
        with pytest.raises(TypeError, match="^weights is None; allowed: a tensor"):
            nn.weights_of_places(rows.weights, lists)


def test_what_layers_are_made_of_is_rejected_by_name() -> None:
    with made() as comm:
        rows = comm.dispatch(torch.randn(4, 16), torch.tensor([[0, 1]] * 4, dtype=torch.int32))
        held = comm.num_local_experts
        with pytest.raises(ValueError, match=rf"values has shape \(9, 16\); allowed: \[{held} \(local experts\)"):
            of_rows(torch.randn(9, 16), rows.route)
        with pytest.raises(ValueError, match=rf"x has shape \(3, 16\); allowed: \[{rows.route.num_rows}, \.\.\.\]"):
            nn.mask_rows(torch.randn(3, 16), rows.route)
        for shape in ((9, 16, 4), (held, 8, 4), (held, 16)):
            with pytest.raises(ValueError, match=rf"w has shape \({shape[0]}, .*; allowed: \[{held}, 16, N\]"):
                grouped_mm(rows.x, torch.randn(shape), rows.route.offs)
        with pytest.raises(ValueError, match="formats has 'e4m3/128/pow2'; allowed: pairs"):
            comm.warmup(["e4m3/128/pow2"])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="ranks is 0; allowed: an int of at least 1"):
            keep_experts_apart(MoELayer(comm, 8), ranks=0)


def _placed() -> None:
    config = MoECommunicatorConfig(
        num_experts=2, hidden_size=16, top_k=1, max_tokens_per_rank=8, placement=[0, 1], dtype=torch.float32,
        backend="reference",
    )  # fmt: skip
    with MoECommunicator(config) as moe:
        x, ids = torch.randn(4, 16), torch.zeros(4, 1, dtype=torch.int32)
        rank = torch.distributed.get_rank()
        with pytest.raises(ValueError, match=r"topk_idx has shape \(4,\); allowed: \[T, 1\]"):
            moe.dispatch(x, ids[:, 0] if rank == 0 else ids)


def test_ids_of_one_dimension_beside_a_placement() -> None:
    run_ranks(2, _placed)


# ---------------------------------------------------------------------- of this rank alone


def test_ids_beyond_int32_are_no_experts() -> None:
    with made() as comm:
        for name in ("large ids", "small ids"):
            call, text = REJECTED[name]
            with pytest.raises(ValueError, match=text):
                call(comm, torch.randn(4, 16), torch.tensor([[0, 1]] * 4, dtype=torch.int32))
                comm.check_errors()


def test_lists_of_other_rows() -> None:
    lists = expert_lists(torch.tensor([[0, 1], [1, -1], [-1, -1]], dtype=torch.int32), 2)
    places = lists.rows.shape[0]
    with pytest.raises(ValueError, match="x has 2 rows; allowed: 3"):
        gather_rows(torch.randn(2, 8), lists)
    with pytest.raises(ValueError, match=f"y has 3 rows; allowed: {places}"):
        reduce_rows(torch.randn(3, 8), lists)
    with pytest.raises(ValueError, match=r"weights has shape \(3, 3\); allowed: \(3, 2\)"):
        reduce_rows(torch.randn(places, 8), lists, torch.rand(3, 3))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"world_size": 0}, "world_size is 0"), ({"rank": 5}, r"rank is 5; allowed: 0\.\.1"),
        ({"rank": -1}, "rank is -1"), ({"capacity": -5}, "capacity is -5"), ({"backend": "gpu"}, "backend is 'gpu'"),
        ({"experts_per_rank": 3}, "experts_per_rank is 3"), ({"num_experts": "4"}, "num_experts is '4'"),
    ],
)  # fmt: skip
def test_memory_plan_takes_what_a_communicator_takes(given: dict[str, Any], text: str) -> None:
    sizes: dict[str, Any] = dict(world_size=2, num_experts=4, hidden_size=64, top_k=2, max_tokens_per_rank=8)
    with pytest.raises(ValueError, match=text):
        ep_ops.memory_plan(**{**sizes, **given})


def test_what_placements_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"before\[1\] is 7; allowed: logical experts, 0..1"):
        balanced([1.0, 2.0], [1, 1], [0, 7])
    with pytest.raises(ValueError, match="before has 3 places; allowed: 2"):
        balanced([1.0, 2.0], [1, 1], [0, 1, 1])
    for wrong in ("4", 4.0):
        with pytest.raises(ValueError, match="num_experts is"):
            MoECommunicator(
                MoECommunicatorConfig(
                    num_experts=wrong,
                    hidden_size=16,
                    top_k=1,
                    max_tokens_per_rank=8,
                    placement=[0, 1, 2, 3],  # type: ignore[arg-type]
                )  # fmt: skip
            )
    with pytest.raises(TypeError, match="group is 5"):
        made(group=5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="device is 'cuda', but torch .* sees no GPU"):
        made(device="cuda")


@pytest.mark.parametrize("device", ["cpu:0", torch.device("cpu", 0)])
def test_a_cpu_has_no_number(device: Any) -> None:
    """Tensors that are made on it have none."""
    x, idx = torch.ones(4, 16), torch.tensor([[0, 1]] * 4, dtype=torch.int32)
    with made(device=device) as comm:
        assert comm.device == x.device
        rows = comm.dispatch(x, idx)
        assert torch.equal(comm.combine(rows.x, rows.route), 2 * x)
