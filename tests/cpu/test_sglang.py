"""SGLang's dispatcher classes with the plugin, against all experts computed in one place."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import torch.distributed as dist
from deep_ep_cases import EXPERTS, RANKS, Given, draw
from ranks import run_ranks
from sglang_cases import FEW, MANY, WIDE, check, extending, of_experts, server

run = dict(timeout=280.0)  # the first call of a rank imports SGLang


@pytest.fixture(scope="module")
def sglang() -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs SGLang 0.5.14 or 0.5.23, which is not installed")


def wide(one: Given, dtype: torch.dtype = torch.int32) -> Given:
    return Given(one.x.repeat(1, -(-WIDE // one.x.shape[1]))[:, :WIDE], one.idx.to(dtype), one.weights, one.bias)


def layers(steps: list[list[Given]], fp8: bool, mode: str) -> None:
    again = mock.patch("ep_ops.integrations.sglang.quantization", side_effect=AssertionError("imported in each call"))
    with server(fp8, mode) as make:
        dispatcher, other = make(), make()
        assert type(dispatcher).__name__ == "MaybeTboDeepEPDispatcher"
        (inner,), comms = dispatcher._inners, set()
        dispatcher.set_quant_config({"weight_dtype": torch.float8_e4m3fn})
        for number, step in enumerate(steps):
            for extend in (True, False) if mode == "auto" else (mode == "normal",):
                one = wide(step[dist.get_rank()], torch.int64 if number % 2 else torch.int32)
                with extending(extend), again:
                    for layer in (dispatcher, other):
                        out = layer.dispatch(
                            hidden_states=one.x,
                            topk_output=SimpleNamespace(topk_ids=one.idx, topk_weights=one.weights),
                        )
                        if hasattr(out, "expected_m"):  # rows of an expert on average, rounded up
                            assert out.expected_m == 1 + len(one.x) * RANKS * one.idx.shape[1] // EXPERTS
                        check(one, layer.combine(combine_input=of_experts(out)), fp8)
                    part = inner._get_impl()
                comms.add(part.comm)
                with pytest.raises(RuntimeError, match="combine was called before dispatch, which plans the route"):
                    part._taken()
        (comm,) = comms  # of all layers and modes
        assert comm.max_tokens_per_rank == (FEW if mode == "low_latency" else MANY)
        assert comm.config.latency_max_tokens == 256 > FEW
        comm.destroy()


@pytest.mark.parametrize("mode", ["auto", "normal", "low_latency"])
@pytest.mark.parametrize("fp8", [False, True])
def test_layers(sglang: None, fp8: bool, mode: str) -> None:
    seed = cases.fresh_seed()
    steps = [draw(seed + i, tokens) for i, tokens in enumerate([(5, 7), (8, 3), (4, 0), (0, 6)])]
    run_ranks(RANKS, layers, steps, fp8, mode, **run)


def packed() -> None:
    """Dispatch for DeepGEMM on a Blackwell GPU."""
    from sglang.srt.layers import deep_gemm_wrapper as wrapper

    one = wide(draw(3, (FEW,) * RANKS)[dist.get_rank()])
    given = dict(hidden_states=one.x, topk_output=SimpleNamespace(topk_ids=one.idx, topk_weights=one.weights))
    with server(True, "low_latency") as make, extending(False):
        layer = make()
        layer.set_quant_config({"weight_dtype": torch.float8_e4m3fn})
        for jit, blackwell in ((True, True), (True, False), (False, True)):
            with mock.patch.multiple(wrapper, ENABLE_JIT_DEEPGEMM=jit, DEEPGEMM_BLACKWELL=blackwell):
                out = layer.dispatch(**given)
                scales = out.hidden_states_scale
                expected = (torch.int32, 1) if jit and blackwell else (torch.float32, WIDE // 128)
                assert (scales.dtype, scales.shape[-1]) == expected
                (inner,) = layer._inners
                part = inner._get_impl()
                part._taken()
        part.comm.destroy()


def test_scales_for_blackwell(sglang: None) -> None:
    """Rows have four exponents in a word if DeepGEMM takes them so, else scales in float32."""
    run_ranks(RANKS, packed, **run)


def operators() -> list[list[str]]:
    """The operators of a layer for low latency, with one batch in progress and with two."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func._opname.startswith(("view", "_unsafe_view", "slice", "empty", "detach", "transpose", "alias")):
                names.append(func._opname)
            return func(*args, **(kwargs or {}))

    found = []
    one = wide(draw(3, (FEW,) * RANKS)[dist.get_rank()])
    given = dict(hidden_states=one.x, topk_output=SimpleNamespace(topk_ids=one.idx, topk_weights=one.weights.float()))
    for tbo in (False, True):
        names: list[str] = []
        with server(False, "low_latency", tbo) as make, extending(False):
            layer = make()
            batch: dict[str, Any] = {"tbo_subbatch_index": 1} if tbo else {}
            with Seen():
                out = layer.dispatch(**given, **batch)
            y = of_experts(out)
            with Seen():
                home = layer.combine(combine_input=y, **batch)
            check(one, home, False)
            comms = [inner._get_impl().comm for inner in layer._inners]
            assert len(comms) == len(set(comms)) == (2 if tbo else 1)
            for comm in comms:
                comm.destroy()
        found.append(names)
    return found


