"""The sequences of calls that vLLM and SGLang make through DeepEP's interface, on two ranks, also in CUDA graphs.

Each expert multiplies its rows by its number plus one. Code of Megatron-core and vLLM runs where they are installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import megatron_cases
import pytest
import torch
import torch.distributed as dist
import vllm_cases
from deep_ep_cases import EXPERTS, HIDDEN, OWN, RANKS, TOKENS, TOP_K, Given, draw
from torch import Tensor

from ep_ops.integrations.deep_ep import Buffer, ElasticBuffer

DEVICE = "cuda"
MOST = 16  # tokens of any rank, where they are few
MANY = (300, 270)  # more than the latency kernels take
pytestmark = pytest.mark.skipif(os.environ.get("WORLD_SIZE") != str(RANKS), reason=f"needs {RANKS} ranks")


def wanted() -> list[tuple[dict[str, Any], int, list[tuple[str, str]]]]:
    """Configurations, bounds of latency kernels and formats that these tests use, for precompile.py."""
    config = dict(num_experts=EXPERTS, top_k=TOP_K, hidden_size=HIDDEN, max_tokens_per_rank=MOST)
    rows, *columns = (("e4m3/128/fp32", "rows"), ("e4m3/128/fp32", "columns"), ("e4m3/128/pow2", "columns"))
    return [
        (config, MOST, [rows, *columns, ("e4m3/128/pow2", "packed")]),
        (config | {"max_tokens_per_rank": 512}, 0, [rows]),
        (config | {"dtype": torch.float32}, MOST, []),
        (config | {"dtype": torch.float32, "hidden_size": 4}, MOST, []),
        (config | {"hidden_size": vllm_cases.WIDE}, MOST, columns[:1]),
        (config | {"dtype": torch.float32, "hidden_size": vllm_cases.WIDE}, MOST, []),
    ]


# ---------------------------------------------------------------------- experts


def with_scales(x: Tensor, kind: str) -> Any:
    """Return x, or its codes and scales: float32, or four exponents in an int32."""
    if kind == "bf16":
        return x
    blocks = x.float().unflatten(-1, (-1, 128))
    scales = blocks.abs().amax(-1).clamp(min=1e-4) / 448
    if kind == "ue8m0":
        scales = scales.log2().ceil().exp2()
    codes = (blocks / scales[..., None]).flatten(-2).to(torch.float8_e4m3fn)
    if kind == "fp8":
        return codes, scales
    exponents = scales.view(torch.int32) >> 23
    return codes, sum(exponents[:, i::4] << 8 * i for i in range(min(4, exponents.shape[1])))


def numbers(rows: Any) -> Tensor:
    """Return rows as float32."""
    if isinstance(rows, Tensor):
        return rows.float()
    codes, scales = rows
    if scales.dtype == torch.int32:
        exponents = torch.stack([scales >> 8 * i & 255 for i in range(4)], -1).flatten(-2)
        scales = (exponents[..., : codes.shape[-1] // 128] << 23).view(torch.float32)
    return (codes.float().unflatten(-1, (-1, 128)) * scales[..., None]).flatten(-2)


def of_tokens(rows: Any, local: Tensor, weights: Tensor) -> Tensor:
    """Return what the experts make of token-major rows, weighted and summed."""
    number = local + 1 + dist.get_rank() * OWN
    return (numbers(rows) * torch.where(local >= 0, number * weights, 0).sum(1, keepdim=True)).bfloat16()


def expected(mine: Given) -> Tensor:
    factor = torch.where(mine.idx >= 0, (mine.idx + 1) * mine.weights, 0).sum(1, keepdim=True)
    return mine.x.float() * factor


# ---------------------------------------------------------------------- sequences of calls


def throughput(buffer: Any, mine: Given, kind: str, alignment: int) -> Tensor:
    """vLLM's high throughput, SGLang's normal mode."""
    previous = Buffer.capture()
    per_rank, rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(
        mine.idx, EXPERTS, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
    )
    rows, local, weights, counts, handle, event = buffer.dispatch(
        with_scales(mine.x, kind), topk_idx=mine.idx, topk_weights=mine.weights, num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=rdma, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        previous_event=event, async_finish=True, allocate_on_comm_stream=True, expert_alignment=alignment,
        config=Buffer.get_dispatch_config(RANKS),
    )  # fmt: skip
    event.current_stream_wait()
    assert counts == [-(-int((local == i).sum()) // alignment) * alignment for i in range(OWN)]
    out, _, event = buffer.combine(
        of_tokens(rows, local, weights), handle, async_finish=True, previous_event=Buffer.capture(),
        allocate_on_comm_stream=True, config=Buffer.get_combine_config(RANKS),
    )  # fmt: skip
    event.current_stream_wait()
    return out


def latency_sent(buffer: Any, mine: Given, **asked: Any) -> tuple[Tensor, Any]:
    """A dispatch for few tokens, and the experts' rows."""
    rows, counts, handle, _, hook = buffer.low_latency_dispatch(
        mine.x, mine.idx, MOST, EXPERTS, async_finish=False, return_recv_hook=True, **asked
    )
    hook()
    x = numbers(rows)
    number = torch.arange(1, OWN + 1, device=x.device)[:, None, None] + dist.get_rank() * OWN
    place = torch.arange(x.shape[1], device=x.device) < counts[:, None]
    return torch.where(place[..., None], x * number, torch.nan).bfloat16(), handle


