"""Checking mode: results of a backend are compared with the reference, and all ranks raise the first difference."""

from __future__ import annotations

import functools
import os
import re
import warnings
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import toy
from changed import using
from ranks import run_ranks

import ep_ops
from ep_ops.backends import checked
from ep_ops.backends.checked import BY_ROW, CheckedBackend, differ
from ep_ops.backends.reference import ReferenceBackend
from ep_ops.backends.split import parts_of
from ep_ops.nn import MoELayer, interleave
from ep_ops.operators import OPERATORS

STARTS = [op.starts for op in OPERATORS if op.starts]
NAMES = {op.name: [output.name for output in op.overload._schema.returns] for op in OPERATORS}
TOKEN_MAJOR = " token-major"
WHOLE = [name for name in NAMES if name not in STARTS]
WHOLE += [op.name + TOKEN_MAJOR for op in OPERATORS if op.name in WHOLE and "layout" in op.arguments._fields]
"""What `run` runs."""


def outputs(name: str) -> list[tuple[int, str]]:
    """Return the outputs of what `run` runs that have elements."""
    empty = ("recv_scales",) if name.endswith(TOKEN_MAJOR) else ("recv_scales", "recv_idx")
    return [(i, what) for i, what in enumerate(NAMES[name.removesuffix(TOKEN_MAJOR)]) if what not in empty]


