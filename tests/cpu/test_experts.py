"""Experts as DTensors against the dense model: FSDP2, optimizers, compiled blocks, ranks without experts, losses."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard

import ep_ops
from ep_ops.nn import (
    DenseMoE,
    Experts,
    MoELayer,
    Router,
    clip_grad_norm_,
    keep_experts_apart,
    load_balancing_loss,
    router_z_loss,
    update_expert_bias_,
)

H, F = 16, 8
SIZES: dict[str, Any] = dict(num_experts=5, hidden_size=H, top_k=2, max_tokens_per_rank=12, device="cpu")


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tokens(rank: int) -> Tensor:
    """Other numbers on every rank: 7, 10, 0, 4."""
    return torch.randn((7, 10, 0, 4)[rank], H, generator=torch.Generator().manual_seed(rank))


def mean_over_ranks(model: nn.Module) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def compare(got: nn.Module, expected: nn.Module) -> None:
    values = {name: full(p.detach()) for name, p in got.named_parameters()}
    for name, p in expected.named_parameters():
        torch.testing.assert_close(values[name], p.detach(), msg=lambda text, name=name: f"{name}: {text}")


def steps_of_adamw(layer: nn.Module, groups: Any, how: dict[str, bool], finish: Any = None) -> None:
    """Two steps beside the dense model; the norm of gradients is compared as well."""
    dense = DenseMoE(layer.comm, F)
    ours, theirs = torch.optim.AdamW(groups, lr=0.1, **how), torch.optim.AdamW(dense.parameters(), lr=0.1)
    x = tokens(dist.get_rank())
    for _ in range(2):
        for model, optimizer in ((layer, ours), (dense, theirs)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
        mean_over_ranks(dense)
        if finish is not None:
            finish(layer)
        norm = clip_grad_norm_(layer, 0.5)
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.5))
        ours.step(), theirs.step()
    compare(layer, dense)


def without_experts_on_one_rank() -> None:
    """Five experts on four ranks: 2, 2, 1, 0."""
    with ep_ops.Communicator(**SIZES, dtype=torch.float32) as comm:
        assert comm.experts_per_rank == (2, 2, 1, 0) and comm.expert_mesh().mesh_dim_names == ("ep",)

        def averaged(layer: MoELayer) -> None:
            mean_over_ranks(layer.router)
            for p in layer.experts.parameters():
                assert isinstance(p.grad, DTensor)
                p.grad /= comm.world_size
            torch_norm = torch.nn.utils.clip_grad_norm_(layer.experts.parameters(), 1e9)  # all on one mesh
            torch.testing.assert_close(torch_norm.full_tensor(), clip_grad_norm_(layer.experts, 1e9))

        for how in ({"foreach": True}, {"fused": True}):  # the router is a plain tensor, in a group of its own
            layer = MoELayer(comm, F)
            groups = [{"params": list(layer.router.parameters())}, {"params": list(layer.experts.parameters())}]
            steps_of_adamw(layer, groups, how, averaged)
        mesh = init_device_mesh("cpu", (comm.world_size,))
        layer = keep_experts_apart(MoELayer(comm, F), comm.world_size)  # the router is a DTensor of FSDP2
        fully_shard(layer, mesh=mesh, ignored_params=set(layer.experts.parameters()))
        steps_of_adamw(layer, layer.parameters(), {"fused": True})

        with torch.device("meta"):
            layer = MoELayer(comm, F, shared_intermediate_size=4)
        layer.to_empty(device="cpu")
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        compare(layer, DenseMoE(comm, F, shared_intermediate_size=4))
        assert not layer.experts.dropped.any()
        misuse(comm)
        losses(comm)
    with ep_ops.Communicator(**SIZES, dtype=torch.float32, experts_per_rank=[2, 1, 1, 1]) as other:
        with pytest.raises(ValueError, match=r"is \(2, 1, 1, 1\); Experts takes the default, \(2, 2, 1, 0\)"):
            Experts(other, F)


def misuse(comm: ep_ops.Communicator) -> None:
    experts, ids, weights = Experts(comm, F), torch.tensor([[0, 1]] * 3, dtype=torch.int32), torch.ones(3, 2)
    x = DTensor.from_local(torch.randn(3, H), comm.expert_mesh(), [Replicate()])
    with pytest.raises(TypeError, match=r"x is a DTensor; allowed: this rank's tensor, x.to_local\(\)"):
        experts(x, ids, weights)
    with pytest.raises(TypeError, match=r"topk_idx is a DTensor; .* topk_idx.to_local\(\)"):
        experts(x.to_local(), DTensor.from_local(ids, comm.expert_mesh(), [Replicate()]), weights)
    assert experts(x.to_local(), ids, weights).shape == (3, H)  # and all goes on


def losses(comm: ep_ops.Communicator) -> None:
    """Values and gradients of one process with the tokens of all ranks, of which one has none."""
    layer = MoELayer(comm, F, capacity=16, router=Router(5, H, 2, bias=True))
    x = tokens(comm.rank)
    _, routing = layer(x, return_routing=True)
    (load_balancing_loss(routing.logits, routing.topk_idx) + 0.1 * router_z_loss(routing.logits)).backward()
    everything = torch.cat([tokens(rank) for rank in range(comm.world_size)])
    weight = layer.router.weight.detach().clone().requires_grad_()
    logits = everything @ weight.t()
    probabilities = logits.softmax(-1)
    chosen = torch.nn.functional.one_hot(probabilities.topk(2).indices, 5).sum((0, 1))
    expected = 5 * (chosen / chosen.sum() * probabilities.mean(0)).sum() + 0.1 * logits.logsumexp(-1).square().mean()
    expected.backward()
    mean_over_ranks(layer.router)
    torch.testing.assert_close(layer.router.weight.grad, weight.grad)
    with torch.no_grad():
        total = load_balancing_loss(routing.logits, routing.topk_idx) + 0.1 * router_z_loss(routing.logits)
        torch.testing.assert_close(total, expected)
        update_expert_bias_(layer.router.bias, routing.counts, rate=0.5)
    assert torch.equal(layer.router.bias, 0.5 * torch.sign(chosen.float().mean() - chosen))
    dropped = routing.dropped.sum().clone()
    dist.all_reduce(dropped)
    kept = chosen.sum() - dropped
    assert 0 < dropped and 0 < kept and torch.equal(routing.dropped, layer.experts.dropped)


def test_five_experts_on_four_ranks() -> None:
    run_ranks(4, without_experts_on_one_rank)


def exported() -> None:
    """Export keeps the parameters as DTensors, and all ranks can run the program."""
    with ep_ops.Communicator(**SIZES, dtype=torch.float32) as comm:
        x = torch.randn(3, H)
        given = x, torch.rand(3, 5).topk(2).indices, torch.rand(3, 2)
        for strict in (True, False):
            experts = Experts(comm, F)
            program = torch.export.export(experts, given, strict=strict)
            assert all(isinstance(program.state_dict[name], DTensor) for name in ("w_in", "w_out"))
            with torch.no_grad():
                torch.testing.assert_close(program.module()(*given), experts(*given))


def test_export() -> None:
    run_ranks(2, exported)


class Block(nn.Module):
    def __init__(self, moe: MoELayer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.moe = nn.Linear(H, H), nn.RMSNorm(H), moe

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(self.first(x)))


def replicas() -> None:
    """Two replicas of two expert-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "ep"))
    flat = mesh._flatten("dp")
    with ep_ops.Communicator(mesh["ep"], **SIZES, dtype=torch.float32) as comm:
        layer = MoELayer(comm, F)
        fully_shard(layer.experts, mesh=mesh["replica"], shard_placement_fn=lambda p: Shard(1))
        layer.experts.set_gradient_divide_factor(4)
        fully_shard(layer, mesh=flat)
        for module in (layer, layer.experts):
            module.set_force_sum_reduction_for_comms(True)
        layer.experts.reset_parameters()  # of sharded experts
        steps_of_adamw(layer, layer.parameters(), {"foreach": True})  # two meshes in one group


