"""vLLM's modular kernels with this library's prepare and finalize, against all experts computed in one place."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import quantized
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import silu

from ep_ops import Communicator

HIDDEN, INNER, EXPERTS, TOP_K, MOST = 16, 8, 6, 3, 12
TOKENS = [5, 9]  # of each rank
run = functools.partial(run_ranks, timeout=240.0)  # the first call of a rank imports vLLM


@pytest.fixture(scope="module")
def vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM 0.26 or 0.33, which is not installed")
    try:
        importlib.import_module("vllm.model_executor.layers.fused_moe.modular_kernel")
    except ImportError as error:
        pytest.skip(f"needs vLLM 0.26 or 0.33, which failed to import: {error}")


def communicator(**others: Any) -> Communicator:
    sizes: dict[str, Any] = dict(
        hidden_size=HIDDEN, top_k=TOP_K, dtype=torch.float32, device="cpu", timeout=60.0
    ) | others  # fmt: skip
    return Communicator(num_experts=EXPERTS, max_tokens_per_rank=MOST, **sizes)


def inputs(rank: int, top_k: int = TOP_K, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """x [T, H], weights [T, K], ids [T, K] with some -1, of a rank."""
    draw = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(TOKENS[rank], HIDDEN, generator=draw).to(dtype)
    ids = torch.rand(len(x), EXPERTS, generator=draw).argsort(1)[:, :top_k].int()
    ids[torch.rand(ids.shape, generator=draw) < 0.2] = -1
    return [x, torch.rand(ids.shape, generator=draw), ids]


def matrices(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """w1 [E, 2 N, H] and w2 [E, H, N] of all experts."""
    draw = torch.Generator().manual_seed(1)
    w1 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=draw) / 4
    return w1.to(dtype), (torch.randn(EXPERTS, HIDDEN, INNER, generator=draw) / 3).to(dtype)


def expert(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    gate, up = (x @ w1.T).chunk(2, -1)
    return (silu(gate) * up) @ w2.T


def dense(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, k in (ids >= 0).nonzero().tolist():
        w1, w2 = (w[ids[t, k]].double() for w in matrices(x.dtype))
        out[t] += weights[t, k].double() * expert(x[t].double(), w1, w2)
    return out


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


def made(form: str, *comms: Communicator, **others: Any) -> Any:
    from ep_ops.integrations.vllm import BatchedPrepareAndFinalize, PrepareAndFinalize

    return {"batched": BatchedPrepareAndFinalize, "standard": PrepareAndFinalize}[form](*comms, **others)


def unquantized() -> Any:
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

    return FUSED_MOE_UNQUANTIZED_CONFIG


def reduction(name: str) -> Any:
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce

    return getattr(topk_weight_and_reduce, f"TopKWeightAndReduce{name}")()


def through(
    comm: Communicator, rows: Tensor, counts: Tensor, ids: Tensor | None, weights: Tensor | None, on_input: bool = False
) -> Tensor:
    """Return the outputs of this rank's experts for the rows of prepare; NaN where rows are nobody's.

    Token-major rows [R, H] are weighted and summed over this rank's experts, batched rows are not weighted.
    """
    first, y = comm.first_local_expert, torch.full_like(rows, float("nan"))
    if ids is None:
        for i, (w1, w2) in enumerate(zip(*matrices(rows.dtype), strict=True)):
            if 0 <= i - first < comm.num_local_experts:
                y[i - first, : counts[i - first]] = expert(rows[i - first, : counts[i - first]], w1, w2)
        return y
    assert weights is not None and weights.dtype == torch.float32 and weights.shape == ids.shape
    mine = (ids >= first) & (ids < first + comm.num_local_experts)
    assert torch.equal((ids[mine] - first).bincount(minlength=comm.num_local_experts), counts.long())
    if comm.num_local_experts < EXPERTS:
        assert ((ids >= 0) & (ids < EXPERTS)).all()  # vLLM 0.26 takes no other ids
    assert (weights[~mine] == 0).all()
    for row in mine.any(1).nonzero().flatten().tolist():
        y[row] = 0
        for k in mine[row].nonzero().flatten().tolist():
            w1, w2 = (w[ids[row, k]] for w in matrices(rows.dtype))
            y[row] += (1 if on_input else weights[row, k]) * expert(rows[row], w1, w2)
    return y


# ---------------------------------------------------------------------- in vLLM's own kernel


def torch_experts(asked: str) -> Any:
    """Experts of the standard format in plain torch, which reduce their top k or leave it to finalize."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk

    class TorchExperts(mk.FusedMoEExpertsModular):
        _supports_current_device = _supports_no_act_and_mul = _supports_quant_scheme = staticmethod(lambda *_: True)
        _supports_activation = _supports_parallel_config = staticmethod(lambda *_: True)

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        def finalize_weight_and_reduce_impl(self) -> Any:
            return reduction(asked)

        def workspace_shapes(self, M: int, N: int, K: int, topk: int, *_: Any) -> Any:
            return (1,), (1,), (M, K) if asked == "NoOP" else (M, topk, K)

        def apply(
            self, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
            expert_map: Tensor, expert_tokens_meta: Any, **_: Any,
        ) -> None:  # fmt: skip
            local = torch.where(topk_ids >= 0, expert_map[topk_ids.clamp(min=0).long()], -1)
            assert torch.equal(local[local >= 0].bincount(minlength=len(w1)), expert_tokens_meta.expert_num_tokens)
            y = torch.zeros((*topk_ids.shape, HIDDEN), dtype=hidden_states.dtype)  # also for experts of other ranks
            for i in range(len(w1)):
                row, k = (local == i).nonzero(as_tuple=True)
                y[row, k] = expert(hidden_states[row], w1[i], w2[i])
            output.copy_((y * topk_weights.unsqueeze(2)).sum(1) if asked == "NoOP" else y)

    return TorchExperts