def latency_home(buffer: Any, mine: Given, y: Tensor, handle: Any) -> Tensor:
    out = torch.full_like(mine.x, torch.nan)
    _, _, hook = buffer.low_latency_combine(
        y, mine.idx, mine.weights, handle, async_finish=False, zero_copy=False, return_recv_hook=True, out=out
    )
    hook()
    return out


def latency(buffer: Any, mine: Given, sends_weights: bool = False, **asked: Any) -> Tensor:
    """Low latency mode of both, with weights that are sent with the tokens or before the combine."""
    if sends_weights:
        asked["topk_weights"] = mine.weights
    return latency_home(buffer, mine, *latency_sent(buffer, mine, **asked))


def two_in_flight(buffer: Any, mine: Given) -> Tensor:
    """Micro-batches whose dispatches both precede the combine of the first."""
    parts = [Given(mine.x[half], mine.idx[half], mine.weights[half], mine.bias) for half in (slice(3), slice(3, None))]
    sent = [latency_sent(buffer, part, use_fp8=False) for part in parts]
    return torch.cat([latency_home(buffer, part, *one) for part, one in zip(parts, sent, strict=True)])


def compact(buffer: Any, mine: Given, kind: str) -> Tensor:
    """vLLM's second version in CUDA graphs."""
    rows, local, weights, handle, event = buffer.dispatch(
        with_scales(mine.x, kind), topk_idx=mine.idx, topk_weights=mine.weights, num_experts=EXPERTS,
        num_max_tokens_per_rank=MOST, do_cpu_sync=False, do_handle_copy=False, async_with_compute_stream=True,
    )  # fmt: skip
    event.current_stream_wait()
    out, _, event = buffer.combine(of_tokens(rows, local, weights), handle, async_with_compute_stream=True)
    event.current_stream_wait()
    return out


