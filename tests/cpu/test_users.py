"""Dtypes and shapes as models have them, autocast, copies of layers and wrong arguments work, or raise clear errors."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ep_ops
from ep_ops.group.exchange import TEXT_BYTES
from ep_ops.group.leaving import store_of
from ep_ops.moe import MoECommunicator, MoECommunicatorConfig
from ep_ops.nn import DenseMoE, MoELayer

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {
    "num_experts": 6, "hidden_size": 16, "top_k": 2, "max_tokens_per_rank": 24, "dtype": torch.float32, "device": "cpu"
}  # fmt: skip


@pytest.fixture
def comm() -> Any:
    with ep_ops.Communicator(**SIZES, strict=False) as made:
        yield made


def routed(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, and what topk returns of a router in bfloat16."""
    x = torch.randn(*shape, 16)
    scores = torch.rand(*shape, 6).bfloat16()
    weights, experts = scores.topk(2, dim=-1)
    return x, experts, weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", ["eager", "compiled", "split", "dynamic", "planned", "gathered"])
def test_what_topk_returns(comm: ep_ops.Communicator, how: str, dtype: torch.dtype) -> None:
    x, experts, weights = routed(3, 5)
    x.requires_grad_()
    weights = weights.to(dtype).requires_grad_()

    def there_and_back(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if how == "split":
            sent = comm.dispatch_wait(comm.dispatch_start(x, experts, weights))
            return comm.combine_wait(comm.combine_start(sent.x, sent.route, sent.weights))
        if how == "planned":
            route, _ = comm.plan(experts)
            rows, row_weights, *_ = comm.dispatch_planned(x, route, weights)
            return comm.combine(rows, route, row_weights)
        if how == "gathered":
            sent = comm.dispatch(x, experts)
            return comm.combine_gathered(sent.x, sent.route)
        sent = comm.dispatch(x, experts, weights, exact=how == "dynamic")
        return comm.combine(sent.x, sent.route, sent.weights, residual=x)

    run = torch.compile(there_and_back, fullgraph=True, backend="aot_eager") if how == "compiled" else there_and_back
    out = run(x, experts, weights)
    scale = (
        2.0 if how == "gathered" else weights.float().sum(-1, keepdim=True) + (how in ("eager", "compiled", "dynamic"))
    )
    assert out.shape == x.shape and out.dtype == torch.float32
    torch.testing.assert_close(out, x * scale)
    out.sum().backward()
    torch.testing.assert_close(x.grad, (scale + torch.zeros_like(x)).detach())
    if how != "gathered":
        assert weights.grad is not None and weights.grad.dtype == dtype
        torch.testing.assert_close(weights.grad.float()[..., 0], x.detach().sum(-1), rtol=2e-2, atol=2e-2)


def test_operators_stay_strict(comm: ep_ops.Communicator) -> None:
    x, experts, weights = routed(4)
    with pytest.raises(TypeError, match="topk_idx has dtype torch.int64"):
        torch.ops.ep.plan(experts, comm.capacity(), 16, 0, 24, 6, 1, comm.name)
    with pytest.raises(TypeError, match="topk_weights has dtype torch.float64"):
        comm.dispatch(x, experts, weights.double())  # narrowing is not done without being asked
    with pytest.raises(TypeError, match="x has dtype torch.bfloat16"):
        comm.dispatch(x.bfloat16(), experts)
    with pytest.raises(TypeError, match="topk_idx has dtype torch.float32"):
        comm.dispatch(x, experts.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_around_a_layer(dtype: torch.dtype, compiled: bool) -> None:
    """The layer's result is that without autocast, up to bfloat16, whatever dtype activations come in."""
    with ep_ops.Communicator(**SIZES | {"dtype": dtype}) as comm:
        layer = MoELayer(comm, 32, shared_intermediate_size=16)
        x = torch.randn(2, 4, 16)
        expected = layer(x.to(dtype)).float()
        run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(x.to(dtype))
            mixed = comm.dispatch(x.half(), torch.tensor([0, 1]).expand(2, 4, 2))
        assert mixed.x.dtype == dtype and out.shape == x.shape
        assert (out.float() - expected).norm() < 0.03 * expected.norm()
        out.float().sum().backward()
        assert layer.router.weight.grad is not None and layer.router.weight.grad.dtype == torch.float32

        # Parameters in float32, as autocast is mostly used.
        wide = MoELayer(comm, 32, shared_intermediate_size=16).float()
        run = torch.compile(wide, fullgraph=True, backend="aot_eager") if compiled else wide
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = run(x.to(dtype))
        assert (out.float() - expected).norm() < 0.03 * expected.norm()
        out.float().sum().backward()
        for own, given in zip(wide.experts.parameters(), layer.experts.parameters(), strict=True):
            assert own.grad is not None and given.grad is not None and own.grad.dtype == torch.float32
            torch.testing.assert_close(own.grad, given.grad.float(), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.drawn)])