def naive_experts() -> Any:
    """vLLM's own experts of the batched format, but for two things that a CPU lacks: an accelerator to ask whether it
    captures, and the kernel of the activation."""
    from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe

    fused_batched_moe._is_capturing_or_compiling = lambda: False

    class Experts(fused_batched_moe.NaiveBatchedExperts):
        def activation(self, activation: Any, output: Tensor, input: Tensor, **_: Any) -> None:
            gate, up = input.chunk(2, -1)
            output.copy_(silu(gate) * up)

    return Experts


def in_kernel(form: str, asked: str, dtype: torch.dtype, limits: dict[str, Any]) -> tuple[int, int]:
    """A layer in vLLM's kernel, without and with shared experts: rows that this rank dropped, and its lost tokens."""
    (without,) = {in_one_kernel(form, asked, dtype, limits, shared) for shared in (False, True)}
    return without


def in_one_kernel(form: str, asked: str, dtype: torch.dtype, limits: dict[str, Any], has_shared: bool) -> Any:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel, MoEActivation
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cpu"))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, weights, ids = inputs(rank, dtype=dtype)
    parallel = FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=ranks, ep_size=ranks, tp_rank=0, pcp_rank=0, dp_rank=rank, ep_rank=rank,
        sp_size=1, use_ep=True, all2all_backend="allgather_reducescatter", enable_eplb=False,
    )  # fmt: skip
    moe = FusedMoEConfig(
        num_experts=EXPERTS, experts_per_token=TOP_K, hidden_dim=HIDDEN, intermediate_size=INNER,
        num_local_experts=EXPERTS // ranks, num_logical_experts=EXPERTS, activation=MoEActivation.SILU, device="cpu",
        routing_method=RoutingMethodType.Default, moe_parallel_config=parallel, in_dtype=dtype, max_num_tokens=MOST,
    )  # fmt: skip
    with communicator(dtype=dtype) as comm:
        prepare_finalize = made(form, comm, **limits, shared_experts=has_shared)
        sizes: dict[str, Any] = {"moe_config": moe, "quant_config": unquantized()}
        if form == "batched":
            sizes["max_num_tokens"] = prepare_finalize.max_num_tokens_per_rank()
            sizes["num_dispatchers"] = prepare_finalize.num_dispatchers()
        experts = naive_experts() if form == "batched" else torch_experts(asked)
        kernel = FusedMoEKernel(prepare_finalize, experts(**sizes))
        assert kernel.can_overlap_shared_experts == has_shared and kernel.output_is_reduced()
        mine = slice(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(comm.num_local_experts, dtype=torch.int32)
        seen: list[Any] = []

        def shared(given: Tensor, order: Any) -> None:
            seen.append((given is x, prepare_finalize._sent))

        lost = torch.zeros(ids.shape, dtype=torch.bool)
        if limits:  # the same routes again, to see who was left out
            lost = (comm.plan(ids, **prepare_finalize._sizes(comm))[0].send_rows < 0) & (ids >= 0)
        with (
            mock.patch("torch.accelerator.empty_cache"),  # which a CPU has not; vLLM calls it before it allocates
            mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),  # which vLLM 0.26 asks
            mock.patch("vllm._custom_ops.moe_sum", lambda y, out: out.copy_(y.sum(1))),
        ):
            out = kernel.apply(
                x, *(w[mine] for w in matrices(dtype)), topk_weights=weights, topk_ids=ids,
                activation=MoEActivation.SILU, global_num_experts=EXPERTS, expert_map=expert_map,
                apply_router_weight_on_input=False, shared_experts=shared if has_shared else None,
                shared_experts_input=x if has_shared else None,
            )  # fmt: skip
        assert seen == ([(True, [None])] if has_shared else [])
        close(out, dense(x, weights, ids.masked_fill(lost, -1)))
        assert out.dtype == dtype and out.abs().max() > 0.1
        if form == "standard":  # nothing can be dropped
            return 0, int(lost.sum())
        named = ids[lost].long().bincount(minlength=EXPERTS)
        dist.all_reduce(named)
        assert prepare_finalize.dropped.tolist() == named[mine].tolist()
        return int(prepare_finalize.dropped.sum()), int(lost.sum())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("form", "asked", "dtype"), [
    ("standard", "NoOP", torch.float32), ("standard", "Delegate", torch.bfloat16),
    ("standard", "Contiguous", torch.float32), ("batched", "Delegate", torch.float32),
    ("batched", "Delegate", torch.float16),
])  # fmt: skip
def test_layer(vllm: None, ranks: int, form: str, asked: str, dtype: torch.dtype) -> None:
    assert run(ranks, in_kernel, form, asked, dtype, {}) == [(0, 0)] * ranks


