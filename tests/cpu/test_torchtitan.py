"""torchtitan's MoE layer and its DeepSeek-V3 with this library's dispatcher, against its own all-to-all dispatcher."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from types import SimpleNamespace
from typing import Any

import fake_torchtitan
import pytest
import torch
import torch.distributed as dist
import toy
from ranks import run_ranks
from torch import Tensor, nn

import ep_ops

MISSING = [name for name in ("torchtitan", "triton") if importlib.util.find_spec(name) is None]
needs_torchtitan = pytest.mark.skipif(bool(MISSING), reason=f"needs torchtitan 0.3 and triton: no {MISSING}")

DIM, EXPERTS, TOP_K, TOKENS = 32, 8, 3, 24
DTYPES = {"swiglu": torch.float32, "gpt_oss": torch.bfloat16}  # GPT-OSS's experts return bfloat16 alone
SIZES: dict[str, Any] = dict(num_experts=EXPERTS, top_k=TOP_K)
FILLED: dict[str, Any] = SIZES | dict(
    hidden_dim=DIM, num_max_tokens_per_rank=TOKENS, dtype="float32", options={"timeout": 60.0}
)


def layer_of(dispatcher: Any, backend: str, experts: str) -> tuple[Any, Any]:
    """torchtitan's MoE layer, its experts spread over all ranks, and the context that it runs in."""
    import spmd_types as spmd
    import torchtitan.distributed.parallel_dims as dims
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
    from torchtitan.models.common import config_utils as make
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    dims.device_type = "cpu"  # torchtitan takes "cuda" where it finds no accelerator
    set_spmd_backend(backend)
    init = {"weight": functools.partial(nn.init.normal_, std=0.3)}
    kind: Any = {"swiglu": GroupedExperts, "gpt_oss": GptOssGroupedExperts}[experts]
    names = {
        "swiglu": ["w1_EFD", "w2_EDF", "w3_EFD"],
        "gpt_oss": ["mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED"],
    }[experts]
    config = make.make_moe_config(
        num_experts=EXPERTS,
        router=make.make_router_config(dim=DIM, gate_param_init=init, score_func="softmax", **SIZES),
        routed_experts=RoutedExperts.Config(
            inner_experts=kind.Config(
                dim=DIM, hidden_dim=48, num_experts=EXPERTS,
                param_init={name: functools.partial(nn.init.normal_, std=0.2) for name in names},
            ),
            token_dispatcher=dispatcher,
        ),
        shared_experts=make.make_ffn_config(dim=DIM, hidden_dim=16, w1_param_init=init, w2w3_param_init=init),
    )  # fmt: skip
    places = {name: spmd.S(1) for name in names}  # of tensor parallelism, which is off
    set_moe_sharding_config(config, enable_ep=True, enable_sp=True, expert_param_layout=places)
    torch.manual_seed(0)
    layer = config.build()
    layer.init_states(buffer_device=torch.device("cpu"))
    layer.to(DTYPES[experts])
    ranks = dist.get_world_size()
    parallel = dims.ParallelDims(
        dp_replicate=1, dp_shard=-1, cp=1, tp=1, pp=1, ep=ranks, world_size=ranks, spmd_backend=backend
    )
    layer.parallelize(parallel)
    return layer, get_spmd_context(parallel_dims=parallel)


def run(layer: Any, context: Any, checkpointing: str, compiled: bool) -> dict[str, Tensor]:
    """Output, and the gradients of x and of all parameters."""
    from torchtitan.distributed.activation_checkpoint import FullAC

    from ep_ops.integrations.torchtitan import SaveDispatch

    model = nn.Module()
    model.layers = nn.ModuleDict({"moe": layer})
    if checkpointing:
        {"selective": SaveDispatch, "full": FullAC}[checkpointing].Config().build().apply(model)
    block = model.layers["moe"]
    if compiled:  # as torchtitan's apply_compile does
        torch._dynamo.config.capture_scalar_outputs = True
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        block.compile(backend="aot_eager", fullgraph=True)
    x, grad = inputs(next(layer.parameters()).dtype)
    with context():
        out = block(x)
        out.backward(grad)
    return {"out": out.detach(), "x": x.grad} | {n: local(p.grad) for n, p in layer.named_parameters()}


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Draw the tokens of this rank, and the gradient of their results."""
    draw = torch.Generator().manual_seed(7 + dist.get_rank())
    x, grad = (torch.randn(2, TOKENS // 2, DIM, generator=draw).to(dtype) for _ in range(2))
    return x.requires_grad_(), grad


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def worst(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest number of the tensor that it is in."""
    assert got.keys() == expected.keys() and all(tensor.isfinite().all() for tensor in got.values())
    return max(float((got[n] - e).abs().max() / e.abs().max().clamp(min=1e-9)) for n, e in expected.items())


