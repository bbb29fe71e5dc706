"""Activation checkpointing: right in full, and with SAVE_FOR_CHECKPOINT nothing is sent twice."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import toy
from ranks import run_ranks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ep_ops.nn import DenseMoE, MoELayer, Router, interleave
from ep_ops.operators import OPERATORS, SAVE_FOR_CHECKPOINT, recomputation

FORWARD, BACKWARD = ["dispatch", "combine"], ["combine_backward", "dispatch_backward"]


def test_every_operator_that_gradients_flow_through_is_listed():
    others = {op.name for op in OPERATORS} - {op._opname for op in SAVE_FOR_CHECKPOINT}
    assert others == {*BACKWARD} | {f"{name}_{part}" for name in BACKWARD for part in ("start", "wait")}


def test_which_ids_are_those_of_the_forward_pass():
    """Ids in the same memory are others if some tokens are left out, or if they were changed in place."""
    ids = toy.inputs(4)[1]
    version = ids._version
    for same in (ids, ids.view(4, 2), ids.clone()):
        recomputation.compare(same, ids, version)
    for other in (ids[:3], ids[:0], ids + 1):
        with pytest.raises(RuntimeError, match="topk_idx differs from the expert ids of the forward pass"):
            recomputation.compare(other, ids, version)
    ids.add_(1)
    with pytest.raises(RuntimeError, match="topk_idx differs from the expert ids of the forward pass"):
        recomputation.compare(ids, ids, version)


def test_hooks_of_a_program_stay_in_their_order():
    """Operators look for the hooks of a checkpointed region behind those that the program has set inside of it."""
    used = []

    def hooks(name):
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: used.append(name) or tensor, lambda tensor: tensor
        )

    with toy.communicator() as comm:
        x, idx, _ = toy.inputs(4, grad=True)

        def region(x):
            with hooks("outer"):
                with hooks("inner"):
                    rows = comm.dispatch(x, idx, zeros=True).x
                    used.clear()
                    rows = rows.sin()
                return rows.sin()

        checkpoint(region, x, use_reentrant=False).sum().backward()
    assert used == ["inner", "outer"] and x.grad.any()


def _step(selective, compiled):
    """(operators that ran, gradients), with checkpointing and without."""
    torch._dynamo.reset()
    rank = torch.distributed.get_rank()
    results = []
    with toy.communicator() as comm:
        calls: list = []
        toy.recorded(comm, calls)
        first = comm.first_local_expert

        def layer(x, topk_idx, weights, scale):
            return toy.layer(comm, x, topk_idx, weights, scale).relu()

        contexts = functools.partial(create_selective_checkpoint_contexts, SAVE_FOR_CHECKPOINT)
        how = {"context_fn": contexts} if selective else {}
        for checkpointed in (True, False):
            args = [*toy.inputs(4 + rank, seed=rank, grad=True), toy.scales(grad=True)]

            def model(*args, checkpointed=checkpointed):
                out = checkpoint(layer, *args, use_reentrant=False, **how) if checkpointed else layer(*args)
                return out.sin()

            calls.clear()
            run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled and checkpointed else model
            run(*args).sum().backward()
            results.append(
                (
                    [name for name, *_ in calls],
                    [arg.grad[first : first + 2] if arg is args[3] else arg.grad for arg in args],
                )
            )
    return results


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("selective", [False, True], ids=["all", "selective"])
def test_checkpointing(selective, compiled):
    for (ran, gradients), (plain, expected) in run_ranks(2, _step, selective, compiled):
        torch.testing.assert_close(gradients, expected)
        assert plain == FORWARD + BACKWARD
        if selective:
            assert ran == plain
        else:  # eager stops recomputing at the last tensor that backward needs
            assert ran[:2] == FORWARD and ran[-2:] == BACKWARD and ran[2:-2] in (["dispatch"], FORWARD)


def _shared_alone(turns):
    """Gradients of the shared expert, where nothing else is trained, beside the dense layer's, twice. (Checkpointing
    ends its second run behind the last tensor that backward needs: within the shared expert, under a dispatch.)"""
    results = []
    with toy.communicator() as comm:
        layer, dense = (kind(comm, 8, shared_intermediate_size=8) for kind in (MoELayer, DenseMoE))
        for name, p in (*layer.named_parameters(), *dense.named_parameters()):
            p.requires_grad_(name.startswith("shared."))
        rank = torch.distributed.get_rank()
        x = toy.inputs(6 - rank, seed=rank)[0]

        def run(x):
            return torch.cat(interleave(layer.steps(x[:2], 0), layer.steps(x[2:], 1))) if turns else layer(x)

        for _ in range(2):
            layer.zero_grad(), dense.zero_grad()
            checkpoint(run, x, use_reentrant=False).sin().sum().backward()
            dense(x).sin().sum().backward()
            results.append([[p.grad for p in kind.shared.parameters()] for kind in (layer, dense)])
    return results


@pytest.mark.parametrize("turns", [False, True])
def test_a_second_run_that_ends_between_start_and_wait(turns):
    for steps in run_ranks(2, _shared_alone, turns):
        for ours, theirs in steps:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _operations(own):
    """Operations of backward, its gradients and the expected ones, where only the ranks ``own`` use selective
    checkpointing. The last operator of the layer is the last that saves tensors."""
    contexts = functools.partial(create_selective_checkpoint_contexts, SAVE_FOR_CHECKPOINT)
    results, rank = [], torch.distributed.get_rank()
    with toy.communicator() as comm:
        for how in ({}, {"dynamic": True}, {"rows": "token_major"}, {"shared_intermediate_size": 8}):
            layer, dense = MoELayer(comm, 8, **how), DenseMoE(comm, 8, shared_intermediate_size=8 * (len(results) == 3))
            x = toy.inputs(4 + rank, seed=rank)[0]
            selective = functools.partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)
            xs = [x.clone().requires_grad_() for _ in range(2)]
            out = (selective if rank in own else layer)(xs[0])
            before = comm.backend.operations()
            out.square().sum().backward()
            dense(xs[1]).square().sum().backward()
            results.append((comm.backend.operations() - before, *(x.grad for x in xs)))
    return results


@pytest.mark.parametrize("own", [(0, 1), (0,)], ids=["all ranks", "one rank"])
def test_the_end_of_recomputation_is_no_operation(own):
    for results in run_ranks(2, _operations, own):
        for operations, own_grad, expected in results:
            assert operations == len(BACKWARD)
            torch.testing.assert_close(own_grad, expected)


def _first_dispatch_alone(ctx, op, *args, **kwargs):
    """Save the results of the first dispatch in a region, and run the second one again."""
    if op not in (torch.ops.ep.dispatch.default, torch.ops.ep.dispatch_dynamic.default):
        return CheckpointPolicy.PREFER_RECOMPUTE
    counts = _first_dispatch_alone.counts
    key = ctx.is_recompute
    counts[key] = counts.get(key, 0) + 1
    return CheckpointPolicy.MUST_SAVE if counts[key] == 1 else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(policy):
    return {"use_reentrant": False, "context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}


CHECKPOINTS = {
    "full": {"use_reentrant": False},
    "no early stop": {"use_reentrant": False, "early_stop": False},
    "reentrant": {"use_reentrant": True},
    "selective": _selective(SAVE_FOR_CHECKPOINT),
    "selective, products": _selective([torch.ops.aten.mm.default]),
    "selective, one dispatch": _selective(_first_dispatch_alone),
}


class Noisy(torch.nn.Module):
    """A router that draws from a generator of its own, which checkpointing does not restore."""

    def __init__(self):
        super().__init__()
        self.router, self.generator = Router(toy.EXPERTS, toy.HIDDEN, toy.TOP_K), torch.Generator().manual_seed(1)

    def forward(self, x):
        topk_idx, weights, logits = self.router(x)
        shift = torch.randint(toy.EXPERTS, (x.shape[0], 1), generator=self.generator)
        return (topk_idx + shift.int()) % toy.EXPERTS, weights, logits


MORE = {
    "dynamic": {"dynamic": True}, "split": {"shared_intermediate_size": 8}, "token-major": {"rows": "token_major"},
    "redispatch": {"rows": "token_major", "redispatch": True},
}  # fmt: skip


def _routed_anew(kind, shape):
    """Errors of backward, or gradients and those without checkpointing, for each way to change the router of rank 0,
    or of all ranks."""
    rank, results = torch.distributed.get_rank(), []
    with toy.communicator() as comm:
        more = MORE.get(shape, {})

        def run(change, checkpointed):
            _first_dispatch_alone.counts = {}
            torch.manual_seed(rank)
            router = Router(toy.EXPERTS, toy.HIDDEN, toy.TOP_K, scores="sigmoid", bias=True)
            layer = MoELayer(comm, 8, router=Noisy() if change == "noise" else router, **more)
            x = toy.inputs(12, seed=rank, grad=True)[0]

            def twice(x):
                if shape == "turns":
                    return torch.cat(interleave(layer.steps(x[:4], 0), layer.steps(x[4:], 1)))
                with torch.autograd.graph.save_on_cpu() if shape == "offloaded" else contextlib.nullcontext():
                    x = layer(x)
                return x.sin().relu() if shape == "offloaded" else layer(x.relu())

            out = checkpoint(twice, x, **CHECKPOINTS[kind]) if checkpointed else twice(x)
            if change == "all" or change == "first" and rank == 0:
                router.bias.copy_(torch.tensor([9.0, 0, 0, 0] if rank == 0 else [0, 0, 0, 9.0]))
            out.sin().sum().backward()
            return [x.grad, layer.shared.w_in.grad if layer.shared is not None else None]

        for _ in range(3):  # calls without gradients are remembered from the third one on
            results.append((run("", True), run("", False)))
        for change in ("first", "all", "noise"):
            with pytest.raises((ValueError, RuntimeError)) as raised:
                run(change, True)
            results.append(str(raised.value))
        results.append((run("", True), run("", False)))  # the communicator can be used
    return results


SHAPES = ("plain", "dynamic", "split", "turns", "offloaded", "token-major", "redispatch")


@pytest.mark.parametrize(
    "kind, shape",
    [
        pytest.param(kind, shape, marks=() if (kind, shape) in CHOSEN else pytest.mark.drawn)
        for CHOSEN in (
            {("full", "dynamic"), ("selective", "plain"), ("reentrant", "token-major"), ("full", "offloaded")},
        )
        for kind in CHECKPOINTS
        for shape in SHAPES
        if not (kind == "selective, one dispatch" and shape not in ("plain", "dynamic"))
        if not (kind == "selective" and shape == "offloaded")  # backward reads nothing of the second run
    ],
)
def test_other_experts_than_in_the_forward_pass_are_reported(kind, shape):
    for results in run_ranks(2, _routed_anew, kind, shape):
        *same, first, every, noise, last = results
        for got, expected in (*same, last):
            torch.testing.assert_close(got, expected)
        for text in (first, every, noise):
            assert "topk_idx differs from the expert ids of the forward pass" in text


def test_ids_that_are_overwritten_before_backward_are_reported():
    with toy.communicator() as comm:
        x, topk_idx, weights = toy.inputs(6, grad=True)

        def run(x):
            return toy.layer(comm, x, topk_idx, weights, toy.scales()).sin()

        out = checkpoint(run, x, use_reentrant=False)
        topk_idx.copy_(topk_idx.flip(0))
        with pytest.raises(RuntimeError, match="topk_idx differs"):
            out.sum().backward()