def test_what_does_not_fit_is_counted(vllm: None) -> None:
    seen = run(2, in_kernel, "batched", "Delegate", torch.float32, {"slots": 4})
    assert sum(dropped for dropped, _ in seen) == sum(lost for _, lost in seen) > 0


# ---------------------------------------------------------------------- by hand


def layer(prepare_finalize: Any, comm: Communicator, given: list[Tensor], on_input: bool, how: str) -> Tensor:
    """By prepare and finalize, or by their asynchronous forms with hooks or without."""
    x, weights, ids = given
    arguments = *given, EXPERTS, None, on_input, unquantized()
    if how == "whole":
        rows, scales, meta, row_ids, row_weights = prepare_finalize.prepare(*arguments, defer_input_quant=False)
    else:
        hook, receiver = prepare_finalize.prepare_async(*arguments, defer_input_quant=False)
        if how == "hooks":
            hook()
        rows, scales, meta, row_ids, row_weights = receiver()
    assert scales is None and meta.expert_num_tokens_cpu is None
    y = through(comm, rows, meta.expert_num_tokens, row_ids, row_weights, on_input)
    if row_ids is not None:
        assert row_ids.dtype == prepare_finalize.topk_indices_dtype() and row_ids.shape == (len(rows), ids.shape[1])
        weights, ids = row_weights, row_ids
    out = torch.full_like(x, 7.0)
    rest = out, y, weights, ids, on_input, reduction("Delegate" if row_ids is None else "NoOP")
    if how == "whole":
        prepare_finalize.finalize(*rest)
        return out
    hook, receiver = prepare_finalize.finalize_async(*rest)
    if how == "hooks":
        hook()
    assert (out == 7.0).all()
    receiver()
    return out