def expanded(buffer: Any, mine: Given, kind: str, waits: bool) -> Tensor:
    """SGLang's second version, for decode (the host does not wait) and prefill; vLLM's without CUDA graphs."""
    rows, _, weights, handle, event = buffer.dispatch(
        with_scales(mine.x, kind), topk_idx=mine.idx, topk_weights=mine.weights, num_experts=EXPERTS,
        num_max_tokens_per_rank=MOST, expert_alignment=128, do_cpu_sync=waits, do_expand=True, do_handle_copy=False,
        use_tma_aligned_col_major_sf=kind != "bf16", previous_event=buffer.capture(), async_with_compute_stream=True,
    )  # fmt: skip
    event.current_stream_wait()
    x, ends = numbers(rows), handle.psum_num_recv_tokens_per_expert
    begins = torch.cat([ends.new_zeros(1), (ends[:-1] + 127) // 128 * 128])
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    own = (row >= begins) & (row < ends)
    number = (own * torch.arange(1, OWN + 1, device=x.device)).sum(1) + dist.get_rank() * OWN
    y = torch.where(own.any(1), number * weights, torch.nan)[:, None] * x
    return buffer.combine(y.bfloat16(), handle)[0]


# ---------------------------------------------------------------------- tests


def eager(call: Callable[[Given], Tensor], steps: list[Given]) -> list[Tensor]:
    return [call(step.to(DEVICE)).cpu() for step in steps]


def replayed(call: Callable[[Given], Tensor], steps: list[Given]) -> list[Tensor]:
    """Run the steps as replays of one CUDA graph. Steps before the capture compile, and create communicators."""
    mine, graph = steps[0].to(DEVICE), torch.cuda.CUDAGraph()
    call(mine)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = call(mine)
    outs = []
    for step in steps:
        for name in ("x", "idx", "weights"):
            getattr(mine, name).copy_(getattr(step, name))
        out.fill_(torch.nan)
        graph.replay()
        outs.append(out.cpu())
    return outs


LATENCY: dict[str, dict[str, bool]] = {
    "bf16": {"use_fp8": False}, "fp32 scales": {"use_fp8": True}, "pow2 scales": {"round_scale": True},
    "ue8m0": {"round_scale": True, "use_ue8m0": True},
}  # fmt: skip
CASES: dict[str, tuple[Any, Any, Any, Any, dict[str, Any]]] = {
    **{f"throughput, {kind}": (Buffer, eager, MANY, throughput, {"kind": kind, "alignment": alignment})
       for kind, alignment in (("bf16", 1), ("fp8", 128), ("ue8m0", 128))},
    **{f"latency, {name}": (Buffer, replayed, TOKENS, latency, asked) for name, asked in LATENCY.items()},
    **{f"latency, {name}, weights sent with the tokens":
       (Buffer, replayed, TOKENS, latency, {"sends_weights": True, **LATENCY[name]})
       for name in ("bf16", "fp32 scales")},
    "latency, two in flight": (Buffer, replayed, TOKENS, two_in_flight, {}),
    **{f"compact, {kind}": (ElasticBuffer, replayed, TOKENS, compact, {"kind": kind}) for kind in ("bf16", "fp8")},
    **{f"expanded, {kind}{', the host waits' * waits}":
       (ElasticBuffer, eager if waits else replayed, TOKENS, expanded, {"kind": kind, "waits": waits})
       for kind in ("bf16", "ue8m0") for waits in (False, True)},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sequence_of_calls(name: str, seed: int, together: Any) -> None:
    kind, way, tokens, call, asked = CASES[name]
    more = (
        {} if kind is Buffer else {"num_max_tokens_per_rank": MOST, "allow_multiple_reduction": not asked.get("waits")}
    )
    buffer = kind(dist.group.WORLD, explicitly_destroy=True, **more)
    steps = [draw(seed + step, tokens)[dist.get_rank()] for step in range(3)]
    with together():
        outs = way(lambda mine: call(buffer, mine, **asked), steps)
        tolerance = 2e-2 if "bf16" in name or "flight" in name else 7e-2
        for step, out in zip(steps, outs, strict=True):
            torch.testing.assert_close(out.float(), expected(step), rtol=tolerance, atol=tolerance)
    buffer.destroy()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM 0.33")
@pytest.mark.parametrize("how", ["whole", "asynchronous"])
@pytest.mark.parametrize("kind", [*vllm_cases.KINDS, "compact"])
def test_vllms_prepare_and_finalize(kind: str, how: str, seed: int, together: Any) -> None:
    steps = [draw(seed + step)[dist.get_rank()] for step in range(3)]
    way = eager if kind in ("many", "expanded") else replayed
    with together():
        buffer, fill = vllm_cases.make(kind, how)

        def call(mine: Given) -> Tensor:
            out = torch.full_like(mine.x, torch.nan)
            fill(mine, out)
            return out

        outs = way(call, [vllm_cases.widened(step) for step in steps])
        for step, out in zip(steps, outs, strict=True):
            vllm_cases.check(step, out, kind)
    buffer.destroy()


needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs Megatron-core 0.16")
CLOSE = dict(rtol=1e-4, atol=1e-5)


@needs_megatron
@pytest.mark.parametrize("flags", [False, True])
def test_megatrons_fused_operations(flags: bool, seed: int, together: Any) -> None:
    given = draw(seed)
    up = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed)) / HIDDEN**0.5
    with together():
        got = megatron_cases.fused(given, up, flags, DEVICE)
        wanted = megatron_cases.dense(given, up)[dist.get_rank()]
        torch.testing.assert_close([one.cpu() for one in got], wanted, **CLOSE)


@needs_megatron
def test_megatrons_layer(seed: int, together: Any) -> None:
    given = draw(seed)
    results: list[Any] = [None] * RANKS
    with together():
        dist.all_gather_object(results, megatron_cases.layer(given, DEVICE))
        megatron_cases.check_layers(given, results, **CLOSE)