def make(**others: Any) -> ep_ops.Communicator:
    with mock.patch.dict(os.environ, EP_OPS_CHECK="1"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return toy.communicator(**others)


def run(comm: ep_ops.Communicator, name: str, tokens: int, seed: int) -> Any:
    """One operator on random inputs, by its name; others that it needs run before, unless ``name`` is theirs."""
    ops = torch.ops.ep
    draw = torch.Generator().manual_seed(seed)
    x, idx, weights = toy.inputs(tokens, seed)
    idx[0] = torch.tensor([1, 3])  # something for each of two ranks
    rows = 40
    ints = (comm.num_local_experts, comm.world_size, comm.name)
    sizes = (rows, toy.ALIGNMENT, 0, 16, *ints)
    if name == "plan":
        return ops.plan(idx, *sizes)
    if name == "dispatch":
        return ops.dispatch(x, weights, idx, *sizes)
    if name == "dispatch_dynamic":
        return ops.dispatch_dynamic(x, weights, idx, toy.ALIGNMENT, 16, *ints)
    if name == "dispatch_wait":
        return ops.dispatch_wait(ops.dispatch_start(x, weights, idx, *sizes), x, weights, idx, *sizes)
    if name.endswith(TOKEN_MAJOR):
        name, layout = name.removesuffix(TOKEN_MAJOR), "token_major"
        room = (rows, 1, 0, 16, *ints, layout)
        if name == "plan":
            return ops.plan(idx, *room)
        if name == "dispatch_dynamic":
            return ops.dispatch_dynamic(x, weights, idx, 1, 16, *ints, layout)
        if name == "dispatch_wait":
            ticket = ops.dispatch_start(x, weights, idx, *room)
            return ops.dispatch_wait(ticket, x, weights, idx, *room)
        sent = ops.dispatch(x, weights, idx, *room)
        if name == "dispatch":
            return sent
        along = (idx, *sent[3:7])
        if name == "dispatch_planned":
            return ops.dispatch_planned(x, weights, *along, rows, 1, 16, comm.name, layout)
        given = torch.randn(rows, toy.HIDDEN, generator=draw), sent[2], *along, 1, 16, comm.name, layout
        if name == "dispatch_backward":
            return ops.dispatch_backward(*given)
        ticket = ops.dispatch_backward_start(*given)
        return ops.dispatch_backward_wait(ticket, [], x.dtype, *x.shape, idx.shape[1], comm.name)
    _, _, given, *placed = ops.dispatch(x, weights, idx, *sizes)
    along = (idx, *placed[:4], toy.ALIGNMENT, 16, comm.name)
    y = torch.randn(rows, toy.HIDDEN, generator=draw)
    if name == "dispatch_planned":
        return ops.dispatch_planned(x, weights, *along[:5], rows, *along[5:])
    if name == "combine":
        return ops.combine(y, given, *along, x)
    if name == "combine_gathered":
        return ops.combine_gathered(comm.empty_rows(rows).copy_(y), *along)
    if name == "dispatch_backward":
        return ops.dispatch_backward(y, given, *along)
    if name == "dispatch_backward_wait":
        ticket = ops.dispatch_backward_start(y, given, *along)
        return ops.dispatch_backward_wait(ticket, [], x.dtype, *x.shape, idx.shape[1], comm.name)
    back = x, y, given, *along[:5], rows, *along[5:]
    if name == "combine_backward":
        return ops.combine_backward(*back)
    if name == "combine_backward_wait":
        return ops.combine_backward_wait(ops.combine_backward_start(*back), [], x.dtype, *y.shape, True, comm.name)
    assert name == "combine_wait"
    return ops.combine_wait(ops.combine_start(y, given, *along), y, given, *along)


def operations(name: str) -> int:
    """How many `run` makes."""
    return 1 if "dispatch" in name and not name.endswith("_planned") and "backward" not in name or name == "plan" else 2


def undefined(name: str, right: torch.Tensor) -> torch.Tensor:
    """Where the reference leaves a result open: it marks these places."""
    if name == "arrivals":
        return right == -1
    return right.isnan() if right.is_floating_point() else torch.zeros_like(right, dtype=torch.bool)


def raised(call: Any, *args: Any) -> str:
    with pytest.raises(RuntimeError) as error:
        call(*args)
    return str(error.value)


# ---------------------------------------------------------------------- what is compared


def test_names_of_results():
    """The wait of a split operation returns what the whole operation does, under the same names."""
    for name, outputs in NAMES.items():
        whole, part = parts_of(name)
        assert outputs == (["ticket"] if part == "start" else NAMES[whole])
    assert BY_ROW <= {name for outputs in NAMES.values() for name in outputs}


def check_every_result(seed):
    """Change one number of one result on one rank, in the last bit where it must be right to the last bit, and expect
    the error."""
    draw = torch.Generator().manual_seed(seed)  # the same on all ranks
    found, expected, made = [], [], 0
    with make(symmetric_rows=40, name="checked") as comm:
        for name in WHOLE:
            for output, what in outputs(name):
                wrong_rank = int(torch.randint(comm.world_size, (), generator=draw))
                place = float(torch.rand((), generator=draw))
                told = []

                def change(operator, results, at=(name, output, what, wrong_rank, place), told=told):
                    name, output, what, wrong_rank, place = at
                    if operator != name.removesuffix(TOKEN_MAJOR) or comm.rank != wrong_rank:
                        return results
                    right = results[output]
                    wrong = results[output] = right.clone()
                    known = (~undefined(what, right)).flatten().nonzero().flatten()
                    flat = int(known[int(place * known.numel())])
                    if what == "grad_recv_weights":
                        wrong.view(-1)[flat] += 0.01
                    else:
                        wrong.view(torch.int32).view(-1)[flat] ^= 1
                    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), right.shape)]
                    told.append(
                        f"{what}{index} is {wrong.view(-1)[flat].item()!r} on rank {comm.rank}, the reference has"
                        f" {right.view(-1)[flat].item()!r} (1 of {right.numel()} numbers differ)"
                    )
                    return results

                arguments = comm, name, 7 + comm.rank, seed + output + comm.rank
                with using(comm, change):
                    found.append(raised(run, *arguments))
                run(*arguments)  # right again
                operator = name.removesuffix(TOKEN_MAJOR)
                made += operations(operator)
                number, made = made, made + operations(operator)
                head = f"communicator 'checked': ep::{operator}, operation {number}, is not what the reference backend"
                expected.append((head + " returns: ", wrong_rank, told))
    return found, expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_result(world_size):
    results = run_ranks(world_size, check_every_result, cases.fresh_seed())
    count = sum(len(outputs(name)) for name in WHOLE)
    for found, expected in results:
        assert len(found) == len(expected) == count
        for text, (head, rank, _) in zip(found, expected, strict=True):
            (said,) = results[rank][1][found.index(text)][2]
            assert text == head + said
    if world_size == 2:
        assert results[0][0] == results[1][0]


