"""Training: what routers learn, losses with padding, precision of biases and routing weights, modules and transforms of
PyTorch that work or raise."""

from __future__ import annotations

import copy
import io
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import ep_ops
from ep_ops.nn import (
    TORCH,
    MoELayer,
    Router,
    clip_grad_norm_,
    dropped_rows,
    expert_parameters,
    keep_experts_apart,
    load_balancing_loss,
    router_z_loss,
    update_expert_bias_,
)

H, F = 16, 8
SIZES: dict[str, Any] = dict(
    num_experts=5, hidden_size=H, top_k=2, max_tokens_per_rank=12, dtype=torch.float32, device="cpu", timeout=20
)


# ---------------------------------------------------------------------- router


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_router_of_one_expert_for_each_token_learns(scores: str) -> None:
    x = torch.randn(6, H, generator=torch.Generator().manual_seed(0))
    router = Router(5, H, 1, scores=scores, bias=True)
    every = (x @ router.weight.t()).softmax(-1) if scores == "softmax" else (x @ router.weight.t()).sigmoid()
    ids, weights, _ = router(x)
    torch.testing.assert_close(weights, every.gather(1, ids.long()))
    weights.sum().backward()
    assert router.weight.grad is not None and router.weight.grad.abs().max() > 1e-3


@pytest.mark.parametrize(("top_k", "normalize"), [(1, None), (1, True), (1, False), (3, None), (3, True), (3, False)])
def test_normalize(top_k: int, normalize: bool | None) -> None:
    router = Router(5, H, top_k, normalize=normalize)
    total = router(torch.randn(6, H)).topk_weights.sum(-1)
    assert bool((total - 1).abs().max() < 1e-6) == (top_k > 1 if normalize is None else normalize)


@pytest.mark.parametrize("convert", [
    lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16),
    lambda m: m.to("cpu", torch.float16), lambda m: copy.deepcopy(m.bfloat16()), lambda m: m.to("meta").bfloat16(),
], ids=["bfloat16", "half", "double", "to", "to device", "copied", "meta"])  # fmt: skip
def test_the_bias_of_a_router_stays_float32(convert: Callable[[nn.Module], nn.Module]) -> None:
    layer = nn.Sequential(nn.Linear(H, H), Router(5, H, 2, bias=True))
    with torch.no_grad():
        layer[1].bias += torch.tensor([1e-3, 0.3, -0.7, 2.0, 0.501])
    before = layer[1].bias.clone()
    converted: Any = convert(layer)
    assert converted[0].weight.dtype != torch.float32 and converted[1].bias.dtype == torch.float32
    assert converted[1].bias.is_meta or torch.equal(converted[1].bias, before)  # not even rounded once


def test_updates_of_a_bias_are_not_rounded_away() -> None:
    router, counts = Router(4, H, 2, bias=True).bfloat16(), torch.tensor([0, 2, 2, 4])
    for _ in range(600):
        update_expert_bias_(router.bias, counts)
    torch.testing.assert_close(router.bias, torch.tensor([0.6, 0, 0, -0.6]), rtol=1e-4, atol=1e-4)
    state = router.state_dict()
    state["bias"] = state["bias"].bfloat16()
    router.load_state_dict(state, assign=True)
    assert router.bias.dtype == torch.float32 and "bias" in dict(router.named_buffers())
    with pytest.raises(TypeError, match="bias has dtype torch.bfloat16; allowed: torch.float32, torch.float64"):
        update_expert_bias_(state["bias"], counts)


# ---------------------------------------------------------------------- losses


def padded_losses() -> None:
    """Tokens of two ranks without padding, and the same with padding."""
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(rank)
    plain = torch.randn(3 + 2 * rank, 5, generator=draw)
    padded = torch.cat([plain, torch.full((4, 5), float("inf"))])  # padding may hold anything
    ids = padded.topk(2).indices
    ids[len(plain) :] = -1
    ids[0, 1] = -1  # a token with one expert is no padding
    nobody = torch.full((3, 2), -1)
    for loss in (router_z_loss, load_balancing_loss):
        assert loss(torch.randn(3, 4), nobody) == 0, "tokens without experts alone"
    for loss in (router_z_loss, load_balancing_loss):
        one, other = plain.clone().requires_grad_(), padded.clone().requires_grad_()
        expected, got = loss(one, ids[: len(plain)]), loss(other.view(1, -1, 5), ids.view(1, -1, 2))
        torch.testing.assert_close(got, expected)
        expected.backward(), got.backward()
        assert one.grad is not None and other.grad is not None and one.grad.abs().max() > 0
        torch.testing.assert_close(other.grad[: len(plain)], one.grad)
        assert not other.grad[len(plain) :].any()
    torch.testing.assert_close(router_z_loss(plain), router_z_loss(plain, ids[: len(plain)]))
    nothing = router_z_loss(plain, torch.full_like(ids[: len(plain)], -1))
    assert nothing == 0


