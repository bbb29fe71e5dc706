"""The scripts in examples/: as users start them, and what they compute, beside a dense layer on fresh data."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import ep_ops
from ep_ops.nn import DenseMoE, MoELayer

ROOT = Path(ep_ops.__file__).parent.parent
SIZES: dict[str, Any] = {"num_experts": 6, "hidden_size": 16, "top_k": 3, "max_tokens_per_rank": 24, "device": "cpu"}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(name: str) -> str:
    """By the example's ``main`` on a rank that has its process group already."""
    out = io.StringIO()
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        contextlib.redirect_stdout(out),
    ):
        example(name).main()
    return out.getvalue()


LONG = pytest.mark.skipif(
    os.environ.get("EP_OPS_ALL_CHECKS") != "1", reason="trains for two minutes: EP_OPS_ALL_CHECKS=1 runs it"
)


@LONG
@pytest.mark.parametrize("name", ["train", "trainer"])
def test_train_under_torchrun(name: str) -> None:
    """The loss of a layer whose experts, router or gradients are off does not fall by half."""
    if name == "trainer":
        pytest.importorskip("accelerate", reason="needs accelerate, which Trainer uses")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", f"examples/{name}.py"],
        capture_output=True, text=True, timeout=200, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, last_line = done.stdout.splitlines()  # Trainer prints others
    found = re.fullmatch(r"2 ranks, \d+ steps: loss ([\d.]+) -> ([\d.]+)", last_line)
    assert found, done.stdout
    first, last = map(float, found.groups())
    assert last < first / 2


def test_the_others_run() -> None:
    for rank, text in enumerate(run_ranks(2, printed, "decode")):
        assert re.fullmatch(rf"rank {rank} of 2: \d+ steps, eager, differ by \S+ from eager ones\n", text), text
    for name in ("padded", "port_all_to_all", "token_major"):
        for rank, text in enumerate(run_ranks(2, printed, name)):
            found = re.fullmatch(rf"rank {rank} of 2: results and gradients differ by (\S+)\n", text)
            assert found and float(found[1]) < 1e-5, text


def test_bits_do_not_depend_on_batch_or_mode() -> None:
    for rank, text in enumerate(run_ranks(2, printed, "reproducible")):
        assert text == f"rank {rank} of 2: the same bits in 6 modes, (1, 7, 64, 256) tokens\n"


def pipelined() -> list[tuple[float | None, float, list[torch.Tensor], list[torch.Tensor]]]:
    return [pipelined_by(kind) for kind in ("gpipe", "1f1b", "interleaved")]