def check_what_is_undefined(seed):
    """Whatever lies where nobody may read, it is right, and so is a dot product that was added up otherwise."""
    draw = torch.Generator().manual_seed(seed)
    changed = []

    def change(operator, results):
        for output, what in enumerate(NAMES[operator]):
            right = results[output]
            noise = torch.randn(right.shape, generator=draw)
            noise[noise > 1] = torch.nan
            anything = (1000 * noise.nan_to_num()).to(right.dtype) if right.dtype == torch.int32 else noise
            results[output] = torch.where(undefined(what, right), anything, right)
            if what == "grad_recv_weights":
                results[output].view(torch.int32).bitwise_xor_(1)
            if differ(results[output], right).any():
                changed.append(what)
        return results

    with make(symmetric_rows=40) as comm, using(comm, change):
        for name in WHOLE:
            run(comm, name, 7 + comm.rank, seed + comm.rank)
    return set(changed)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_undefined_is_left_out(world_size):
    for changed in run_ranks(world_size, check_what_is_undefined, cases.fresh_seed()):
        assert changed == {"arrivals", *BY_ROW}


FORMATS = [
    ("e4m3/128/pow2", "columns"), ("e4m3/128/pow2", "packed"), ("e4m3/32/mx", "swizzled/torch"), ("e4m3/32/mx", "rows"),
    ("e4m3/row/fp32", "rows"), ("wire:e4m3/128/fp32", ""),
]  # fmt: skip


def test_another_wait_runs_the_operation_again() -> None:
    """Without strict, a second wait runs the operation again, as on the reference backend alone."""
    with make(strict=False) as comm:
        x, idx, weights = toy.inputs(5, 0)
        start = comm.dispatch_start(x, idx, weights)
        first, again = comm.dispatch_wait(start), comm.dispatch_wait(start)
        kept = first.route.counts.sum()
        assert kept > 0 and torch.equal(first.route.counts, again.route.counts)
        assert torch.equal(comm.combine(first.x, first.route), comm.combine(again.x, again.route))


def check_formats(seed):
    """Right rows and scales pass, and a bit of one that a token has does not."""
    found = []
    with mock.patch.object(toy, "HIDDEN", 256), make(strict=False) as comm:
        x, idx, weights = toy.inputs(9, seed + comm.rank)
        idx[0] = torch.tensor([1, 3])
        route, _ = comm.plan(idx, max_tokens=16)
        ways = {
            "dispatch": lambda **asked: comm.dispatch(x, idx, weights, **asked),
            "dispatch_dynamic": lambda **asked: comm.dispatch(x, idx, weights, **asked, exact=True),
            "dispatch_wait": lambda **asked: comm.dispatch_wait(comm.dispatch_start(x, idx, weights, **asked)),
            "dispatch_planned": lambda **asked: comm.dispatch_planned(x, route, weights, **asked),
        }
        for (format, layout), (name, way) in zip(FORMATS, 2 * list(ways.items()), strict=False):
            way(format=format, scales_as=layout)
            for output, what in enumerate(("recv_x", "recv_scales")[: 1 if format[:4] == "wire" else 2]):

                def change(operator, results, output=output):
                    results[output] = right = results[output].clone()
                    numbers = right.view(torch.uint8).view(-1)
                    defined = (numbers > 0) & (numbers != 255) & (numbers != 0x7F)
                    numbers[defined.nonzero()[0]] ^= 1
                    return results

                with using(comm, change):
                    said = raised(functools.partial(way, format=format, scales_as=layout))
                found.append((f"ep::{name}," in said, f": {what}[" in said))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_formats(world_size):
    for found in run_ranks(world_size, check_formats, cases.fresh_seed()):
        assert len(found) == 11 and all(all(each) for each in found)


def check_several_ranks():
    with make() as comm:

        def change(operator, results):
            return [results[0] + comm.rank] if comm.rank else results

        x, idx, weights = toy.inputs(5, comm.rank)
        sent = comm.dispatch(x, idx, weights)
        with using(comm, change):
            return raised(comm.combine, sent.x, sent.route, sent.weights)


def test_all_ranks_that_differ_are_named():
    for text in run_ranks(3, check_several_ranks):
        assert re.search(r"ep::combine, operation 2, .* on rank 1, .*\(40 of 40 .*; ranks \[2\] have", text), text