def compiled_block(backend: str) -> None:
    """A whole block under FSDP2 with mixed precision, its experts sharded over replicas of two ranks."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replica", "ep"))
    flat = mesh._flatten("dp")
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with ep_ops.Communicator(mesh["ep"], **SIZES, dtype=torch.bfloat16) as comm:
        replica = FSDPMeshInfo(mesh=mesh["replica"], shard_mesh_dim=0)
        x, results = tokens(comm.rank).bfloat16(), []
        compiled = Block(MoELayer(comm, F, dtype=torch.float32))
        for block in (compiled, copy.deepcopy(compiled)):
            spread = {id(p) for p in block.moe.experts.parameters()}
            run = torch.compile(block, fullgraph=True, backend=backend) if block is compiled else block
            over = ShardPlacementResult(Shard(1), replica)
            placement = lambda p, own=spread, over=over: over if id(p) in own else None  # noqa: E731
            fully_shard(run, mesh=flat, mp_policy=mixed, shard_placement_fn=placement)
            run.set_gradient_divide_factor(ranks)
            run.set_force_sum_reduction_for_comms(True)
            out = run(x)
            out.float().square().mean().backward()
            assert out.dtype == torch.bfloat16 and block.moe.experts.w_in.grad.dtype == torch.float32
            torch.optim.AdamW(block.parameters(), lr=0.1).step()
            results.append([out.float(), *(full(p.detach()) for p in block.parameters())])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def test_fsdp_of_experts_over_replicas() -> None:
    run_ranks(4, replicas)


LONG = pytest.mark.skipif(
    os.environ.get("EP_OPS_ALL_CHECKS") != "1", reason="Inductor compiles for a minute: EP_OPS_ALL_CHECKS=1 runs it"
)


@pytest.mark.parametrize(("ranks", "backend"), [(4, "aot_eager"), pytest.param(2, "inductor", marks=LONG)])
def test_compiled_block_under_fsdp(ranks: int, backend: str) -> None:
    run_ranks(ranks, compiled_block, backend)
