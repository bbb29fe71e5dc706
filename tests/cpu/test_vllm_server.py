"""vLLM's own code that makes MoE layers, with the plugin: its kernels give what all experts in one place give."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_vllm import (
    EXPERTS,
    HIDDEN,
    INNER,
    MOST,
    TOP_K,
    close,
    dense,
    inputs,
    matrices,
    torch_experts,
    unquantized,
)
from torch import Tensor

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
NAME = "maybe_make_prepare_finalize"


@pytest.fixture(scope="module")
def vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM 0.26 or 0.33, which is not installed")
    try:
        importlib.import_module(f"{FUSED_MOE}.modular_kernel")
    except ImportError as error:
        pytest.skip(f"needs vLLM 0.26 or 0.33, which failed to import: {error}")


@contextlib.contextmanager
def installed(ubatches: int = 1, **model: Any) -> Iterator[Any]:
    """The plugin in this process, with a server's configuration. Restores vLLM's function afterwards."""
    importlib.import_module(f"{FUSED_MOE}.oracle.unquantized")
    importlib.import_module(f"{FUSED_MOE}.oracle.fp8")
    theirs = importlib.import_module(f"{FUSED_MOE}.all2all_utils").maybe_make_prepare_finalize
    from ep_ops.integrations import plugins, vllm_server

    before = [module for module in sys.modules.values() if getattr(module, "__dict__", {}).get(NAME) is theirs]
    parallel = SimpleNamespace(use_ubatching=ubatches > 1, num_ubatches=ubatches)
    config = SimpleNamespace(
        parallel_config=parallel, model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**model))
    )
    group = SimpleNamespace(device_group=dist.group.WORLD)
    with (
        mock.patch.dict("os.environ", {"EP_OPS_VLLM": "1"}),
        mock.patch.object(vllm_server, "get_current_vllm_config", lambda: config),
        mock.patch.object(vllm_server, "get_ep_group", lambda: group),
    ):
        plugins.vllm()
        plugins.vllm()  # as where vLLM calls it again
        try:
            assert len(before) >= 3
            for module in before:
                assert module.__dict__[NAME] is not theirs and module.__dict__[NAME].__wrapped__ is theirs
            yield vllm_server
        finally:
            for module in before:
                module.__dict__[NAME] = theirs


def configuration(dtype: torch.dtype = torch.float32, **others: Any) -> Any:
    """The FusedMoEConfig of a layer of this rank."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.modular_kernel import MoEActivation

    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel: dict[str, Any] = dict(
        tp_size=1, pcp_size=1, dp_size=ranks, ep_size=ranks, tp_rank=0, pcp_rank=0, dp_rank=rank, ep_rank=rank,
        sp_size=1, use_ep=True, all2all_backend="allgather_reducescatter", enable_eplb=False,
    )  # fmt: skip
    return FusedMoEConfig(
        num_experts=EXPERTS, experts_per_token=TOP_K, hidden_dim=HIDDEN, intermediate_size=INNER,
        num_local_experts=EXPERTS // ranks, num_logical_experts=EXPERTS, activation=MoEActivation.SILU, device="cpu",
        routing_method=RoutingMethodType.Default, moe_parallel_config=FusedMoEParallelConfig(**parallel | others),
        in_dtype=dtype, max_num_tokens=MOST,
    )  # fmt: skip


def kernel_of(server: Any, experts: Any, dtype: torch.dtype) -> Any:
    from vllm.model_executor.layers.fused_moe.oracle import unquantized as oracle

    backend = oracle.UnquantizedMoeBackend.TRITON
    return oracle.make_unquantized_moe_kernel(unquantized(), configuration(dtype), backend, experts)