def compared(
    backend: str, checkpointing: str, compiled: bool, fields: dict[str, Any], experts: str = "swiglu"
) -> dict[str, Any]:
    """A forward and backward of both dispatchers: how much they differ, and what was seen on the way."""
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from ep_ops.integrations.torchtitan import EpOpsTokenDispatcher

    layer, context = layer_of(EpOpsTokenDispatcher.Config(**FILLED | fields), backend, experts)
    dispatcher = layer.routed_experts.token_dispatcher
    (comm,) = ep_ops.registry.living.values()
    assert comm.config.timeout == 60.0
    with comm:
        with context(), torch.no_grad():
            x, _ = inputs(DTYPES[experts])
            scores, ids, _ = layer.router(x, layer.expert_bias_E)
            x, scores, ids = (local(t).flatten(0, 1) for t in (x, scores, ids))
            rows, counts, sent = dispatcher.dispatch(x, scores, ids, torch.empty(0))
        lost = sent.route.send_rows < 0
        dispatcher.dropped.zero_()
        calls: list[Any] = []
        toy.recorded(comm, calls)
        got = run(layer, context, checkpointing, compiled)

    class WithoutTheLost(AllToAllTokenDispatcher):
        def dispatch(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Any:
            return super().dispatch(x, scores.masked_fill(lost, 0), ids, counts)

    # "spmd_types" exchanges uneven lists of tensors in eager mode, which gloo rejects.
    whole, context = layer_of(AllToAllTokenDispatcher.Config(**SIZES), "partial_dtensor", experts)
    whole.routed_experts.token_dispatcher.__class__ = WithoutTheLost
    difference = worst(got, run(whole, context, "", False))
    lost_of_expert = ids[lost].bincount(minlength=EXPERTS)
    dist.all_reduce(lost_of_expert)
    return {
        "difference": difference, "ran": [name for name, *_ in calls], "dropped": dispatcher.dropped.tolist(),
        "lost": lost_of_expert.view(dist.get_world_size(), -1)[dist.get_rank()].tolist(),
        "rows": rows.shape[0], "counts": counts, "kept": sent.route.counts,
    }  # fmt: skip


WRONG = [
    (dict(non_blocking_capacity_factor=0), 2, r"non_blocking_capacity_factor is 0; allowed: None or in \(0, 1\]"),
    (dict(non_blocking_capacity_factor=1.5), 2, "non_blocking_capacity_factor is 1.5"),
    (dict(dtype=torch.bfloat16), 2, "dtype is torch.bfloat16; allowed: one of 'float16', 'float32', 'bfloat16'"),
    (dict(), None, "ep_mesh is None; .* expert_parallel_degree > 1"),
    (dict(), 3, "num_experts is 8; allowed: a multiple of the EP mesh's size, 3"),
    (dict(hidden_dim=None), 2, "hidden_dim is None; .*update_from_config"),
    (dict(num_max_tokens_per_rank=None), 2, "num_max_tokens_per_rank is None; .*update_from_config"),
]
FORWARD, BACKWARD = ["dispatch", "combine"], ["combine_backward", "dispatch_backward"]
DROPS = dict(non_blocking_capacity_factor=0.3)
WAYS = [
    # SPMD backend, activation checkpointing, compiled, what is run again in backward
    ("spmd_types", "", False, []),
    ("spmd_types", "", True, []),
    ("spmd_types", "selective", False, []),
    ("spmd_types", "selective", True, []),
    ("spmd_types", "full", False, FORWARD),
    ("partial_dtensor", "selective", True, []),
]


@needs_torchtitan
@pytest.mark.parametrize(("ranks", "way", "fields"), [
    *((2, way, DROPS) for way in WAYS), (2, WAYS[0], {}), (2, WAYS[1], dict(pad_multiple=16)),
    (2, WAYS[0], DROPS | dict(pad_multiple=16)), (4, WAYS[0], {}), (4, WAYS[-1], DROPS),
])  # fmt: skip
def test_equal_to_the_all_to_all_dispatcher(ranks: int, way: Any, fields: dict[str, Any]) -> None:
    backend, checkpointing, compiled, again = way
    seen = run_ranks(ranks, compared, backend, checkpointing, compiled, fields)
    align = fields.get("pad_multiple", 1)
    for of_rank in seen:
        assert of_rank["difference"] < 2e-3  # experts compute in bfloat16
        assert of_rank["ran"] == FORWARD + again + BACKWARD
        assert of_rank["dropped"] == of_rank["lost"]
        assert of_rank["counts"].dtype == torch.int32
        assert torch.equal(of_rank["counts"], (of_rank["kept"] + align - 1) // align * align)
        most = ranks * TOKENS * min(TOP_K, EXPERTS // ranks)
        if "non_blocking_capacity_factor" in fields:
            padded = -(-(most + EXPERTS // ranks * (align - 1)) // align) * align
            assert of_rank["rows"] == -(-math.ceil(0.3 * padded) // align) * align
        else:
            assert of_rank["rows"] >= most
    assert any(sum(of_rank["dropped"]) for of_rank in seen) == ("non_blocking_capacity_factor" in fields)


@needs_torchtitan
@pytest.mark.parametrize("way", [WAYS[0], WAYS[-1]])
def test_experts_with_biases(way: Any) -> None:
    """The gradient of a bias does not depend on rows that hold no token."""
    for of_rank in run_ranks(2, compared, *way[:3], dict(dtype="bfloat16"), "gpt_oss"):
        assert of_rank["difference"] < 2e-2, of_rank["difference"]


def deepseek(ranks: int) -> Any:
    """The configuration of a training of torchtitan's small DeepSeek-V3, which ``ranks`` share the experts of."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.deepseek_v3 import model_registry
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    config = deepseek_v3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="varlen")
    del config.model_spec.model.layers[3:]  # of these, all but the first have experts
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # which runs on a CPU
    config.training.local_batch_size, config.training.seq_len = 2, 16
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.expert_parallel_degree = ranks
    return config


def trained(ours: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Logits and gradients of a step, with FSDP2 and selective checkpointing; operators that ran."""
    import torchtitan.distributed.parallel_dims as dims
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed.utils import set_spmd_backend

    from ep_ops.integrations.torchtitan import use_ep_ops

    ranks = dist.get_world_size()
    config = deepseek(ranks)
    if ours:
        use_ep_ops(config, dtype="float32")
    config.model_spec.model.update_from_config(config=config)
    dims.device_type = "cpu"
    set_spmd_backend("partial_dtensor")
    parallel = dims.ParallelDims.from_config(config.parallelism, ranks)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model = config.model_spec.parallelize_fn(
        model, parallel_dims=parallel, training=config.training, parallelism=config.parallelism,
        compile_config=config.compile, ac_config=config.activation_checkpoint, dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # all that gloo has
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        draw = torch.Generator().manual_seed(dist.get_rank())
        for parameter in model.parameters():
            local(parameter).copy_(torch.randn(local(parameter).shape, generator=draw) * 0.05)
    calls: list[Any] = []
    for comm in ep_ops.registry.living.values():  # one, if any: layers share it
        toy.recorded(comm, calls)
    logits = model(torch.randint(0, 2048, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank())))
    logits.float().square().mean().backward()
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()
    found = {"logits": logits.detach()} | {n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return found, [name for name, *_ in calls]


@needs_torchtitan
def test_deepseek() -> None:
    for (ours, ran), (theirs, _) in zip(run_ranks(2, trained, True), run_ranks(2, trained, False), strict=True):
        assert worst(ours, theirs) < 1e-2  # experts compute in bfloat16
        assert ran == FORWARD * 2 + BACKWARD * 2
        assert len(ours) > 30


def clipped_by_torchtitan() -> None:
    """Its gradient norm of a model with ``ep_ops.nn.Experts``, which it knows by the name of their mesh's dimension."""
    from torch.distributed.fsdp import fully_shard
    from torchtitan.distributed.utils import clip_grad_norm_ as clip

    from ep_ops.nn import MoELayer, clip_grad_norm_, keep_experts_apart

    ranks = dist.get_world_size()
    sizes: dict[str, Any] = dict(num_experts=5, hidden_size=16, top_k=2, max_tokens_per_rank=8, dtype=torch.float32)
    with ep_ops.Communicator(**sizes, device="cpu") as comm:
        layer = keep_experts_apart(MoELayer(comm, 8), ranks)
        mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        fully_shard(layer, mesh=mesh, ignored_params=set(layer.experts.parameters()))
        layer(torch.randn(5, 16)).square().sum().backward()
        norm = clip_grad_norm_(layer, 1e9)
        torch.testing.assert_close(clip(layer.parameters(), float(norm) / 4, foreach=True, ep_enabled=True), norm)
        torch.testing.assert_close(clip_grad_norm_(layer, 1e9), norm / 4)


@needs_torchtitan
def test_gradient_norm() -> None:
    run_ranks(2, clipped_by_torchtitan)


@needs_torchtitan
def test_use_ep_ops() -> None:
    """Sizes are filled in, CUDA graphs allowed, and saved is what is sent, unless the policy is the user's own."""
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.common.token_dispatcher import TorchAOTokenDispatcher

    from ep_ops.integrations.torchtitan import EpOpsTokenDispatcher, SaveDispatch, use_ep_ops
    from ep_ops.operators import SAVE_FOR_CHECKPOINT

    config = deepseek(ranks=2)
    quantized = config.model_spec.model.layers[2].moe.routed_experts
    quantized.token_dispatcher = TorchAOTokenDispatcher.Config(**SIZES, pad_multiple=32)
    assert not config.training.disable_cuda_graphs
    with pytest.raises(ValueError, match="CUDA graphs"):
        config._validate_cuda_graphs()
    found = use_ep_ops(config, capacity_factor=0.5, options={"timeout": 60.0})
    assert found == [f"model_spec.model.layers.{i}.moe.routed_experts" for i in (1, 2)]
    config._validate_cuda_graphs()
    config.model_spec.model.update_from_config(config=config)
    for layer, pad_multiple in zip(config.model_spec.model.layers[1:], (None, 32), strict=True):
        assert layer.moe.routed_experts.token_dispatcher == EpOpsTokenDispatcher.Config(
            num_experts=8, top_k=3, hidden_dim=256, num_max_tokens_per_rank=32, non_blocking_capacity_factor=0.5,
            pad_multiple=pad_multiple, options={"timeout": 60.0},
        )  # fmt: skip
    assert type(config.activation_checkpoint) is SaveDispatch.Config
    saved = config.activation_checkpoint.build().get_save_ops()
    assert saved - SelectiveAC.Config().build().get_save_ops() == set(SAVE_FOR_CHECKPOINT)
    config.activation_checkpoint = FullAC.Config()
    use_ep_ops(config)
    assert type(config.activation_checkpoint) is FullAC.Config
    with pytest.raises(ValueError, match="FullAC.Config has no RoutedExperts.Config"):
        use_ep_ops(FullAC.Config())
    with pytest.raises(ValueError, match="capacities"):
        use_ep_ops(config, capacities=3)


@needs_torchtitan
@pytest.mark.parametrize(("fields", "size", "message"), WRONG)
def test_what_cannot_be_served(fields: dict[str, Any], size: int | None, message: str) -> None:
    from ep_ops.integrations.torchtitan import EpOpsTokenDispatcher

    with pytest.raises(ValueError, match=message):
        dispatcher = EpOpsTokenDispatcher.Config(**FILLED | fields).build()
        dispatcher.wire_meshes(ep_mesh=None if size is None else SimpleNamespace(size=lambda: size))


@needs_torchtitan
def test_dispatch_before_the_mesh_is_wired() -> None:
    from ep_ops.integrations.torchtitan import EpOpsTokenDispatcher

    with pytest.raises(RuntimeError, match="before wire_meshes"):
        EpOpsTokenDispatcher.Config(**FILLED).build().dispatch(*[torch.empty(4, DIM)] * 4)


# ---------------------------------------------------------------------- on a stand-in for torchtitan


MORE = dict(num_max_tokens_per_rank=TOKENS + 8)


def on_the_stand_in(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the dispatcher's results for a rank's tokens, checkpointed; experts return their rows as they are."""
    with fake_torchtitan.installed() as ours:
        dispatcher = ours.EpOpsTokenDispatcher(ours.EpOpsTokenDispatcher.Config(**FILLED | MORE | fields))
        dispatcher.wire_meshes(ep_mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        comm = dispatcher._comm
        draw = torch.Generator().manual_seed(7 + dist.get_rank())
        x = torch.randn(TOKENS, DIM, generator=draw).requires_grad_()
        ids = torch.rand(TOKENS, EXPERTS, generator=draw).argsort(1)[:, :TOP_K]
        scores = torch.rand(TOKENS, TOP_K, generator=draw)
        seen: list[Any] = []

        def layer(x: Tensor) -> Tensor:
            rows, counts, sent = dispatcher.dispatch(x, scores, ids, torch.empty(0))
            seen.append((rows.shape[0], counts, sent))
            return dispatcher.combine(rows, sent, x).sin()

        with comm:
            out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            out.sum().backward()
            with torch.no_grad():
                again = dispatcher.dispatch(x, scores, ids, torch.empty(0))
        (rows, counts, sent), _ = seen  # and again in backward
        kept = sent.route.send_rows >= 0
        lost = ids[~kept].bincount(minlength=EXPERTS)
        dist.all_reduce(lost)
        return {
            "rows": rows, "counts": counts, "kept": sent.route.counts, "dropped": dispatcher.dropped, "out": out,
            "expected": ((scores * kept).sum(1)[:, None] * x).sin(), "x.grad": x.grad, "alignment": comm.alignment,
            "lost": lost.view(dist.get_world_size(), -1)[dist.get_rank()], "sizes": comm.config.max_tokens_per_rank,
            "padding": again[0][: int(counts.sum())].isfinite().all(),
        }  # fmt: skip


@pytest.mark.parametrize("fields", [{}, DROPS, dict(pad_multiple=16), DROPS | dict(pad_multiple=16)])
def test_dispatcher_on_the_stand_in(fields: dict[str, Any]) -> None:
    """The dispatcher returns rows, counts, drops and results where torchtitan is not installed."""
    align, most = fields.get("pad_multiple", 1), 2 * TOKENS * TOP_K
    drops = "non_blocking_capacity_factor" in fields
    for seen in run_ranks(2, on_the_stand_in, fields):
        assert (seen["alignment"], seen["sizes"]) == (align, TOKENS + 8)
        padded = -(-(most + EXPERTS // 2 * (align - 1)) // align) * align
        assert seen["rows"] == (-(-math.ceil(0.3 * padded) // align) * align if drops else padded)
        assert seen["counts"].dtype == torch.int32
        assert torch.equal(seen["counts"], (seen["kept"] + align - 1) // align * align)
        assert seen["padding"], "the rows between experts are zeros"
        assert torch.equal(seen["dropped"], 2 * seen["lost"]) and bool(seen["dropped"].any()) == drops
        torch.testing.assert_close(seen["out"], seen["expected"])
        assert seen["x.grad"].isfinite().all() and seen["x.grad"].any()


def test_use_ep_ops_on_the_stand_in() -> None:
    from ep_ops.operators import SAVE_FOR_CHECKPOINT

    fake = fake_torchtitan
    with fake.installed() as ours:
        experts = fake.RoutedExperts.Config(
            inner_experts=SimpleNamespace(dim=DIM),
            token_dispatcher=fake.HybridEPTokenDispatcher.Config(**SIZES, pad_multiple=32),
        )
        config = fake.Model({"experts": experts, "checkpointing": fake.SelectiveAC.Config()})
        assert ours.use_ep_ops(config, capacity_factor=0.5, options={"timeout": 60.0}) == ["experts"]
        assert experts.token_dispatcher == ours.EpOpsTokenDispatcher.Config(
            **SIZES, pad_multiple=32, hidden_dim=DIM, non_blocking_capacity_factor=0.5, options={"timeout": 60.0}
        )
        assert type(config.parts["checkpointing"]) is ours.SaveDispatch.Config
        assert ours.SaveDispatch().get_save_ops() == {torch.ops.aten.mm.default, *SAVE_FOR_CHECKPOINT}
        with pytest.raises(ValueError, match="Model has no RoutedExperts.Config"):
            ours.use_ep_ops(fake.Model({}))


@pytest.mark.parametrize(("fields", "size", "message"), WRONG)
def test_what_cannot_be_served_on_the_stand_in(fields: dict[str, Any], size: int | None, message: str) -> None:
    with fake_torchtitan.installed() as ours, pytest.raises(ValueError, match=message):
        dispatcher = ours.EpOpsTokenDispatcher(ours.EpOpsTokenDispatcher.Config(**FILLED | fields))
        dispatcher.wire_meshes(ep_mesh=None if size is None else SimpleNamespace(size=lambda: size))


def test_without_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchtitan", "torchtitan.config"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "ep_ops.integrations.torchtitan", raising=False)
    with pytest.raises(ImportError, match=r"needs torchtitan 0\.3.*pip install 'torchtitan>=0\.3,<0\.4'"):
        importlib.import_module("ep_ops.integrations.torchtitan")
