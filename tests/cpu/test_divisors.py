"""The divisor of expert gradients: it stays with the module, for ``Experts`` and for users' own modules, and FSDP2 does
not average around modules without one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

import ep_ops
from ep_ops.nn import (
    TORCH,
    ExpertModule,
    Experts,
    MoELayer,
    expert_parameters,
    grouped_mm,
    keep_experts_apart,
    of_rows,
)

H, F, E = 16, 8, 5
SIZES: dict[str, Any] = dict(
    num_experts=E, hidden_size=H, top_k=2, max_tokens_per_rank=16, dtype=torch.float32, device="cpu"
)


class Model(nn.Module):
    def __init__(self, comm: ep_ops.Communicator, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.moe = nn.Linear(H, H), MoELayer(comm, F, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.first(x))


def tokens(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5 + 3 * rank, H, generator=torch.Generator().manual_seed(rank)).to(dtype)


def local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).float()


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    model.zero_grad()
    (model if call is None else call)(tokens(dist.get_rank())).square().sum().backward()
    return [local(p.grad) for p in expert_parameters(model)]


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assigned(model: nn.Module) -> nn.Module:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda m: m,
    "to the same device": lambda m: m.to("cpu"),
    "to another dtype and back": lambda m: m.double().float(),
    "deepcopy": copy.deepcopy,
    "torch.save": pickled,
    "assign": assigned,
    "twice": lambda m: keep_experts_apart(keep_experts_apart(m, 8), 4),
    "once for the layer": lambda m: keep_experts_apart(keep_experts_apart(m.moe, 4) and m, 4),
    "moved, twice": lambda m: keep_experts_apart(m.to("cpu"), 4),
}


def changed() -> None:
    with ep_ops.Communicator(**SIZES) as comm:
        whole = gradients(Model(comm))
        for name, change in CHANGES.items():
            for wrapped in (False, True):
                model = change(keep_experts_apart(Model(comm), 4))
                own = gradients(model, DistributedDataParallel(model) if wrapped else None)
                assert len(own) == len(whole) == 2
                for got, expected in zip(own, whole, strict=True):
                    torch.testing.assert_close(got, expected / 4, msg=lambda text, name=name: f"{name}: {text}")
        model = keep_experts_apart(Model(comm), 4)
        model.moe.experts.bfloat16()
        for got, expected in zip(gradients(model), whole, strict=True):
            torch.testing.assert_close(got, expected / 4, rtol=0.1, atol=0.1 * float(expected.abs().max()))


def test_the_divisor_stays_with_the_module() -> None:
    run_ranks(2, changed)


def ways() -> None:
    """Tied, frozen and late gradients; steps, checkpointing and compilation, each against sums over ranks."""
    with ep_ops.Communicator(**SIZES) as comm:

        def tied(comm: ep_ops.Communicator) -> nn.Module:
            model = nn.Sequential(MoELayer(comm, F), MoELayer(comm, F, seed=1))
            model[1].experts.w_in, model[1].experts.w_out = model[0].experts.w_in, model[0].experts.w_out
            return model

        def late(comm: ep_ops.Communicator) -> nn.Module:
            model = Model(comm)
            model.moe.experts.gemms = TORCH._replace(late=True)
            return model

        def stepped(model: Model) -> Callable[[Tensor], Tensor]:
            def call(x: Tensor) -> Tensor:
                *_, out = model.moe.steps(model.first(x))
                return out

            return call

        shared = lambda comm: Model(comm, shared_intermediate_size=4)  # noqa: E731
        cases: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
            "tied": (tied, lambda m: m),
            "late": (late, lambda m: m),
            "steps": (Model, stepped),
            "late steps": (late, stepped),
            "shared": (shared, lambda m: m),
            "dynamic": (lambda comm: Model(comm, dynamic=True), lambda m: m),
            "reentrant": (Model, lambda m: lambda x: checkpoint(m, x.requires_grad_(), use_reentrant=True)),
            "checkpointed": (Model, lambda m: lambda x: checkpoint(m, x, use_reentrant=False)),
            "compiled": (Model, lambda m: torch.compile(m, fullgraph=True, backend="aot_eager")),
            "compiled, late": (late, lambda m: torch.compile(m, fullgraph=True, backend="aot_eager")),
        }
        for name, (make, how) in cases.items():
            model, plain = keep_experts_apart(make(comm), 4), make(comm)
            assert len(expert_parameters(model)) == 2
            own, whole = gradients(model, how(model)), gradients(plain, how(plain))
            for got, expected in zip(own, whole, strict=True):
                assert float(expected.abs().sum()) > 0 or comm.num_local_experts == 0
                torch.testing.assert_close(got, expected / 4, msg=lambda text, name=name: f"{name}: {text}")


def test_the_divisor_in_all_ways_of_backward() -> None:
    run_ranks(2, ways)


def layers_share_code() -> None:
    with ep_ops.Communicator(**SIZES) as comm, torch._dynamo.config.patch(error_on_recompile=True):
        for layer in (keep_experts_apart(MoELayer(comm, F, seed=seed), 2) for seed in range(3)):
            layer.compile(fullgraph=True, backend="aot_eager")
            layer(tokens(0)).sum().backward()
            assert layer.experts.w_in.grad is not None


def test_no_recompilation_for_each_layer() -> None:
    run_ranks(2, layers_share_code)


def without_experts() -> None:
    """A rank without experts computes gradients of its parameters without the other ranks."""
    with ep_ops.Communicator(**SIZES | {"num_experts": 1, "top_k": 1}) as comm:
        for divisor in (None, 2):
            experts = Experts(comm, F)
            experts.gradient_divisor = divisor
            if comm.rank == 1:  # the gradient of a sum has strides of 0
                total = experts.local_weight("w_in").sum() + experts.local_weight("w_out").sum()
                parameters = list(experts.parameters())
                for p, grad in zip(parameters, torch.autograd.grad(total, parameters, retain_graph=True), strict=True):
                    assert grad.to_local().shape == p.to_local().shape and not grad.to_local().numel()
                    assert grad.to_local().stride() == p.stride() == grad.stride()
                total.backward()


def test_gradients_on_a_rank_without_experts() -> None:
    run_ranks(2, without_experts)


# ---------------------------------------------------------------------- modules of users


class Own(ExpertModule):
    """A router and linear experts with a bias in one module, and a counter for each expert."""

    expert_names = "w", "bias", "seen"

    def __init__(self, comm: ep_ops.Communicator, plain: bool = False) -> None:
        super().__init__()
        self.comm = comm
        draw = torch.Generator().manual_seed(3)
        whole = [torch.randn(comm.num_experts, *shape, generator=draw) for shape in ((H, H), (H,))]
        first, held = comm.first_local_expert, comm.num_local_experts
        w, bias = (t[first : first + held].clone() for t in whole)
        self.router = nn.Linear(H, comm.num_experts, bias=False)
        nn.init.normal_(self.router.weight, generator=draw)
        self.w = nn.Parameter(w if plain else self.from_local(w))
        self.bias = nn.Parameter(bias if plain else self.from_local(bias))
        self.register_buffer("seen", torch.full((held,), float(comm.rank)))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        rows = self.comm.dispatch(x, ids, weights)
        y = grouped_mm(rows.x, self.local_weight("w"), rows.route.offs) + of_rows(self.local_weight("bias"), rows.route)
        return self.comm.combine(y * self.scale, rows.route, rows.weights)


class DenseOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with ep_ops.Communicator(dist.new_group([dist.get_rank()], use_local_synchronization=True), **SIZES) as alone:
            own = Own(alone)
        self.router, self.w, self.bias = own.router, own.w, own.bias

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        scores = torch.zeros(len(x), E).scatter(1, ids, weights)
        return torch.einsum("se,seh->sh", scores, torch.einsum("sh,ehf->sef", x, self.w) + self.bias)


def trained_own(how: str) -> None:
    with ep_ops.Communicator(**SIZES) as comm:
        model, dense = Own(comm, plain=how == "plain"), DenseOwn()
        assert [p.shape for p in model.expert_parameters()] == [model.w.shape, model.bias.shape]
        run: Any = torch.compile(model, backend="aot_eager") if how == "compiled" else model
        keep_experts_apart(run, comm.world_size)
        if how == "fsdp":
            mesh = init_device_mesh("cpu", (comm.world_size,))
            run = fully_shard(model, mesh=mesh, ignored_params=set(expert_parameters(model)))
        else:
            model.to("cpu")
            run = DistributedDataParallel(run)
        run(tokens(comm.rank)).square().mean().backward()
        torch.stack([dense(tokens(r)).square().mean() for r in range(comm.world_size)]).mean().backward()
        held = slice(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
        for name in ("w", "bias"):
            got, expected = local(getattr(model, name).grad), getattr(dense, name).grad
            torch.testing.assert_close(got, expected[held])
        router = model.router.weight.grad
        router = router.full_tensor() if isinstance(router, DTensor) else router
        torch.testing.assert_close(router, dense.router.weight.grad)
        assert model.seen.tolist() == [comm.rank] * comm.num_local_experts  # DDP broadcasts other buffers


@pytest.mark.parametrize("how", ["ddp", "fsdp", "compiled", pytest.param("plain", marks=pytest.mark.drawn)])
def test_own_experts_under_data_parallelism(how: str) -> None:
    run_ranks(2, trained_own, how)


def misused() -> None:
    with ep_ops.Communicator(**SIZES) as comm:
        with pytest.raises(ValueError, match=r"Linear contains no experts.*pipeline stage.*expert_parameters\(stage\)"):
            keep_experts_apart(nn.Linear(2, 2), 2)

        class Bare(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.ones(2, 2))

            def expert_parameters(self) -> list[nn.Parameter]:
                return [self.w]

        with pytest.raises(ValueError, match=r"^1 \(Bare\) has expert_parameters, but nothing divides"):
            keep_experts_apart(nn.Sequential(MoELayer(comm, F), Bare()), 2)
        with pytest.raises(ValueError, match=r"^model \(Bare\) has expert_parameters"):
            keep_experts_apart(Bare(), 2)
        for ranks in (0, -1, 2.0, True, "2", None):
            with pytest.raises(ValueError, match=f"ranks is {ranks!r}; allowed: an int of at least 1"):
                keep_experts_apart(MoELayer(comm, F), ranks)  # type: ignore[arg-type]

        class Around(nn.Module):
            """Names the experts of a module inside, which takes the divisor."""

            def __init__(self) -> None:
                super().__init__()
                self.inner = MoELayer(comm, F)

            def expert_parameters(self) -> list[nn.Parameter]:
                return self.inner.experts.expert_parameters()

        around = keep_experts_apart(Around(), 2)
        assert around.inner.experts.gradient_divisor == 2 and len(expert_parameters(around)) == 2
        own = Own(comm)
        own.expert_names = "w", "b"
        with pytest.raises(ValueError, match="expert_names of Own contains 'b'; allowed: names of its parameters"):
            keep_experts_apart(own, 2)
    with ep_ops.Communicator(**SIZES, experts_per_rank=[1, 4]) as uneven:
        with pytest.raises(ValueError, match=r"experts_per_rank of .* is \(1, 4\); Own takes the default"):
            Own(uneven)


def test_misuse() -> None:
    run_ranks(2, misused)


# ---------------------------------------------------------------------- FSDP2


def guarded() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "ep"))
    flat = mesh._flatten("dp")
    x = tokens(dist.get_rank())

    def sharded(model: Any) -> Any:
        return fully_shard(model, mesh=flat, ignored_params=set(expert_parameters(model)))

    averages = pytest.raises(Exception, match="FSDP2 averages the gradients of parameters around .* over 2 ranks, but")
    with ep_ops.Communicator(mesh["ep"], **SIZES) as comm:
        for make in (Model, MoELayer, Own):
            args = (comm,) if make is not MoELayer else (comm, F)
            model = sharded(make(*args))
            with torch.no_grad():
                model(x)
            with averages:
                model(x)
            keep_experts_apart(model, 2)(x).sum().backward()  # may follow fully_shard
        for fullgraph in (True, False):
            compiled = sharded(Model(comm))
            compiled.moe.compile(fullgraph=fullgraph, backend="aot_eager")
            with averages:
                compiled(x)
        stepping = sharded(Model(comm))
        stepping.unshard()
        with averages:
            list(stepping.moe.steps(x))

        model = Model(comm)  # used before it was sharded
        model(x).sum().backward()
        with averages:
            sharded(model)(x)

        frozen = Model(comm)
        frozen.moe.experts.requires_grad_(False)
        sharded(frozen)(x).sum().backward()
        frozen.moe.experts.requires_grad_()
        with averages:
            frozen(x)

        explicit = Model(comm)
        explicit.moe.experts.gradient_divisor = 1  # sums are wanted
        sharded(explicit)(x).sum().backward()

        sums = Model(comm)
        sharded(sums).set_gradient_divide_factor(1)  # FSDP2 adds up the other gradients as well
        sums.set_force_sum_reduction_for_comms(True)
        sums(x).sum().backward()
        sums.set_gradient_divide_factor(2)  # checked again after a forward pass
        with averages:
            sums(x)

        for factor, divisor in ((2, 2), (4, 1), (2, 4)):  # divided twice
            both = keep_experts_apart(Model(comm), divisor)
            fully_shard(both.moe.experts, mesh=mesh["replica"], shard_placement_fn=lambda p: Shard(1))
            both.moe.experts.set_gradient_divide_factor(factor)
            fully_shard(both, mesh=flat)
            with pytest.raises(
                ValueError, match=rf"are divided by {divisor} \(.* by {factor}, but FSDP2 divides .* by 2"
            ):
                both(x)
        for factor in (1, None):
            both = keep_experts_apart(Model(comm), 2)
            fully_shard(both.moe.experts, mesh=mesh["replica"], shard_placement_fn=lambda p: Shard(1))
            if factor:
                both.moe.experts.set_gradient_divide_factor(factor)
            fully_shard(both, mesh=flat)
            both(x).sum().backward()
            both.moe.experts.set_gradient_divide_factor(2)  # checked again after a forward pass
            with pytest.raises(ValueError, match="are divided by 2 .* by 2, but FSDP2 divides .* by 2"):
                both(x)

        for factor in (None, 2):  # FSDP2 shards the experts, too
            both = Model(comm)
            fully_shard(both.moe.experts, mesh=mesh["replica"], shard_placement_fn=lambda p: Shard(1))
            fully_shard(both, mesh=flat)
            if factor:
                both.moe.experts.set_gradient_divide_factor(factor)
                both(x).sum().backward()
                with pytest.raises(ValueError, match="are divided by 2 "):  # checked again after a forward pass
                    keep_experts_apart(both, 2)(x)
            else:
                with averages:
                    both(x)

        alone = Model(comm)  # nothing else is averaged
        fully_shard(alone.moe.experts, mesh=mesh["replica"], shard_placement_fn=lambda p: Shard(1))
        alone(x).sum().backward()

    with ep_ops.Communicator(mesh["ep"], **SIZES | {"num_experts": 4}) as comm:
        plain = keep_experts_apart(nn.Sequential(nn.Linear(H, H), Own(comm, plain=True)), 2)
        fully_shard(plain, mesh=flat)
        with pytest.raises(ValueError, match="FSDP2 shards w of Own, an ordinary tensor of which each rank holds"):
            plain(x)
    single = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with ep_ops.Communicator(single, **SIZES) as comm:
        whole = Model(comm)  # every rank holds all experts
        fully_shard(whole, mesh=flat)
        whole(x).sum().backward()


def test_fsdp_does_not_average_around_sums() -> None:
    run_ranks(2, guarded)


# ---------------------------------------------------------------------- parametrized experts


class LowRank(nn.Module):
    def __init__(self, experts: Experts, rank: int) -> None:
        super().__init__()
        held, rows, columns = experts.comm.num_local_experts, *experts.w_in.shape[1:]
        draw = torch.Generator().manual_seed(experts.comm.rank)
        self.a = nn.Parameter(experts.from_local(torch.randn(held, rows, rank, generator=draw)))
        self.b = nn.Parameter(experts.from_local(torch.randn(held, rank, columns, generator=draw)))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + torch.bmm(self.a, self.b)


def adapted() -> None:
    with ep_ops.Communicator(**SIZES) as comm:

        def made() -> nn.Module:
            model = Model(comm)
            model.moe.experts.requires_grad_(False)
            register_parametrization(model.moe.experts, "w_in", LowRank(model.moe.experts, 4))
            return model

        plain, apart = made(), keep_experts_apart(made(), 4).to("cpu")
        gradients_of = []
        for model in (plain, apart):
            model(tokens(comm.rank)).square().sum().backward()
            adapter = model.moe.experts.parametrizations.w_in[0]
            gradients_of.append([local(adapter.a.grad), local(adapter.b.grad)])
        for expected, got in zip(*gradients_of, strict=True):
            torch.testing.assert_close(got, expected / 4)


def test_gradients_of_adapters() -> None:
    run_ranks(2, adapted)