def test_losses_leave_padding_out() -> None:
    run_ranks(2, padded_losses)


# ---------------------------------------------------------------------- what PyTorch wraps and converts


class Scaled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 4

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 4


def initialized_on_meta() -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    kinds = {"apart": None, "columns": lambda p: Shard(p.dim() - 1)}
    with ep_ops.Communicator(**SIZES) as comm:
        options: dict[str, Any] = dict(shared_intermediate_size=4)
        expected = MoELayer(comm, F, router=Router(5, H, 2, bias=True), **options)
        for placement in kinds.values():
            with torch.device("meta"):
                layer = MoELayer(comm, F, router=Router(5, H, 2, bias=True), **options)
            fully_shard(layer, mesh=mesh, ignored_params=set(expert_parameters(layer)), shard_placement_fn=placement)
            layer.to_empty(device="cpu")
            with torch.no_grad():
                for tensor in (*layer.parameters(), *layer.buffers()):
                    (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(77)
            for module in layer.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            assert isinstance(layer.router.weight, DTensor) and isinstance(layer.shared.w_in, DTensor)
            for (name, own), wanted in zip(layer.named_parameters(), expected.parameters(), strict=True):
                whole, right = (t.full_tensor() if isinstance(t, DTensor) else t for t in (own, wanted))
                assert torch.equal(whole, right), name
            assert not layer.router.bias.any() and not layer.experts.dropped.any()
    router = Router(5, H, 2)
    right = router.weight.detach().clone()
    parametrize.register_parametrization(router, "weight", Scaled())
    with torch.no_grad():
        router.parametrizations.weight.original.fill_(77)
    router.reset_parameters()
    torch.testing.assert_close(router.weight, right)


def test_routers_and_shared_experts_are_initialized_after_fsdp2() -> None:
    run_ranks(2, initialized_on_meta)


def averages_and_scalers() -> list[Any]:
    """Check averages of weights and GradScaler as docs/training.md describes them."""
    rank, found = dist.get_rank(), []
    with ep_ops.Communicator(**SIZES) as comm:
        layer = MoELayer(comm, F)
        average = AveragedModel(layer, avg_fn=get_ema_avg_fn(0.75))
        for _ in range(2):
            average.update_parameters(layer)
            with torch.no_grad():
                for p in layer.parameters():
                    p.add_(1.0)
        for own, p in zip(average.module.parameters(), layer.parameters(), strict=True):
            local, now = (t.to_local() if isinstance(t, DTensor) else t for t in (own.detach(), p.detach()))
            torch.testing.assert_close(local, now - 1.75)
        for infinite in (None, "router.weight", "experts.w_in"):
            layer = MoELayer(comm, F)
            parts = list(layer.router.parameters()), list(layer.experts.parameters())
            optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(layer(torch.randn(9, H)).square().mean()).backward()
            if infinite is not None and rank == 0:  # on one rank alone
                grad = layer.get_parameter(infinite).grad
                (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = float("inf")
            before = [[p.detach().clone() for p in part] for part in parts]
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            moved = [
                any(bool((p.detach() - q).abs().max() > 0) for p, q in zip(part, old, strict=True))
                for part, old in zip(parts, before, strict=True)
            ]
            found.append((moved, scaler.get_scale()))
    return found


def test_averages_of_weights_and_gradient_scaling() -> None:
    first, second = run_ranks(2, averages_and_scalers)
    assert first[0] == second[0] == ([True, True], 4.0)
    assert first[1] == ([False, True], 2.0)  # DDP averages it, so that all ranks have it
    assert first[2] == second[2] == ([True, False], 2.0)  # DTensors are examined on all ranks


def rounded_weights() -> list[Any]:
    whole = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "ep"))
    flat, found = whole._flatten("dp"), []
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    exact = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    with ep_ops.Communicator(whole["ep"], **SIZES | {"dtype": torch.bfloat16}) as comm:
        for policy in (low, exact, None):
            layer, seen = MoELayer(comm, F, dtype=torch.float32), []
            layer.experts.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[2].dtype))
            if policy is None:  # sharded together: the router is inside
                fully_shard(layer, mesh=flat, mp_policy=low, ignored_params=set(expert_parameters(layer)))
                keep_experts_apart(layer, ranks=2)
            else:
                over = dict(mesh=whole["replica"], shard_placement_fn=lambda p: Shard(1))
                fully_shard(layer.experts, mp_policy=policy, **over)
                layer.experts.set_gradient_divide_factor(2)
                layer.experts.set_force_sum_reduction_for_comms(True)
                fully_shard(layer, mesh=flat, mp_policy=low)
            layer.set_force_sum_reduction_for_comms(True)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                for _ in range(2):
                    layer(torch.randn(5, H).bfloat16()).sum().backward()
                    another = fully_shard(nn.Linear(H, H), mesh=flat)  # for which the layer is checked again
            del another
            texts = [str(one.message) for one in warned if "routing weights" in str(one.message)]
            found.append((seen[0], [text.partition("; ")[2] for text in texts]))
    return found