def test_parameters_in_float32_without_autocast(compiled: bool) -> None:
    """Experts and shared expert convert their weights to the communicator's dtype in each call."""
    with ep_ops.Communicator(**SIZES | {"dtype": torch.bfloat16}) as comm:
        narrow, wide = (MoELayer(comm, 8, shared_intermediate_size=8, dtype=d) for d in (torch.bfloat16, torch.float32))
        x, found = torch.randn(5, 16, dtype=torch.bfloat16), []
        for layer in (narrow, wide):
            own = x.clone().requires_grad_()
            run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
            out = run(own)
            out.float().square().sum().backward()
            found.append((out, own.grad, [p.grad for p in layer.parameters()]))
        (out, grad, grads), (wide_out, wide_grad, wide_grads) = found
        assert all(p.dtype == g.dtype == torch.float32 for p, g in zip(wide.parameters(), wide_grads, strict=True))
        torch.testing.assert_close((wide_out, wide_grad), (out, grad), rtol=0, atol=0)
        torch.testing.assert_close([g.to(torch.bfloat16) for g in wide_grads], [g.to(torch.bfloat16) for g in grads])


def test_a_layer_in_float64() -> None:
    with ep_ops.Communicator(**SIZES | {"dtype": torch.float64}) as comm:
        layer = MoELayer(comm, 8).double()
        x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(layer, x)


def test_a_layer_passes_max_tokens(comm: ep_ops.Communicator) -> None:
    layer = MoELayer(comm, 8)
    x = torch.randn(3, 16)
    torch.testing.assert_close(layer(x, max_tokens=4), layer(x))
    with pytest.raises(ValueError, match="at most max_tokens = 2|max_tokens"):
        layer(x, max_tokens=2)


# ---------------------------------------------------------------------- copies, and many layers


def test_copies_of_a_layer(comm: ep_ops.Communicator, tmp_path: Any) -> None:
    layer = MoELayer(comm, 8)
    x = torch.randn(3, 16)
    torch.save(layer, tmp_path / "layer.pt")
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(tmp_path / "layer.pt", weights_only=False),
    ]
    for other in (*copies, torch.optim.swa_utils.AveragedModel(layer).module):
        assert other.comm is comm
        torch.testing.assert_close(other(x), layer(x))
    written = pickle.dumps(layer)
    comm.destroy()
    with pytest.raises(RuntimeError, match="was destroyed"):
        pickle.loads(written)


def shared_by_threads() -> list[str]:
    """Return the names of the communicators that four threads got."""
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: ep_ops.Communicator.shared(**SIZES, timeout=20), range(4)))
    names = [comm.name for comm in found]
    found[0].destroy()
    assert all(comm is found[0] for comm in found)
    return names


@pytest.mark.parametrize("ranks", [1, 2])
def test_threads_share_a_communicator(ranks: int) -> None:
    names = run_ranks(ranks, shared_by_threads)
    assert len({name for own in names for name in own}) == 1


def test_shared() -> None:
    first = ep_ops.Communicator.shared(**SIZES, experts_per_rank=[6])
    assert ep_ops.Communicator.shared(**SIZES, experts_per_rank=[6]) is first
    other = ep_ops.Communicator.shared(**SIZES | {"top_k": 1}, experts_per_rank=[6])
    assert other is not first
    first.destroy()
    again = ep_ops.Communicator.shared(**SIZES, experts_per_rank=[6])
    assert again is not first and not again.destroyed
    again.destroy(), other.destroy()