def pipelined_by(kind: str) -> tuple[float | None, float, list[torch.Tensor], list[torch.Tensor]]:
    """Loss and router gradients of this rank's blocks in a pipeline, and of a dense model on the same batch."""
    module = example("pipeline")
    mine = torch.randn(2, 96, 32, generator=torch.Generator().manual_seed(dist.get_rank() % 2))
    blocks, loss = module.pipelined_loss(kind, *mine)
    gradients = []
    for block in blocks:
        (router,) = (p for name, p in block.named_parameters() if "router" in name)
        assert router.grad is not None
        gradients.append(router.grad)
    count = 2 * len(blocks)
    sizes = type("Sizes", (), {"top_k": 2, "num_experts": 6, "hidden_size": 32, "dtype": torch.float32})
    dense = [module.Block(DenseMoE(sizes, 64, seed=number)) for number in range(count)]
    out = mine[0]
    for block in dense:
        out = block(out)
    expected = module.loss_of(out, mine[1])
    expected.backward()
    numbers = [dist.get_rank() // 2 + 2 * i for i in range(len(blocks))]
    return loss, float(expected.detach()), gradients, [dense[number].moe.router.weight.grad for number in numbers]


def test_pipelines_are_right() -> None:
    for rank, found in enumerate(run_ranks(4, pipelined)):
        for loss, dense, gradients, expected in found:
            assert (loss is None) == (rank < 2)
            if loss is not None:
                torch.testing.assert_close(loss, dense)
            torch.testing.assert_close(gradients, expected)


def test_replicas_balance_a_skewed_load() -> None:
    for rank, text in enumerate(run_ranks(2, printed, "balance")):
        numbers = r"had (\S+) times the mean, now (\S+); (\d+) of 20 experts moved, (\d+) bytes to other ranks; results"
        found = re.fullmatch(rf"rank {rank} of 2: the busiest rank {numbers} differ by (\S+)\n", text)
        assert found, text
        before, after, moved, crossed, error = map(float, found.groups())
        assert before > 1.15 > 1.06 > after and 0 < crossed <= moved * 64 * 64 * 4 and error < 1e-5


def decoded() -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Results of decode steps, of a dense layer, and the time of reading the weights of this rank's named experts at
    1 TB/s, by the example and by hand."""
    module = example("decode")
    gpu = SimpleNamespace(memory_clock_rate=10**6, memory_bus_width=4000)
    with torch.no_grad(), ep_ops.Communicator(**SIZES, dtype=torch.float32) as comm:
        layer, dense = MoELayer(comm, 8, seed=5), DenseMoE(comm, 8, seed=5)
        first = expected = torch.randn(3 + comm.rank, 16, generator=torch.Generator().manual_seed(comm.rank))
        for _ in range(3):
            expected = expected + dense(expected)
            expected = expected / (expected.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
        all_ids: list[list[int]] = [[] for _ in range(comm.world_size)]
        dist.all_gather_object(all_ids, layer.router(first)[0].flatten().tolist())
        own = range(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
        floor = len({e for ids in all_ids for e in ids if e in own}) * 3 * 16 * 8 * 4 / 1e6
        with mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu):
            return module.decode(layer, first, 3), expected, module.floor_us(layer, first), floor


def test_decode_is_right() -> None:
    for got, expected, floor, by_hand in run_ranks(2, decoded):
        torch.testing.assert_close(got, expected)
        assert floor == pytest.approx(by_hand) and floor > 0


def ported(name: str, ways: tuple[str, ...]) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Results and gradients of both ways, each beside a dense layer's; ranks have different numbers of tokens."""
    module = example(name)
    found = []
    with ep_ops.Communicator(**SIZES, dtype=torch.float64) as comm:
        draw = torch.Generator().manual_seed(7)
        everywhere = torch.randn(6, 16, 16, generator=draw, dtype=torch.float64)
        of_ranks = []
        for rank in range(comm.world_size):
            scores = torch.rand(5 + 4 * rank, 6, generator=draw, dtype=torch.float64)
            of_ranks.append((torch.randn(5 + 4 * rank, 16, generator=draw, dtype=torch.float64), *scores.topk(3)))

        all_w = everywhere.clone().requires_grad_()
        loss, expected = torch.zeros((), dtype=torch.float64), []
        for rank, (x, weights, experts) in enumerate(of_ranks):
            x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
            out = torch.einsum("tk,tkh->th", weights, torch.einsum("th,tkhj->tkj", x, all_w[experts]))
            loss = loss + out.sin().sum()
            if rank == comm.rank:
                expected = [out, x, weights]
        out, *learns = expected
        gradients = torch.autograd.grad(loss, [*learns, all_w])
        mine = slice(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
        dense = [out.detach(), *gradients[:2], gradients[2][mine]]

        x, weights, experts = of_ranks[comm.rank]
        for each in ways:
            way = module.by_hand if each == "by_hand" else functools.partial(getattr(module, each), comm)
            w = everywhere[mine].clone().requires_grad_()
            x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
            out = way(x, experts, weights, w)
            got = [out.detach(), *torch.autograd.grad(out.sin().sum(), (x, weights, w))]
            found.append((got, dense))
    return found


def test_both_ways_of_a_layer_are_right() -> None:
    both = ("port_all_to_all", ("by_hand", "with_ep_ops")), ("token_major", ("token_major", "grouped"))
    for ways in [found for name, two in both for found in run_ranks(2, ported, name, two)]:
        assert len(ways) == 2
        for got, dense in ways:
            torch.testing.assert_close(got, dense)