def test_other_shapes():
    with make() as comm:
        args = comm, "dispatch_dynamic", 7, 0
        right = run(*args)[0]
        with using(comm, lambda operator, results: [results[0][:-4], *results[1:]]):
            text = raised(run, *args)
        rows = right.shape[0]
        assert f"recv_x is torch.float32 [{rows - 4}, 8] on rank 0, the reference has torch.float32 [{rows}" in text
        with using(comm, lambda operator, results: [results[0].double(), *results[1:]]):
            assert "recv_x is torch.float64 [" in raised(run, *args)


def test_the_route_comes_first():
    """Rows follow it."""
    with make() as comm, using(comm, lambda operator, results: [result + 1 for result in results]):
        assert "returns: send_rows[0, 0] is" in raised(run, comm, "dispatch", 7, 0)


def test_differ():
    one = torch.tensor([0.0, 1.0, torch.nan, torch.nan, torch.inf])
    other = torch.tensor([-0.0, 1.0, torch.nan, 1.0, -torch.inf])
    other.view(torch.int32)[2] += 1
    assert other[2].isnan()
    for dtype in (torch.float32, torch.float64):
        assert differ(one.to(dtype), other.to(dtype)).tolist() == [True, False, False, True, True]
    assert differ(torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [False, True]


def test_numbers_that_are_not_finite():
    """A sum of infinite products may be anything; one of NaN is NaN."""
    with make() as comm:
        x, idx, weights = toy.inputs(5)
        sent = comm.dispatch(x, idx, weights)
        for value, wrong, passes in (
            (torch.inf, torch.nan, True),
            (torch.nan, 1.0, False),
            (torch.nan, torch.nan, True),
        ):
            grad = x.clone()
            grad[0, 0] = value
            y = torch.randn(sent.x.shape)

            def change(operator, results, wrong=wrong):
                results[1] = torch.where(results[1].isfinite(), results[1], wrong)
                return results

            args = (grad, y, sent.weights, *sent.route[:5], y.shape[0], *sent.route.ints, comm.name)
            with using(comm, change):
                if passes:
                    torch.ops.ep.combine_backward(*args)
                else:
                    assert "grad_recv_weights[" in raised(torch.ops.ep.combine_backward, *args)


# ---------------------------------------------------------------------- where operators run


def split(comm, x, idx, weights, scale):
    sent = comm.dispatch_wait(comm.dispatch_start(x, idx, weights))
    return comm.combine_wait(comm.combine_start(toy.experts(sent, scale), sent.route, sent.weights))


def whole(comm, x, idx, weights, scale):
    sent = comm.dispatch(x, idx, weights)
    return comm.combine(toy.experts(sent, scale), sent.route, sent.weights)


def dynamic(comm, x, idx, weights, scale):
    sent = comm.dispatch(x, idx, weights, exact=True)
    return comm.combine(toy.experts(sent, scale), sent.route, sent.weights, residual=x)


def gathered(comm, x, idx, weights, scale):
    sent = comm.dispatch(x, idx)
    y = comm.empty_rows(sent.x.shape[0]).copy_(toy.experts(sent, scale))
    return comm.combine_gathered(y, sent.route) * weights.sum(1, keepdim=True)


LAYERS = {
    # what a layer runs forward and backward
    split: ["dispatch_wait", "combine_wait", "combine_backward_wait", "dispatch_backward_wait"],
    whole: ["dispatch", "combine", "combine_backward", "dispatch_backward"],
    dynamic: ["dispatch_dynamic", "combine", "combine_backward", "dispatch_backward"],
    gathered: ["dispatch", "combine_gathered", "dispatch_planned", "dispatch_backward"],
}


def step(comm, layer, tokens):
    x, idx, weights = toy.inputs(tokens, comm.rank, grad=True)
    first = comm.first_local_expert
    scale = toy.scales()[first : first + comm.num_local_experts].requires_grad_()
    out = layer(comm, x, idx, weights, scale)
    out.sin().sum().backward()
    return [out.detach(), x.grad, weights.grad, scale.grad]


def check_layers(backend):
    with make(symmetric_rows=200) as comm, toy.communicator(symmetric_rows=200) as plain:
        for layer, operators in LAYERS.items():
            torch._dynamo.reset()
            compiled = torch.compile(layer, backend=backend) if backend and layer is not gathered else layer
            seen = []

            def note(operator, results, seen=seen):
                seen.append(operator)
                return results

            with using(comm, note):
                got = step(comm, compiled, 6 + comm.rank)
            assert seen == operators
            torch.testing.assert_close(got, step(plain, layer, 6 + comm.rank), rtol=0, atol=0)
            for operator in operators:

                def change(name, results, operator=operator):
                    if name == operator and comm.rank == comm.world_size - 1:
                        results[0] = results[0] + 1
                    return results

                with using(comm, change):
                    assert f"ep::{operator}, operation" in raised(step, comm, compiled, 6 + comm.rank)


@pytest.mark.parametrize(("world_size", "backend"), [(1, None), (2, None), (2, "aot_eager")])
def test_layers(world_size, backend):
    """Forward and backward, eager and compiled: the same results, and nothing goes unseen."""
    run_ranks(world_size, check_layers, backend)


def test_compiled_by_inductor():
    torch._dynamo.reset()
    with make() as comm:
        x, idx, _ = toy.inputs(5)
        there_and_back = torch.compile(lambda x: comm.combine(*comm.dispatch(x, idx)[:3:2]) * 2, fullgraph=True)
        torch.testing.assert_close(there_and_back(x), 2 * (idx >= 0).sum(1, keepdim=True) * x)
        with using(comm, lambda operator, results: [results[0] * 2, *results[1:]]):
            assert "ep::dispatch, operation 3" in raised(there_and_back, x)


def test_what_is_captured_is_rejected(monkeypatch):
    with make() as comm:
        x, idx, _ = toy.inputs(5)
        monkeypatch.setattr(checked, "_capturing", lambda device: True)
        with using(comm, lambda operator, results: pytest.fail("ran")):
            text = raised(comm.dispatch, x, idx)
        assert "ep::dispatch cannot be captured in a CUDA graph while EP_OPS_CHECK is 1" in text
        with (
            mock.patch.object(comm.backend._reference, "reject", side_effect=AssertionError("told the others")),
            pytest.raises(TypeError, match="x has dtype"),
        ):
            comm.dispatch(x.double(), idx)


# ---------------------------------------------------------------------- what ranks tell each other


def check_rejections():
    with make() as comm:
        x, idx, weights = toy.inputs(4)
        sent = comm.dispatch(x, idx, weights)
        texts = []
        for call in (
            lambda x: comm.dispatch(x, idx, weights),
            lambda x: comm.dispatch_wait(comm.dispatch_start(x, idx, weights)),
            lambda x: comm.combine(sent.x, sent.route, residual=x),
        ):
            with pytest.raises((TypeError, ValueError)) as error:
                call(x.double() if comm.rank else x)
            texts.append(str(error.value))
        with using(comm, lambda operator, results: [results[0] + 1, *results[1:]]):
            return texts, raised(comm.plan, idx)


def test_what_one_rank_rejects():
    """All raise the reason, and go on with the same number of operations."""
    (others, one), (own, other) = run_ranks(2, check_rejections)
    for text, reason, name in zip(others, own, ("x", "x", "residual"), strict=True):
        assert reason.startswith(f"{name} has dtype torch.float64; allowed") and f"rejected by rank 1: {reason}" in text
    assert one == other and "ep::plan, operation 5, is" in one


def check_reports():
    """Kernels report something on rank 1 alone, when they have run."""
    with make() as comm:
        x, idx, _ = toy.inputs(4)
        fails = mock.Mock(side_effect=ValueError("topk_idx holds 9") if comm.rank == 1 else None)
        backend = comm.backend._backend
        with mock.patch.object(backend, "check_errors", fails), mock.patch.object(backend, "name", "kernels"):
            with pytest.raises(ValueError) as error:
                comm.dispatch(x, idx)
        comm.dispatch(x, idx)
        return str(error.value)


def test_what_the_kernels_of_one_rank_report():
    others, own = run_ranks(2, check_reports)
    assert own == "topk_idx holds 9" and others == "rejected by rank 1: topk_idx holds 9"


def leaves_its_turn():
    """Rank 1 raises between the start of a micro-batch and that of the next one, and finishes the first."""
    with make() as comm:
        layer = MoELayer(comm, 8, shared_intermediate_size=8)
        x, _, _ = toy.inputs(8)
        if comm.rank == 1:
            layer.shared.forward = mock.Mock(side_effect=KeyError("lost"))
        with pytest.raises((KeyError, RuntimeError)) as error:
            interleave(layer.steps(x[:4], 0), layer.steps(x[4:], 1))
        return str(error.value)


def test_a_comparison_meets_no_other_call():
    others, own = run_ranks(2, leaves_its_turn)
    assert own == "'lost'" and "(rank 0: ep::dispatch of " in others and "rank 1: comparison of ep::dispatch" in others


def test_what_cannot_be_told():
    """The error of this rank is its own, whatever the others do."""
    with make() as comm:
        x, idx, _ = toy.inputs(4)
        with (
            mock.patch.object(comm.backend._backend, "check_errors", side_effect=ValueError("my own")),
            mock.patch.object(comm.backend._reference, "reject", side_effect=RuntimeError("ranks run different ...")),
            pytest.raises(ValueError, match="my own"),
        ):
            comm.dispatch(x, idx)


def test_kernels_that_have_failed():
    """An error has been sent to all ranks, some of which may be dead: the call does not wait for them."""
    with make() as comm:
        x, idx, _ = toy.inputs(4)
        backend = comm.backend._backend
        with (
            mock.patch.object(backend, "check_errors", side_effect=RuntimeError("waited 9 s for rank 3")),
            mock.patch.object(backend, "has_failed", return_value=True),
            mock.patch.object(comm.backend._reference, "reject", side_effect=AssertionError),
        ):
            assert raised(comm.dispatch, x, idx) == "waited 9 s for rank 3"


def check_orders_differ():
    with make() as comm:
        x, idx, _ = toy.inputs(4)
        return raised(comm.dispatch, x, idx) if comm.rank else raised(comm.plan, idx)


def check_rejected_beside_another():
    with make() as comm:
        x, idx, _ = toy.inputs(4)
        if comm.rank:
            with pytest.raises(TypeError) as error:
                comm.dispatch(x.double(), idx)
            return str(error.value)
        with pytest.raises(ValueError) as error:
            comm.plan(idx)
        return str(error.value)


def test_rejected_while_others_run_another_operator():
    other, own = run_ranks(2, check_rejected_beside_another)
    assert own.startswith("x has dtype torch.float64") and other == f"plan: rejected by rank 1: {own}"


def test_ranks_that_run_different_operators():
    for text in run_ranks(2, check_orders_differ):
        assert "different calls at the same time (rank 0: ep::plan of '" in text and "rank 1: ep::dispatch of" in text


# ---------------------------------------------------------------------- how it is asked for


@pytest.mark.parametrize("value", ["", "0"])
def test_off(monkeypatch, value):
    monkeypatch.setenv("EP_OPS_CHECK", value)
    with toy.communicator() as comm:
        assert type(comm.backend) is ReferenceBackend


def test_on(monkeypatch):
    """A warning says once that checking mode is on."""
    monkeypatch.setenv("EP_OPS_CHECK", "1")
    with pytest.warns(RuntimeWarning, match="every operation of communicator .* which is slow") as said:
        comm = toy.communicator()
    assert said[0].filename == toy.__file__  # whoever makes it
    with comm:
        assert type(comm.backend) is CheckedBackend and comm.backend.name == "reference"


def test_other_values_are_rejected(monkeypatch):
    monkeypatch.setenv("EP_OPS_CHECK", "yes")
    with pytest.raises(ValueError, match="check is 'yes'; allowed: one of '0', '1' .default: EP_OPS_CHECK in"):
        toy.communicator()


def check_disagreement():
    with mock.patch.dict(os.environ, EP_OPS_CHECK=str(torch.distributed.get_rank())):
        toy.communicator()


def test_all_ranks_check_or_none():
    for error in run_ranks(2, check_disagreement, return_exceptions=True):
        assert isinstance(error, ValueError)
        assert "disagree on check: '0' on ranks [0]; '1' on ranks [1]; set EP_OPS_CHECK in" in str(error)