def test_a_configuration_with_more_options() -> None:
    """A Communicator and memory_plan would ignore them."""
    sizes = {name: value for name, value in SIZES.items() if name != "device"}
    config = MoECommunicatorConfig(**sizes, placement=[*range(6), 0])
    for call in (ep_ops.Communicator, ep_ops.Communicator.shared, ep_ops.memory_plan):
        given = {"world_size": 1} if call is ep_ops.memory_plan else {"device": "cpu"}
        with pytest.raises(TypeError, match="config is a MoECommunicatorConfig, whose other options it would ignore"):
            call(config=config, **given)
        made = call(config=config.of_communicator(), **given)
        if call is not ep_ops.memory_plan:
            assert made.num_experts == 7
            made.destroy()


def groups_after_destroy() -> list[bool]:
    """Whether a process group is still alive when a communicator of it was destroyed, which somebody still holds."""
    alive = []
    for make in (ep_ops.Communicator, ep_ops.Communicator.shared):
        group = dist.new_group([0, 1])
        comm = make(group, **SIZES)
        x, idx = torch.zeros(2, SIZES["hidden_size"], dtype=comm.dtype), torch.zeros(2, 2, dtype=torch.int32)
        idx[:, 1] = 1
        comm.dispatch(x, idx)
        comm.destroy()
        dist.destroy_process_group(group)
        held = weakref.ref(group)
        del group
        gc.collect()
        alive.append(held() is not None)
    return alive


def test_no_process_group_outlives_destroy() -> None:
    """No process group outlives destroy; its threads would go on."""
    assert run_ranks(2, groups_after_destroy) == [[False, False]] * 2


def keys_after_destroy() -> list[int]:
    """Count the keys of the store before and after communicators, of which the second is left by an exception."""
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for number in range(4):
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
        x, idx = torch.zeros(2, SIZES["hidden_size"]), torch.tensor([[0, 1]] * 2)
        with contextlib.suppress(KeyError), ep_ops.Communicator(**SIZES) as comm:
            comm.dispatch(x, idx)
            if number == 2:
                raise KeyError(number)
        dist.barrier()
    return counts


def keys_without_destroy() -> tuple[int, int, int]:
    """Rank 0 destroys a communicator alone, after a long text; return keys before, then, and when all have done so."""
    store = dist.distributed_c10d._get_default_store()
    rank, counts = dist.get_rank(), []

    def count() -> None:
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()

    groups = [dist.new_group() for _ in range(2)]  # a communicator that fails closes the connections of its group
    count()
    comm = ep_ops.Communicator(groups[0], **SIZES, timeout=0.5)
    of_it = store_of(comm.group, comm.number)
    dist.barrier()
    if rank == 0:
        x, idx = torch.zeros(2, SIZES["hidden_size"]), torch.tensor([[0, 1]] * 2)
        with pytest.raises(RuntimeError, match="waited 0.5 s for rank 1"):
            comm.dispatch(x, idx)
        comm.destroy()
        assert len(of_it.get("failed")) <= TEXT_BYTES
    count()
    if rank == 1:
        with pytest.raises(RuntimeError, match="waited 0.5 s for rank 1"):
            comm.destroy()
    count()
    with contextlib.suppress(KeyError), ep_ops.Communicator(groups[1], **SIZES) as comm:
        of_it = store_of(comm.group, comm.number)
        if rank == 0:
            raise KeyError("x" * 10**6)
        while not of_it.check(["gone"]):
            time.sleep(0.01)
        assert len(of_it.get("gone")) <= TEXT_BYTES
    count()
    return tuple(counts)


def a_group_that_is_wrong_on_rank_0() -> str:
    """Create a communicator over a group that gets a timeout of 1 s."""
    right = dist.new_group()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), right)
    given: Any = 8 if dist.get_rank() == 0 else right
    with pytest.raises((TypeError, RuntimeError)) as error:
        ep_ops.Communicator(given, **SIZES)
    dist.barrier()
    with ep_ops.Communicator(dist.new_group(), **SIZES):  # what is not affected works
        return f"{type(error.value).__name__}: {error.value}"