def test_fsdp2_that_rounds_routing_weights_is_warned_of() -> None:
    advice = "pass MixedPrecisionPolicy(cast_forward_inputs=False) to fully_shard of this module"
    expected = [(torch.bfloat16, [advice]), (torch.float32, []), (torch.float32, [])]
    assert run_ranks(2, rounded_weights) == [expected] * 2


def unsupported() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with ep_ops.Communicator(**SIZES) as comm:
        model = nn.Sequential(nn.Linear(H, H), MoELayer(comm, F))
        for given in ((model,), (), (nn.Sequential(model),)):
            with pytest.raises(NotImplementedError, match=r"\(FSDP1\) does not support Experts.*fully_shard"):
                FullyShardedDataParallel(*given, **{} if given else {"module": model})
        experts, others = expert_parameters(model), [*model[0].parameters(), *model[1].router.parameters()]
        for params in (model.parameters(), experts, [{"params": others}, {"params": iter(experts)}]):
            with pytest.raises(NotImplementedError, match="ZeroRedundancyOptimizer does not support DTensors"):
                ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
        before = others[0].detach().clone()
        optimizer = ZeroRedundancyOptimizer(iter(others), torch.optim.SGD, lr=0.1)
        model(torch.randn(3, H)).sum().backward()
        optimizer.step()
        assert not torch.equal(others[0], before)
        with pytest.raises(RuntimeError, match="accelerator"):  # a model without experts gets as far as before
            FullyShardedDataParallel(nn.Linear(H, H))


@pytest.mark.skipif(torch.cuda.is_available(), reason="FSDP1 would run")
def test_fsdp1_and_zero() -> None:
    run_ranks(2, unsupported)


def shared(fsdp: bool) -> None:
    """Another process sees what this one writes to its experts, and reverse; the layer computes as before."""
    rank = dist.get_rank()
    with (
        ep_ops.Communicator(**SIZES) as comm,
        ep_ops.Communicator(**SIZES | dict(hidden_size=128, dtype=torch.bfloat16)) as coded,
        torch.random.fork_rng(),
    ):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(H, H), MoELayer(comm, F, seed=1))
        codes = nn.Sequential(MoELayer(coded, 128, dtype=torch.float8_e4m3fn))
        if fsdp:
            fully_shard(model, ignored_params=set(expert_parameters(model)))
            keep_experts_apart(model, comm.world_size)
        x = torch.randn(12, H)
        wanted = model(x).detach()
        if not fsdp:  # layers that are loaded in a process which has created none
            del DTensor.share_memory_
            torch.save((model, codes), file := io.BytesIO())
            file.seek(0)
            model, codes = torch.load(file, weights_only=False)
        for _ in range(2):
            assert model.share_memory() is model and codes.share_memory() is codes
        parts = [p.to_local() if isinstance(p, DTensor) else p for m in (model, codes) for p in m.parameters()]
        assert all(part.is_shared() for part in parts)
        assert torch.equal(model(x), wanted)
        child = os.fork()
        if not child:
            try:
                for part in parts:
                    part.detach().view(torch.uint8).fill_(rank + 3)
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for part in parts:
            assert bool((part.detach().view(torch.uint8) == rank + 3).all())
        dist.barrier()


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.drawn)])
def test_share_memory(ranks: int, fsdp: bool) -> None:
    """Parameters of all ranks' experts can be moved to shared memory. The last one of four ranks holds no experts."""
    run_ranks(ranks, shared, fsdp)


# ---------------------------------------------------------------------- transforms and batched gradients