def by_hand(form: str, how: str) -> None:
    rank = dist.get_rank()
    for top_k, on_input, dtype in ((TOP_K, False, torch.float32), (1, True, torch.float32), (1, True, torch.bfloat16)):
        with communicator(top_k=top_k, dtype=dtype) as comm:
            prepare_finalize = made(form, comm)
            for seed in range(2):
                given = inputs(rank, top_k, dtype, seed)
                got = layer(prepare_finalize, comm, given, on_input, how)
                x, weights, ids = given
                if on_input:  # an expert's output is not linear in its input
                    close(got, dense(x * weights, torch.ones_like(weights), ids))
                else:
                    close(got, dense(x, weights, ids))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["standard", "batched"])
def test_whole_and_asynchronous(vllm: None, ranks: int, form: str) -> None:
    for how in ("whole", "hooks", "receivers"):
        run(ranks, by_hand, form, how)


def fp8_config(kind: str) -> Any:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    static = torch.tensor([0.02]) if kind == "static" else None
    block = [128, 128] if kind.startswith("block") else None
    return FusedMoEQuantConfig.make(
        torch.float8_e4m3fn, block_shape=block, per_act_token_quant=kind == "token", a1_scale=static
    )


def decoded_rows(form: str, kind: str, rows: Tensor, scales: Tensor) -> Tensor:
    """Rows in float32, from scales in the shape that vLLM's experts take."""
    blocks = rows.float().unflatten(-1, (-1, 128))
    if kind == "block packed":
        exponents = scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)[..., : blocks.shape[-2]]
        return (blocks * (exponents.int() << 23).view(torch.float32).unsqueeze(-1)).flatten(-2)
    lead = rows.shape[:-1]
    wanted = {"block": (*lead, 2), "token": (*lead, 1), "static": (1,) if form == "standard" else (len(rows), 1, 1)}
    assert scales.shape == wanted[kind] and scales.dtype == torch.float32
    if kind != "block":
        return rows.float() * scales
    assert scales.stride(-1) == 1 or form == "batched"
    return (blocks * scales.unsqueeze(-1)).flatten(-2)