def test_a_wrong_group_lets_nobody_wait_for_ever() -> None:
    wrong, right = run_ranks(2, a_group_that_is_wrong_on_rank_0)
    assert wrong.startswith("TypeError: group is 8; allowed: a process group")
    assert right.startswith(("RuntimeError", "DistBackendError")), right


def fsdp2_and_float16() -> tuple[str, list[float]]:
    """Pass a layer with its experts to FSDP2; then combine rows whose sum on rank 0 exceeds float16, the total not."""
    with ep_ops.Communicator(**SIZES) as comm, pytest.raises(TypeError) as error:
        fully_shard(MoELayer(comm, 8), mesh=init_device_mesh("cpu", (2,)))
    with ep_ops.Communicator(**SIZES | {"dtype": torch.float16, "top_k": 6}) as comm:
        sent = comm.dispatch(torch.ones(2, 16, dtype=torch.float16), torch.arange(6).expand(2, 6))
        rows = torch.full_like(sent.x, 3e4 if comm.rank == 0 else -2e4)
        return str(error.value), comm.combine(rows, sent.route)[:, 0].tolist()


def test_what_pages_say_of_fsdp2_and_of_sums_in_float16() -> None:
    """FSDP2's own text is quoted in docs/training.md, the rounding of the sums of one rank in docs/domains.md."""
    for text, sums in run_ranks(2, fsdp2_and_float16):
        assert f"TypeError: {text}" in (ROOT / "docs/training.md").read_text()
        assert sums == [float("inf")] * 2


def test_communicators_leave_no_keys_in_the_store() -> None:
    for counts in run_ranks(2, keys_after_destroy):
        assert len(set(counts)) == 1, counts


def test_keys_of_a_communicator_that_a_rank_does_not_destroy() -> None:
    """The keys stay for a late rank, few and small, until it ends the communicator too."""
    for before, alone, *after in run_ranks(2, keys_without_destroy):
        assert before < alone <= before + 3 * 2 + 3
        assert after == [before] * 2


def unequal_pasts() -> tuple[bool, list[str]]:
    """Rank 0 has created communicators without rank 1, one of which has a name like default ones."""
    highest = -1
    if dist.get_rank() == 0:
        group = dist.new_group([0], use_local_synchronization=True)
        alone = [ep_ops.Communicator(group, **SIZES, name=name) for name in ("", f"ep{10**6}", "ep7th")]
        highest = 10**6
        alone[0].destroy()
    with ep_ops.Communicator(**SIZES, name=None) as comm, ep_ops.Communicator(**SIZES) as other:
        return int(comm.name[2:]) > highest, [comm.name, other.name]


def test_default_names_are_agreed_on() -> None:
    (free, names), (free_1, names_1) = run_ranks(2, unequal_pasts)
    assert free and free_1 and names == names_1 and len(set(names)) == 2


# ---------------------------------------------------------------------- defaults of torch


def under_a_default_device() -> float:
    """A model is often made on the meta device, and its communicator with it."""
    with torch.device("meta"):
        comm = ep_ops.Communicator(**SIZES)
        layer = MoELayer(comm, 8, shared_intermediate_size=8)
        assert all(p.is_meta for p in layer.parameters())
        x = torch.randn(3, 16, requires_grad=True)
        layer(x).sum().backward()  # shapes alone
        assert x.grad is not None and x.grad.is_meta
    with comm:
        made, dense = (kind(comm, 8, shared_intermediate_size=8) for kind in (MoELayer, DenseMoE))
        layer = layer.to_empty(device="cpu")
        layer.load_state_dict(made.state_dict())
        x = torch.randn(3, 16)
        with torch.device("meta"):
            out = layer(x)
        return float((out - dense(x)).abs().max())


def test_default_devices() -> None:
    assert max(run_ranks(2, under_a_default_device)) < 1e-5