def transformed() -> None:
    """On both ranks, and on one alone."""
    ids = torch.arange(2, dtype=torch.int32).expand(3, 2).contiguous()
    with ep_ops.Communicator(**SIZES) as comm:
        layers: list[Any] = [MoELayer(comm, F), MoELayer(comm, F, shared_intermediate_size=4)]

        def op(x: Tensor) -> Tensor:
            sent = comm.dispatch(x, ids)
            return comm.combine(sent.x, sent.route)

        x = torch.randn(3, H)
        several = torch.randn(2, 3, H)
        calls: list[Callable[[Any], Any]] = [
            lambda f: torch.vmap(f)(several),
            lambda f: torch.func.grad(lambda x: f(x).sum())(x),
            lambda f: torch.func.jacrev(f)(x),
            lambda f: torch.func.jvp(f, (x,), (x,)),
            lambda f: torch.func.hessian(lambda x: f(x).sum())(x),
        ]
        for f in (op, *layers):
            for call in calls:
                for everywhere in (True, False):
                    if everywhere or comm.rank == 0:
                        with pytest.raises(NotImplementedError, match="does not support"):
                            call(f)
                    else:
                        with pytest.raises(ValueError, match="rejected by rank 0: .*does not support"):
                            f(x)
                    assert f(x).isfinite().all()  # the communicator can be used
        with pytest.raises(NotImplementedError, match="Experts does not support the transforms of torch.func"):
            parameters = dict(layers[0].named_parameters())
            torch.func.grad(lambda p: torch.func.functional_call(layers[0], p, (x,)).sum())(parameters)
        with pytest.raises(NotImplementedError, match="ep::plan does not support torch.vmap"):
            torch.vmap(lambda i: comm.plan(i)[0].topk_idx)(torch.stack([ids, ids]))


def test_transforms_of_torch_func() -> None:
    run_ranks(2, transformed)


def batched() -> None:
    """torch.autograd.grad(is_grads_batched=True), on both ranks and on one alone."""
    ids = torch.arange(2, dtype=torch.int32).expand(6, 2).contiguous()
    with ep_ops.Communicator(**SIZES, symmetric_rows=96) as comm:
        late = MoELayer(comm, F, gemms=TORCH._replace(late=True))
        layers = [
            MoELayer(comm, F),
            MoELayer(comm, F, dynamic=True),
            MoELayer(comm, F, shared_intermediate_size=4),
            late,
            MoELayer(comm, F, rows="token_major", redispatch=True),
        ]

        def there_and_back(x: Tensor, weights: Tensor | None) -> Tensor:
            sent = comm.dispatch(x, ids, weights)
            return comm.combine(sent.x, sent.route, sent.weights)

        def gathered(x: Tensor) -> Tensor:
            sent = comm.dispatch(x, ids)
            return comm.combine_gathered(sent.x, sent.route)

        def split(x: Tensor) -> Tensor:
            sent = comm.dispatch_wait(comm.dispatch_start(x, ids))
            return comm.combine_wait(comm.combine_start(sent.x, sent.route))

        weights, x = torch.rand(6, 2), torch.randn(6, H, requires_grad=True)
        functions: list[Callable[[Tensor], Tensor]] = [
            lambda x: there_and_back(x, None), lambda x: there_and_back(x, weights), lambda x: comm.dispatch(x, ids).x,
            gathered, split, *layers,
        ]  # fmt: skip
        for f in functions:
            right = torch.autograd.grad(f(x).sum(), x)[0]
            for everywhere in (True, False):
                out = f(x)
                several = torch.randn(3, *out.shape)
                if everywhere or comm.rank == 0:
                    with pytest.raises(NotImplementedError, match="batched gradients .*; allowed: one backward"):
                        torch.autograd.grad(out, x, several, is_grads_batched=True)
                else:
                    with pytest.raises(ValueError, match="rejected by rank 0: .*batched gradients"):
                        torch.autograd.grad(out, x, several[0])
                torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x)[0], right)
        with pytest.raises(NotImplementedError, match="batched gradients"):
            torch.autograd.functional.jacobian(layers[0], x.detach(), vectorize=True)


def test_batched_gradients() -> None:
    run_ranks(2, batched)


def counted_drops() -> list[int]:
    rank = dist.get_rank()
    with ep_ops.Communicator(**SIZES | {"max_tokens_per_rank": 40}) as comm:
        model = nn.Sequential(MoELayer(comm, F, capacity=64), MoELayer(comm, F), MoELayer(comm, F, capacity=48))
        before = int(dropped_rows(model))
        model(torch.randn(30 + 10 * rank, H))
        own = sum(int(layer.experts.dropped.sum()) for layer in model)
        alone = dist.new_group([rank], use_local_synchronization=True)
        return [before, own, int(dropped_rows(model)), int(dropped_rows(model, alone))]


def test_dropped_rows() -> None:
    first, second = run_ranks(2, counted_drops)
    assert first[0] == second[0] == 0 and first[2] == second[2] == first[1] + second[1] > 0
    assert (first[3], second[3]) == (first[1], second[1])


def test_a_gradient_norm_of_parameters() -> None:
    models = [nn.Linear(4, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model(torch.ones(3, 4)).square().sum().backward()
    norms = [clip_grad_norm_(models[0], 0.5), clip_grad_norm_(models[1].parameters(), 0.5)]
    torch.testing.assert_close(norms[0], norms[1])
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