def fp8(form: str, kind: str) -> None:
    """The expert ``i`` multiplies with i + 1 what rows decode to; -1 and NaN stand for rows that nobody has sent."""
    width, x = 256, torch.randn(TOKENS[dist.get_rank()], 256, generator=torch.Generator().manual_seed(dist.get_rank()))
    _, weights, ids = inputs(dist.get_rank())
    form_of_numbers = {"block": "128/fp32", "block packed": "128/pow2", "token": "row/fp32"}
    if kind == "static":
        x[0, :2] = torch.tensor([20.0, -20.0])  # beyond what codes hold
        plain = (x / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.02
    else:
        codes, numbers = quantized.quantized(x, form_of_numbers[kind])
        each = numbers.float().repeat_interleave(128, 1) if kind.startswith("block") else numbers.float()
        plain = codes.view(torch.float8_e4m3fn).float() * each
    with communicator(hidden_size=width) as comm:
        prepare_finalize = made(form, comm)
        prepare_finalize.post_init_setup(
            SimpleNamespace(supports_packed_ue8m0_act_scales=lambda: kind == "block packed")
        )
        rows, scales, meta, row_ids, row_weights = prepare_finalize.prepare(
            x, weights, ids, EXPERTS, None, False, fp8_config(kind), False
        )
        assert rows.dtype == torch.float8_e4m3fn
        y = decoded_rows(form, kind, rows, scales)
        if form == "standard":
            first, end = comm.first_local_expert, comm.first_local_expert + comm.num_local_experts
            mine = (row_ids >= first) & (row_ids < end)
            number = torch.where(mine, row_weights * (row_ids + 1), 0).sum(1, keepdim=True)
            y, rest = torch.where(mine.any(1, keepdim=True), y * number, torch.nan), (row_weights, row_ids)
        else:
            place = torch.arange(rows.shape[1]) < meta.expert_num_tokens[:, None]
            number = torch.arange(1, comm.num_local_experts + 1)[:, None, None] + comm.first_local_expert
            y, rest = torch.where(place[..., None], y * number, torch.nan), (weights, ids)
        out = torch.empty_like(x)
        prepare_finalize.finalize(out, y, *rest, False, reduction("NoOP" if form == "standard" else "Delegate"))
        factor = torch.where(ids >= 0, (ids + 1) * weights, 0).sum(1, keepdim=True)
        # A code of the static scale may round otherwise where x / scale and x * (1 / scale) differ.
        tolerance = 0.3 if kind == "static" else 1e-5
        torch.testing.assert_close(out, plain * factor, atol=tolerance, rtol=1e-5)
        if kind == "static":
            assert ((out - plain * factor).abs() > 1e-4).float().mean() < 0.01


@pytest.mark.parametrize(("form", "kind"), [
    *((form, kind) for form in ("standard", "batched") for kind in ("block", "token", "static")),
    ("batched", "block packed"),
])  # fmt: skip
def test_fp8_rows(vllm: None, form: str, kind: str) -> None:
    run(2, fp8, form, kind)


def two_under_way(form: str) -> None:
    """Two micro-batches in the order in which vLLM's dual batch overlap runs them, hooks in each other's turn."""
    from vllm.v1.worker import ubatching

    given = [inputs(dist.get_rank(), seed=seed) for seed in (3, 4)]
    here = ubatching.threading.get_ident()
    contexts = [SimpleNamespace(recv_hook=None) for _ in given]
    for context in contexts:
        context.maybe_run_recv_hook = functools.partial(ubatching.UBatchContext.maybe_run_recv_hook, context)
    ubatching._CURRENT_CONTEXTS[:] = contexts
    try:
        with communicator() as first, communicator() as second:
            comms = [first, second]
            prepare_finalize = made(form, *comms)
            assert prepare_finalize.supports_dbo() and prepare_finalize.supports_async()
            assert not made(form, first).supports_dbo() and not made(form, first).supports_async()
            out, steps = [torch.empty_like(x) for x, *_ in given], []

            def turn(at: int) -> None:
                ubatching._THREAD_ID_TO_CONTEXT[here] = at

            for at in (0, 1):
                turn(at)
                ubatching.dbo_maybe_run_recv_hook()
                steps.append(prepare_finalize.prepare_async(*given[at], EXPERTS, None, False, unquantized(), False))
                ubatching.dbo_register_recv_hook(steps[at][0])
            for at in (0, 1):
                turn(at)
                rows, _, meta, ids, weights = steps[at][1]()
                y = through(comms[at], rows, meta.expert_num_tokens, ids, weights)
                _, w, i = given[at]
                rest = (w, i, False, reduction("Delegate")) if ids is None else (weights, ids, False, reduction("NoOP"))
                steps[at] = prepare_finalize.finalize_async(out[at], y, *rest)
                assert contexts[at].recv_hook is None  # the other micro-batch's was due
                ubatching.dbo_register_recv_hook(steps[at][0])
            for at in (0, 1):
                turn(at)
                steps[at][1]()
                close(out[at], dense(*given[at]))
            turn(2)
            with pytest.raises(ValueError, match="comms holds 2; micro-batch 2 needs a communicator of its own"):
                prepare_finalize.prepare(*given[0], EXPERTS, None, False, unquantized(), False)
    finally:
        ubatching._THREAD_ID_TO_CONTEXT.clear()
        ubatching._CURRENT_CONTEXTS.clear()


@pytest.mark.parametrize("form", ["standard", "batched"])
def test_two_micro_batches(vllm: None, form: str) -> None:
    run(2, two_under_way, form)


def bounded(sp_size: int) -> tuple[int, int]:
    """Rows of the standard format, where the data-parallel ranks have agreed on 11 tokens; max_tokens of the route."""
    from vllm.forward_context import DPMetadata, override_forward_context

    with communicator() as comm:
        prepare_finalize = made("standard", comm, sp_size=sp_size)
        context: Any = SimpleNamespace(dp_metadata=DPMetadata(torch.tensor([11, 7])))
        given = [t[:5] for t in inputs(dist.get_rank())]
        with override_forward_context(context):
            out = layer(prepare_finalize, comm, given, False, "whole")
            close(out, dense(*given))
            rows = prepare_finalize.prepare(*given, EXPERTS, None, False, unquantized(), False)[0]
        return len(rows), prepare_finalize._sent[0].route.max_tokens


@pytest.mark.parametrize(("sp_size", "most"), [(1, 11), (2, 6)])
def test_tokens_of_a_step(vllm: None, sp_size: int, most: int) -> None:
    assert run(2, bounded, sp_size) == [(2 * most, most)] * 2


def traced(prepare_finalize: Any, both: bool) -> list[str]:
    """The operators of a step. Tracing with tensors without values rejects whatever would look at one."""

    def step(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        given = x, weights, ids, EXPERTS, None, False, unquantized(), False
        got = prepare_finalize.prepare_async(*given)[1]() if both else prepare_finalize.prepare(*given)
        rows, _, _, row_ids, row_weights = got
        rest = (weights, ids, False, reduction("Delegate"))
        if row_ids is not None:
            rest = (row_weights, row_ids, False, reduction("NoOP"))
        out = torch.empty_like(x)
        if both:
            prepare_finalize.finalize_async(out, rows, *rest)[1]()
        else:
            prepare_finalize.finalize(out, rows, *rest)
        return out

    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs(0)).graph
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("form", ["standard", "batched"])
def test_nothing_waits_for_the_host(vllm: None, form: str) -> None:
    with communicator(strict=False) as comm, communicator(strict=False) as other:
        for comms, suffixes in (((comm,), ("",)), ((comm, other), ("_start", "_wait"))):
            calls = traced(made(form, *comms), len(comms) == 2)
            ours = [name for name in calls if name.startswith("ep.")]
            assert ours == [f"ep.{kind}{suffix}.default" for kind in ("dispatch", "combine") for suffix in suffixes]
            kept = [c for c in calls if not any(part in c for part in ("ep.", "getitem", "empty", "view", "copy_"))]
            assert kept == []  # one rank: no ids are renamed, and nothing is counted


def test_what_is_rejected(vllm: None) -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    x, weights, ids = inputs(0)
    fp8 = FusedMoEQuantConfig.make(torch.float8_e4m3fn)
    with communicator() as comm:
        standard, batched = made("standard", comm), made("batched", comm)
        for prepare_finalize in (standard, batched):
            with pytest.raises(
                NotImplementedError, match="quant_dtype torch.float8_e4m3fn, block_shape None, .*no a1_"
            ):
                prepare_finalize.prepare(x, weights, ids, EXPERTS, None, False, fp8, False)
            blocks = FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[64, 64])
            with pytest.raises(NotImplementedError, match=r"block_shape \[64, 64\], .*; allowed: None, or float8"):
                prepare_finalize.prepare(x, weights, ids, EXPERTS, None, False, blocks, False)
            with pytest.raises(ValueError, match="num_experts is 7; communicator .* has 6"):
                prepare_finalize.prepare(x, weights, ids, 7, None, False, unquantized(), False)
            with pytest.raises(ValueError, match=r"shape \(5, 3\); with apply_router_weight_on_input .* \[T, 1\]"):
                prepare_finalize.prepare(x, weights, ids, EXPERTS, None, True, unquantized(), False)
            with pytest.raises(TypeError, match="x has dtype torch.float64"):
                prepare_finalize.prepare(x.double(), weights, ids, EXPERTS, None, False, unquantized(), False)
            with pytest.raises(RuntimeError, match="finalize was called before prepare, which plans the route"):
                prepare_finalize.finalize(x, x, weights, ids, False, reduction("Delegate"))
            with pytest.raises(ValueError, match="comms is empty"):
                type(prepare_finalize)()
        rows = standard.prepare(x, weights, ids, EXPERTS, None, False, fp8, True)[0]  # experts quantize them
        assert rows.dtype == x.dtype
        rows = batched.prepare(x, weights, ids, EXPERTS, None, False, unquantized(), False)[0]
        with pytest.raises(ValueError, match="is TopKWeightAndReduceNoOP; allowed: TopKWeightAndReduceDelegate"):
            batched.finalize(x, rows, weights, ids, False, reduction("NoOP"))
        with pytest.raises(ValueError, match="slots is 0; allowed: a positive multiple of the number of ranks, 1"):
            made("batched", comm, slots=0)


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.forward_context"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "ep_ops.integrations.vllm", raising=False)
    with pytest.raises(ImportError, match=r"needs vLLM 0\.26 or 0\.33.*pip install 'vllm>=0\.33,<0\.34'"):
        importlib.import_module("ep_ops.integrations.vllm")