def test_statistics_under_a_default_device() -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "device"}
    config = MoECommunicatorConfig(**sizes, statistics=True, placement=[0, 1, 2, 3, 4, 5, 0])
    with torch.device("meta"), MoECommunicator(config, device="cpu") as moe:
        sent, handle = moe.dispatch(torch.ones(2, 16, device="cpu"), torch.tensor([[1, 2], [1, 4]], device="cpu"))
        moe.combine(sent.x, handle)
        assert moe.comm.statistics().rows.tolist() == [0, 2, 1, 0, 1, 0, 0]
        moe.place([5, 4, 3, 2, 1, 0, 0])
        assert moe.load().tolist() == [0, 2, 1, 0, 1, 0] and moe.comm.statistics().received.device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_initial_weights_do_not_depend_on_the_default_dtype(comm: ep_ops.Communicator, dtype: torch.dtype) -> None:
    expected = MoELayer(comm, 8, shared_intermediate_size=8)
    torch.set_default_dtype(dtype)
    try:
        made = MoELayer(comm, 8, shared_intermediate_size=8)
    finally:
        torch.set_default_dtype(torch.float32)
    for own, wanted in zip(made.parameters(), expected.parameters(), strict=True):
        assert own.dtype == torch.float32 and torch.equal(own, wanted)


# ---------------------------------------------------------------------- arguments that are off


def test_tangents_are_rejected(comm: ep_ops.Communicator) -> None:
    x, experts, _ = routed(4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(NotImplementedError, match="forward-mode"):
                comm.dispatch(dual, experts)
        comm.dispatch(x, experts)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: comm.dispatch(x, experts).x, (x,), (torch.ones_like(x),))
    compiled = torch.compile(lambda x: torch.func.jvp(lambda x: comm.dispatch(x, experts).x, (x,), (x,))[1])
    with pytest.raises(NotImplementedError, match="ep::dispatch does not support forward-mode"):
        compiled(x)


def test_gradient_transforms_are_rejected(comm: ep_ops.Communicator) -> None:
    x, experts, _ = routed(4)
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.hessian):
        with pytest.raises(NotImplementedError, match="ep::dispatch does not support the transforms"):
            transform(lambda x: comm.dispatch(x, experts).x.sum())(x)
    own = torch.func.grad(lambda w: (comm.combine(*comm.dispatch(x, experts)[::2]) * w).sum())(torch.ones(16))
    torch.testing.assert_close(own, 2 * x.sum(0))  # what is no operator's input may be differentiated


def test_not_initialized_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(RuntimeWarning, match="this process alone.*init_process_group") as told:
        ep_ops.Communicator(**SIZES).destroy()
    assert [one.filename for one in told] == [__file__]  # it points at the line that is to be mended


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    with pytest.raises(ValueError, match="device is 'cuda', but torch .* sees no GPU"):
        ep_ops.Communicator(**SIZES | {"device": "cuda"})


def test_experts_per_rank_is_a_number() -> None:
    with pytest.raises(ValueError, match="experts_per_rank is 4; allowed: one int >= 0 for each of 1 ranks"):
        ep_ops.Communicator(**SIZES, experts_per_rank=4)


def meshes() -> int:
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    with pytest.raises(ValueError, match=r"DeviceMesh of 2 dimensions \('ep', 'tp'\); .* such as mesh\['ep'\]"):
        ep_ops.Communicator(mesh, **SIZES)
    with ep_ops.Communicator(mesh["ep"], **SIZES) as comm:
        return comm.world_size


def test_meshes() -> None:
    assert run_ranks(2, meshes) == [2, 2]


def shared_on_a_mesh() -> list[Any]:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "experts"))["experts"]
    first = ep_ops.Communicator.shared(mesh.get_group(), **SIZES)
    second, again = (ep_ops.Communicator.shared(mesh, **SIZES) for _ in range(2))
    names = [comm.expert_mesh().mesh_dim_names for comm in (first, second)]
    found = [first is second, second is again, *names]
    first.destroy(), second.destroy()
    return found


def test_shared_communicators_keep_the_mesh_that_was_given() -> None:
    assert run_ranks(2, shared_on_a_mesh) == [[False, True, ("ep",), ("experts",)]] * 2