def test_operators_of_a_layer(sglang: None) -> None:
    for whole, split in run_ranks(RANKS, operators, **run):
        assert whole == ["dispatch", "combine"]
        assert split == ["dispatch_start", "dispatch_wait", "combine_start", "combine_wait"]


def two_batches(given: list[list[Given]]) -> None:
    """Two batches in turns, as SGLang's two-batch overlap runs them."""
    with server(False, "low_latency", tbo=True) as make, extending(False):
        layer, steps, outs = make(), [wide(step[dist.get_rank()]) for step in given], []
        for at, one in enumerate(steps):
            topk = SimpleNamespace(topk_ids=one.idx, topk_weights=one.weights)
            layer.dispatch_a(hidden_states=one.x, topk_output=topk, tbo_subbatch_index=at)
        for at in (0, 1):
            outs.append(layer.dispatch_b(tbo_subbatch_index=at))
            layer.combine_a(combine_input=of_experts(outs[at]), tbo_subbatch_index=at)
        for at, one in enumerate(steps):
            check(one, layer.combine_b(tbo_subbatch_index=at), False)
        for inner in layer._inners:
            inner._get_impl().comm.destroy()


def test_two_batches_in_progress(sglang: None) -> None:
    seed = cases.fresh_seed()
    run_ranks(RANKS, two_batches, [draw(seed, (5, 2)), draw(seed + 1, (3, 8))], **run)


def others() -> None:
    """Other backends keep SGLang's dispatchers; what is not supported raises."""
    from sglang.srt.layers.moe.token_dispatcher import deepep
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    from ep_ops.integrations import sglang as ours

    one = wide(draw(5, (4, 6))[dist.get_rank()])
    with server(False, "low_latency") as make, extending(False):
        deepep.DeepEPBuffer.clean_buffer()  # SGLang's own needs a buffer
        layer = make()
        (inner,) = layer._inners
        for name in ("nvfp4", "mxfp8"):
            with mock.patch.object(ours.deepep._DeepEPDispatcherImplBase, "set_quant_config", lambda self, _: None):
                part = inner._get_impl()
                setattr(part, f"use_{name}", True)
                with pytest.raises(NotImplementedError, match=f"SGLang chose {name} rows; EP_OPS_SGLANG supports"):
                    part.set_quant_config({})
                setattr(part, f"use_{name}", False)
        topk = SimpleNamespace(topk_ids=one.idx, topk_weights=one.weights)
        out = layer.dispatch(hidden_states=one.x, topk_output=topk)
        layer.set_overlap_args(SimpleNamespace(), {})
        with pytest.raises(NotImplementedError, match="does not support --enable-single-batch-overlap"):
            layer.combine(combine_input=of_experts(out))
        part.comm.destroy()
        with mock.patch.object(ours, "get_moe_a2a_backend", lambda: MoeA2ABackend.NONE):
            seen: list[Any] = []
            assert ours._around(lambda *args: seen.append(args), "config", "method") is None
            assert seen == [("config", "method")]


def test_what_is_not_supported(sglang: None) -> None:
    run_ranks(RANKS, others, **run)