def applied(kernel: Any, given: list[Tensor], dtype: torch.dtype) -> Tensor:
    """A forward of the kernel on this rank's experts."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import MoEActivation
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cpu"))
    rank, own = dist.get_rank(), EXPERTS // dist.get_world_size()
    mine = slice(rank * own, rank * own + own)
    expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
    expert_map[mine] = torch.arange(own, dtype=torch.int32)
    x, weights, ids = given
    with mock.patch("torch.accelerator.empty_cache"):  # which a CPU has not; vLLM calls it before it allocates
        return kernel.apply(
            x, *(w[mine] for w in matrices(dtype)), topk_weights=weights, topk_ids=ids,
            activation=MoEActivation.SILU, global_num_experts=EXPERTS, expert_map=expert_map,
            apply_router_weight_on_input=False,
        )  # fmt: skip


def layers(asked: str) -> None:
    from vllm.model_executor.layers.fused_moe import all2all_utils

    with installed() as server:
        for dtype in (torch.float32, torch.bfloat16):
            kernel = kernel_of(server, torch_experts(asked), dtype)
            ours = kernel.impl.prepare_finalize
            assert type(ours).__name__ == "PrepareAndFinalize" and not ours.supports_async()
            for seed in range(2):
                given = inputs(dist.get_rank(), dtype=dtype, seed=seed)
                with mock.patch("vllm._custom_ops.moe_sum", lambda y, out: out.copy_(y.sum(1))):
                    close(applied(kernel, given, dtype), dense(*given))
        again = kernel_of(server, torch_experts(asked), dtype).impl.prepare_finalize
        assert again._comms == ours._comms  # layers share a communicator
        alone = configuration(dp_size=1, use_ep=False)
        assert type(all2all_utils.maybe_make_prepare_finalize(alone, unquantized(), None, True)).__name__ not in (
            "PrepareAndFinalize", "BatchedPrepareAndFinalize",
        )  # fmt: skip
    for comm in ours._comms:
        comm.destroy()


@pytest.mark.parametrize("asked", ["NoOP", "Delegate"])
def test_layers_use_ep_ops(vllm: None, asked: str) -> None:
    run_ranks(2, layers, asked, timeout=240.0)


def choices() -> None:
    from vllm.model_executor.layers.fused_moe import all2all_utils

    seen = []
    for ubatches, model, others in (
        (1, {}, {}), (1, {"n_shared_experts": 0}, {}), (1, {"n_shared_experts": 1}, {}),
        (1, {"shared_expert_intermediate_size": 64}, {}), (2, {"num_shared_experts": None}, {"sp_size": 1}),
    ):  # fmt: skip
        with installed(ubatches, **model):
            got = all2all_utils.maybe_make_prepare_finalize(configuration(**others), unquantized(), None, True)
            seen.append((type(got).__name__, len(got._comms), got.supports_async(), got.supports_dbo()))
            names = {comm.name for comm in got._comms}
            assert len(names) == ubatches
    plain = "PrepareAndFinalize"
    assert seen == [
        (plain, 1, False, False), (plain, 1, False, False), (plain, 1, True, False), (plain, 1, True, False),
        (plain, 2, True, True),
    ]  # fmt: skip
    batched = {"all2all_backend": "nixl_ep"}  # a backend whose experts take the batched format
    with installed():
        make = all2all_utils.maybe_make_prepare_finalize
        got = make(configuration(**batched), unquantized(), None, True)
        assert type(got).__name__ == "BatchedPrepareAndFinalize"
        assert got._comms[0].max_tokens_per_rank == MOST and got.max_num_tokens_per_rank() == MOST
        chosen = configuration(sp_size=2)
        object.__setattr__(chosen, "moe_backend", "batched_triton")  # whose experts take it, too
        got = make(chosen, unquantized(), None, True)
        assert (type(got).__name__, got._sp_size) == ("BatchedPrepareAndFinalize", 2)
        theirs = make.__wrapped__
        passes: Any = SimpleNamespace(use_all2all_kernels=True, use_passthrough_all2all=True)
        with mock.patch.object(make, "_theirs", mock.create_autospec(theirs, return_value="theirs")):
            assert make(SimpleNamespace(moe_parallel_config=passes), unquantized(), None, True) == "theirs"
        manager = SimpleNamespace(world_size=2, dp_world_size=2)
        for given, text in ((dict(use_monolithic=True), "route tokens themselves"), ({}, "do not use vLLM's modular")):
            asked: dict[str, Any] = dict(allow_new_interface="use_monolithic" in given, **given)
            with (
                mock.patch.object(all2all_utils, "get_ep_all2all_manager", lambda *_, **__: manager),
                pytest.warns(RuntimeWarning, match=f"EP_OPS_VLLM is 1, but the experts that vLLM chose {text}"),
            ):
                got = make(configuration(), unquantized(), **asked)
                assert type(got) is type(theirs(configuration(), unquantized(), **asked))
        elastic: dict[str, Any] = (
            {"all2all_manager": manager} if "all2all_manager" in inspect.signature(theirs).parameters else {}
        )
        with pytest.raises(NotImplementedError, match="does not support elastic expert parallelism"):
            make(configuration(), unquantized(), None, True, **(elastic or {"eep_stage": True}))


def test_what_is_chosen(vllm: None) -> None:
    run_ranks(2, choices, timeout=240.0)


# ---------------------------------------------------------------------- vLLM's Triton experts, with kernels in torch


def align(
    ids: Tensor, block: int, experts: int, expert_map: Tensor | None = None, *, ignore_invalid_experts: bool
) -> Any:
    """Sort entries by local expert, in blocks, as moe_align_block_size does if experts of other ranks are ignored."""
    assert expert_map is not None and ignore_invalid_experts and ids.dtype == torch.int32
    assert ((ids >= 0) & (ids < experts)).all()
    local, places, numbers = expert_map[ids.flatten().long()], [], []
    for i in range(int(expert_map.max()) + 1):
        found = (local == i).nonzero().flatten().tolist()
        padded = -(-len(found) // block) * block
        places += found + [ids.numel()] * (padded - len(found))
        numbers += [i] * (padded // block)
    return (
        torch.tensor(places, dtype=torch.int32),
        torch.tensor(numbers, dtype=torch.int32),
        torch.tensor([len(places)]),
    )


def gemm(
    a: Tensor, b: Tensor, c: Tensor, a_scale: Any, b_scale: Any, weights: Tensor | None, places: Tensor,
    experts: Tensor, count: Tensor, weighted: bool, top_k: int, config: dict[str, Any], **_: Any,
) -> None:  # fmt: skip
    """Multiply as invoke_fused_moe_triton_kernel does; other places hold NaN, as memory may."""
    out = c.view(-1, c.shape[-1])
    out.fill_(float("nan"))
    for at, place in enumerate(places[: int(count)].tolist()):
        if place < len(out):
            y = a[place // top_k] @ b[experts[at // config["BLOCK_SIZE_M"]]].T
            out[place] = y * weights.flatten()[place] if weighted and weights is not None else y


def local_sum(y: Tensor, out: Tensor, ids: Tensor, expert_map: Tensor) -> None:
    here = expert_map[ids.long()] >= 0
    out.copy_(torch.where(here[..., None], y, 0).sum(1))


def with_triton_experts() -> str:
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    from ep_ops.integrations.vllm import skipping_triton_experts

    def activation(self: Any, kind: Any, output: Tensor, given: Tensor, **_: Any) -> None:
        gate, up = given.chunk(2, -1)
        output.copy_(torch.nn.functional.silu(gate) * up)

    experts, dtype = triton_moe.TritonExperts, torch.float32
    skipping = skipping_triton_experts()
    fused = importlib.import_module(f"{FUSED_MOE}.fused_moe")
    with contextlib.ExitStack() as replaced:
        for owner, name, value in (
            (fused, "moe_align_block_size", align), (triton_moe, "invoke_fused_moe_triton_kernel", gemm),
            (triton_moe, "try_get_optimal_moe_config", lambda *_, **__: {"BLOCK_SIZE_M": 4}),
            (triton_moe.ops, "moe_sum", local_sum), (triton_moe, "tl", mock.MagicMock()),
            (experts, "activation", activation),
        ):  # fmt: skip
            replaced.enter_context(mock.patch.object(owner, name, value))
        server = replaced.enter_context(installed())
        kernel = kernel_of(server, experts, dtype)
        assert type(kernel.impl.fused_experts) is (skipping or experts)
        for seed in range(3):
            given = inputs(dist.get_rank(), dtype=dtype, seed=seed)
            close(applied(kernel, given, dtype), dense(*given))
        (comm,) = kernel.impl.prepare_finalize._comms
        kind = type(kernel.impl.fused_experts).__name__
    comm.destroy()
    return kind


def test_triton_experts_leave_out_experts_of_other_ranks(vllm: None) -> None:
    version = importlib.import_module("vllm").__version__
    wanted = "SkippingTritonExperts" if version.startswith("0.26") else "TritonExperts"
    assert run_ranks(2, with_triton_experts, timeout=240.0) == [wanted, wanted]
