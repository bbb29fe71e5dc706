"""Activation checkpointing: right in full, and with SAVE_FOR_CHECKPOINT nothing is sent twice."""

from __future__ import annotations

import functools

import pytest
import torch
import toy
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ep_ops.nn import DenseMoE, MoELayer, interleave
from ep_ops.operators import OPERATORS, SAVE_FOR_CHECKPOINT

FORWARD, BACKWARD = ["dispatch", "combine"], ["combine_backward", "dispatch_backward"]


def test_every_operator_that_gradients_flow_through_is_listed():
    others = {op.name for op in OPERATORS} - {op._opname for op in SAVE_FOR_CHECKPOINT}
    assert others == {*BACKWARD} | {f"{name}_{part}" for name in BACKWARD for part in ("start", "wait")}


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