def bounds() -> list[Any]:
    """The bound on tokens of normal mode by the server's settings, and what is said of a wrong variable."""
    with server(False, "low_latency"):
        from ep_ops.integrations import sglang as ours

        found: list[Any] = []
        context = importlib.import_module("sglang.srt.runtime_context")
        owner, name = context, "get_schedule"
        if not hasattr(context, "get_schedule"):
            owner, name = importlib.import_module("sglang.srt.server_args"), "get_global_server_args"
        for chunk, prefill, running, mixed, draft in (
            (4096, 16384, None, False, None), (-1, 16384, 48, False, None), (None, 16384, 48, True, None),
            (64, 16384, 512, False, None), (64, 16384, 512, True, None), (64, 16384, 512, False, 4),
        ):  # fmt: skip
            settings = SimpleNamespace(
                chunked_prefill_size=chunk, max_prefill_tokens=prefill, max_running_requests=running,
                enable_mixed_chunk=mixed, speculative_num_draft_tokens=draft,
            )  # fmt: skip
            with contextlib.ExitStack() as replaced:
                replaced.enter_context(mock.patch.object(owner, name, lambda settings=settings: settings))
                if hasattr(context, "get_spec"):
                    replaced.enter_context(mock.patch.object(context, "get_spec", lambda settings=settings: settings))
                with mock.patch.dict("os.environ", {"EP_OPS_SGLANG_MAX_TOKENS": ""}):
                    found.append(ours._most_tokens(128))
                with mock.patch.dict("os.environ", {"EP_OPS_SGLANG_MAX_TOKENS": "96"}):
                    assert ours._most_tokens(128) == 96
        for wrong in ("0", "many"):
            with mock.patch.dict("os.environ", {"EP_OPS_SGLANG_MAX_TOKENS": wrong}):
                with pytest.raises(ValueError, match=f"EP_OPS_SGLANG_MAX_TOKENS is '{wrong}'; expected a positive"):
                    ours._most_tokens(128)
        return found


def test_the_bound_on_tokens(sglang: None) -> None:
    assert run_ranks(1, bounds, **run) == [[4096, 16384, 16432, 512, 576, 2048]]


def too_many() -> None:
    """Rank 0 passes a batch that is too large. All ranks learn which variable allows it, and go on."""
    modes = (
        ("normal", MANY, "EP_OPS_SGLANG_MAX_TOKENS"),
        ("low_latency", FEW, "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"),
    )
    right = wide(draw(3, (FEW, FEW))[dist.get_rank()])
    for mode, most, variable in modes:
        for tbo in (False, True):
            with server(False, mode, tbo) as make, extending(mode == "normal"):
                layer, batch = make(), {"tbo_subbatch_index": 1} if tbo else {}
                repeats = (most + 1, 1) if dist.get_rank() == 0 else (1, 1)
                rows = (one[:1].repeat(repeats) for one in (right.x, right.idx, right.weights))
                x, ids, weights = rows
                with pytest.raises(
                    ValueError, match=f"SGLang passed {most + 1} tokens .* at most {most}. Set {variable}"
                ):
                    topk = SimpleNamespace(topk_ids=ids, topk_weights=weights)
                    layer.dispatch(hidden_states=x, topk_output=topk, **batch)
                layer = make()  # whose stage is the first one
                topk = SimpleNamespace(topk_ids=right.idx, topk_weights=right.weights)
                out = layer.dispatch(hidden_states=right.x, topk_output=topk, **batch)
                check(right, layer.combine(combine_input=of_experts(out), **batch), False)
                for comm in dict.fromkeys(
                    inner._get_impl().comm for inner in layer._inners
                ):  # in one order on all ranks
                    comm.destroy()


def test_a_batch_of_too_many_tokens(sglang: None) -> None:
    run_ranks(RANKS, too_many, **run)


def test_without_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    monkeypatch.delitem(sys.modules, "ep_ops.integrations.sglang", raising=False)
    with pytest.raises(ImportError, match=r"needs SGLang 0\.5\.14 or 0\.5\.23.*pip install sglang==0\.5\.23"):
        importlib.import_module("ep_ops.integrations.sglang")
