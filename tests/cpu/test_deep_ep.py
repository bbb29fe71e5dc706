"""DeepEP's interface (ep_ops.integrations.deep_ep) against plain loops over all ranks' tokens."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cases
import pytest
import quantized
import torch
import torch.distributed as dist
from deep_ep_cases import EXPERTS, HIDDEN, OWN, RANKS, TOP_K, Given, coming, draw, same, sums
from ranks import run_ranks
from torch import Tensor

from ep_ops import registry
from ep_ops.integrations import deep_ep
from ep_ops.integrations.deep_ep import Buffer, Config, EventHandle, EventOverlap, communicators

# ---------------------------------------------------------------------- many tokens


def _many(given: list[Given], bound: int | None) -> dict[str, Any]:
    mine = given[dist.get_rank()]
    Buffer.max_tokens_per_rank = bound
    buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
    per_rank, _, per_expert, in_rank, event = layout = buffer.get_dispatch_layout(mine.idx, EXPERTS)
    known = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
    routed = known | dict(topk_idx=mine.idx, topk_weights=mine.weights)
    out: dict[str, Any] = {"layout": layout[:4], "no event": event.event is None}
    *out["plain"], handle, event = buffer.dispatch(mine.x, **routed, async_finish=True)
    event.current_stream_wait()
    out["prefix"] = handle[0]
    *out["aligned"], _, _ = buffer.dispatch(mine.x, **routed, expert_alignment=8)
    *out["worst"], worst, _ = buffer.dispatch(mine.x, **routed, num_worst_tokens=2 * 12)
    *out["without ids"], plain, _ = buffer.dispatch(mine.x, **known)
    codes, scales = quantized.quantized(mine.x, "128/fp32")
    quantized_x = codes.view(torch.float8_e4m3fn), scales.float()
    (recv, recv_scales), *_ = buffer.dispatch(quantized_x, **routed)
    out["quantized"] = recv.view(torch.uint8), recv_scales.contiguous()
    out["again"] = buffer.dispatch(2 * mine.x, handle=handle)[:5]
    (recv, recv_scales), *_ = buffer.dispatch(quantized_x, handle=handle)
    out["again quantized"] = recv.view(torch.uint8), recv_scales.contiguous()
    words = torch.arange(mine.x.shape[0], dtype=torch.int32)[:, None] - 2**30  # four exponents each
    out["words"] = buffer.dispatch((codes.view(torch.float8_e4m3fn), words), **routed)[0][1]
    rows, _, weights, _ = out["plain"]
    noise = torch.arange(HIDDEN).remainder(7).add(dist.get_rank() + 1).bfloat16()
    y = rows * noise
    out["y"] = y
    out["combined"] = buffer.combine(y, handle)[:2]
    out["weights home"] = buffer.combine(y, handle, topk_weights=weights + 1)[:2]
    out["bias"] = buffer.combine(y, handle, bias=mine.bias[0])[0]
    out["two biases"] = buffer.combine(y, handle, bias=mine.bias)[0]
    filled = torch.zeros_like(out["worst"][0])
    filled[: y.shape[0]] = y
    out["worst combined"] = buffer.combine(filled, worst)[0]
    out["combined without ids"] = buffer.combine(y, plain, previous_event=buffer.capture())[0]
    buffer.destroy()
    Buffer.max_tokens_per_rank = None
    return out


@pytest.mark.parametrize("bound", [None, 16])
def test_many_tokens(bound: int | None) -> None:
    seed = cases.fresh_seed()
    given = draw(seed)
    results = run_ranks(RANKS, _many, given, bound)
    for rank, (one, got) in enumerate(zip(given, results, strict=True)):
        per_rank, none, per_expert, in_rank = got["layout"]
        assert none is None and got["no event"]
        assert per_rank.dtype == per_expert.dtype == torch.int32 and in_rank.dtype == torch.bool
        assert in_rank.tolist() == [[r in ranks for r in range(RANKS)] for ranks in one.ranks]
        assert per_rank.tolist() == [sum(r in ranks for ranks in one.ranks) for r in range(RANKS)]
        assert per_expert.tolist() == [int((one.idx == expert).sum()) for expert in range(EXPERTS)]

        here = coming(given, rank)
        x = torch.stack([given[s].x[t] for s, t in here])
        idx = torch.stack([given[s].idx[t] for s, t in here])
        local = torch.where(idx // OWN == rank, idx - rank * OWN, -1)
        weights = torch.stack([given[s].weights[t] for s, t in here]).where(local >= 0, 0)
        counts = [int((local == expert).sum()) for expert in range(OWN)]
        for name, wanted in (("plain", counts), ("aligned", [-(-count // 8) * 8 for count in counts])):
            recv_x, recv_idx, recv_weights, listed = got[name]
            same(recv_x, x)
            same(recv_idx, local)
            same(recv_weights, weights)
            assert listed == wanted
        recv_x, recv_idx, recv_weights, listed = got["worst"]
        assert recv_x.shape[0] == 24 and listed == []
        same(recv_x[: len(here)], x)
        same(recv_idx[: len(here)], local)
        assert (recv_idx[len(here) :] == -1).all() and not recv_weights[len(here) :].any()
        recv_x, recv_idx, recv_weights, listed = got["without ids"]
        same(recv_x, x)
        assert recv_idx is None and recv_weights is None and listed == counts
        assert got["prefix"][:, rank].tolist() == [sum(s <= r for s, _ in here) for r in range(RANKS)]
        same(got["again"][0], 2 * x)
        assert got["again"][1:] == (None,) * 4
        codes, scales = quantized.quantized(x, "128/fp32")
        assert got["words"].dtype == torch.int32
        assert got["words"].tolist() == [[t - 2**30] for _, t in here]
        for name in ("quantized", "again quantized"):
            same(got[name][0], codes)
            same(got[name][1], scales.float())

    total = sums(given, [got["y"] for got in results])
    weights = sums(given, [got["plain"][2] + 1 for got in results])
    for one, got, wide, weight in zip(given, results, total, weights, strict=True):
        same(got["combined"][0], wide.bfloat16())
        assert got["combined"][1] is None
        same(got["weights home"][0], wide.bfloat16())
        same(got["weights home"][1], weight)
        same(got["bias"], (wide + one.bias[0].float()).bfloat16())
        same(got["two biases"], (wide + (one.bias[0].float() + one.bias[1].float())).bfloat16())
        same(got["worst combined"], wide.bfloat16())
        same(got["combined without ids"], wide.bfloat16())


def _sizes(given: list[list[Given]]) -> list[tuple[Tensor, Tensor]]:
    """More tokens than before, with handles of earlier dispatches still in use; then none on one rank."""
    buffer, results, handles = Buffer(dist.group.WORLD), [], []
    for step in given:
        mine = step[dist.get_rank()]
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.idx, EXPERTS)
        sent = buffer.dispatch(
            mine.x, topk_idx=mine.idx, topk_weights=mine.weights, num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        )  # fmt: skip
        handles.append((sent[0], sent[4]))
    for rows, handle in handles:
        results.append((rows, buffer.combine(rows, handle)[0]))
    buffer.communicators.destroy()
    return results


def test_sizes_that_grow() -> None:
    steps = [draw(cases.fresh_seed() + i, tokens) for i, tokens in enumerate([(2, 1), (30, 4), (0, 3), (0, 0)])]
    results = run_ranks(RANKS, _sizes, steps)
    for step, given in enumerate(steps):
        total = sums(given, [result[step][0] for result in results])
        for rank, result in enumerate(results):
            assert result[step][0].shape[0] == len(coming(given, rank))
            same(result[step][1], total[rank].bfloat16())


def _captured(given: list[list[Given]]) -> list[list[Any]]:
    """The most tokens of the communicators that live: after each call for ever more tokens, of which a CUDA graph has
    captured the second, and after destroy."""
    before = set(registry.living)
    buffer, living = Buffer(dist.group.WORLD, explicitly_destroy=True), []
    for number, step in enumerate(given):
        mine, most = step[dist.get_rank()], 4 << number
        with mock.patch("ep_ops.integrations.deep_ep.communicators._capturing", return_value=number == 1):
            sent = buffer.low_latency_dispatch(mine.x, mine.idx, most, EXPERTS, use_fp8=False)
            out, *_ = buffer.low_latency_combine(sent[0].nan_to_num(), mine.idx, mine.weights, sent[2])
        expected = torch.where(mine.idx >= 0, mine.weights, 0).sum(1, keepdim=True) * mine.x.float()
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
        sizes = [comm.config for name, comm in registry.living.items() if name not in before]
        living.append(sorted(size.max_tokens_per_rank for size in sizes if size.hidden_size == HIDDEN))
    buffer.destroy()
    return [*living, sorted(set(registry.living) - before)]


def test_what_a_graph_has_captured_stays() -> None:
    given = [draw(cases.fresh_seed() + i, (2, 4)) for i in range(4)]
    assert run_ranks(RANKS, _captured, given) == RANKS * [[[4], [8], [8, 16], [8, 32], []]]


def _ids_that_are_none() -> str:
    buffer, mine = Buffer(dist.group.WORLD, explicitly_destroy=True), draw(0)[dist.get_rank()]
    if dist.get_rank():
        mine.idx[2, 1] = 3 * EXPERTS
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.idx, EXPERTS)
    assert int(per_expert.sum()) == int(((mine.idx >= 0) & (mine.idx < EXPERTS)).sum())
    try:
        buffer.dispatch(
            mine.x, topk_idx=mine.idx, topk_weights=mine.weights, num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        )  # fmt: skip
    except ValueError as error:
        buffer.destroy()
        return str(error)
    return ""


def test_ids_that_are_none() -> None:
    told = f"topk_idx[2, 1] is {3 * EXPERTS} on rank 1; expert ids are 0..{EXPERTS - 1}, or -1 for none"
    assert all(text.endswith(told) for text in run_ranks(RANKS, _ids_that_are_none))


# ---------------------------------------------------------------------- few tokens


def _few(given: list[Given], most: int) -> dict[str, Any]:
    mine = given[dist.get_rank()]
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    buffer.clean_low_latency_buffer(most, HIDDEN, EXPERTS)
    out: dict[str, Any] = {}
    stats = torch.zeros(OWN, dtype=torch.int32)
    for name, asked in {
        "plain": {"use_fp8": False}, "fp32": {}, "pow2": {"round_scale": True},
        "packed": {"round_scale": True, "use_ue8m0": True},
    }.items():  # fmt: skip
        rows, counts, handle, event, hook = buffer.low_latency_dispatch(
            mine.x, mine.idx, most, EXPERTS, cumulative_local_expert_recv_stats=stats, return_recv_hook=True, **asked
        )
        hook()
        assert event.event is None
        out[name] = rows if name == "plain" else (rows[0].view(torch.uint8), rows[1])
        out[f"{name} strides"] = None if name == "plain" else rows[1].stride()
        out[f"{name} counts"], out[f"{name} handle"] = counts, tuple(handle)
    out["stats"] = stats
    rows, _, handle, *_ = buffer.low_latency_dispatch(mine.x, mine.idx, most, EXPERTS, use_fp8=False)
    expert = torch.arange(1, OWN + 1)[:, None, None] + dist.get_rank() * OWN
    y = (rows.nan_to_num() * expert).bfloat16()
    overlap = dict(overlap=False, packed_recv_count=rows, comp_signal=rows, block_m=64, threshold=2, num_sms=3)
    combined, event, hook = buffer.low_latency_combine(y, mine.idx, mine.weights, handle, async_finish=True, **overlap)
    event.current_stream_wait()
    out["combined"] = combined
    target = torch.empty_like(mine.x)
    buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
    returned, _, hook = buffer.low_latency_combine(
        torch.empty_like(y), mine.idx, mine.weights, handle, zero_copy=True, return_recv_hook=True, out=target
    )
    hook()
    assert returned is target
    out["in place"] = target
    buffer.destroy()
    return out


def test_few_tokens() -> None:
    given, most = draw(cases.fresh_seed()), 10
    results = run_ranks(RANKS, _few, given, most)
    for rank, got in enumerate(results):
        for name in ("plain", "fp32", "pow2", "packed"):
            src_info, ranges, *sizes = got[f"{name} handle"]
            assert sizes == [most, HIDDEN, EXPERTS] and src_info.dtype == torch.int32 and ranges.dtype == torch.int64
            assert src_info.shape == (OWN, RANKS * most) and ranges.shape == (OWN, RANKS)
            for expert in range(OWN):
                asked = [(s, t) for s, one in enumerate(given) for t in range(one.idx.shape[0])
                         if rank * OWN + expert in one.idx[t].tolist()]  # fmt: skip
                assert got[f"{name} counts"][expert] == len(asked)
                assert src_info[expert, : len(asked)].tolist() == [t for _, t in asked]
                for source in range(RANKS):
                    begin, count = int(ranges[expert, source]) >> 32, int(ranges[expert, source]) & (2**32 - 1)
                    assert [s for s, _ in asked[begin : begin + count]] == [source] * count
                    assert count == sum(s == source for s, _ in asked)
                if not asked:
                    continue
                x = torch.stack([given[s].x[t] for s, t in asked])
                if name == "plain":
                    same(got[name][expert, : len(asked)], x)
                    continue
                codes, scales = quantized.quantized(x, "128/fp32" if name == "fp32" else "128/pow2")
                same(got[name][0][expert, : len(asked)], codes)
                recv = got[name][1][expert, : len(asked)]
                if name == "packed":
                    byte = [quantized.byte_of(scale) for scale in scales[:, 0].tolist()]
                    assert recv.dtype == torch.int32 and recv[:, 0].tolist() == byte
                else:
                    same(recv, scales.float())
                assert got[f"{name} strides"][1:] == (1, RANKS * most)  # columns of all places, for TMA
        assert got["stats"].tolist() == [4 * int(count) for count in got["plain counts"]]
    for one, got in zip(given, results, strict=True):
        factor = torch.where(one.idx >= 0, (one.idx + 1) * one.weights, 0).sum(1, keepdim=True)
        torch.testing.assert_close(got["combined"].float(), one.x.float() * factor, rtol=2e-2, atol=2e-2)
        same(got["in place"], got["combined"])


# ---------------------------------------------------------------------- the module


def _rejections() -> list[str]:
    group = dist.group.WORLD
    buffer, said = Buffer(group), []
    x, idx = torch.zeros(2, HIDDEN).bfloat16(), torch.zeros(2, TOP_K).long()
    layout = buffer.get_dispatch_layout(idx, EXPERTS)
    known = dict(num_tokens_per_rank=layout[0], num_tokens_per_expert=layout[2], is_token_in_rank=layout[3])
    for call in (
        lambda: Buffer(None), lambda: Buffer(group, enable_shrink=True), buffer.destroy, lambda: Buffer.set_num_sms(5),
        lambda: buffer.get_dispatch_layout(idx, 5), lambda: buffer.dispatch(x, topk_idx=idx),
        lambda: buffer.dispatch((x, torch.zeros(2, 2).int()), topk_idx=idx, **known),
        lambda: buffer.dispatch(x, topk_idx=idx, handle=(None,) * 3),
        lambda: buffer.low_latency_dispatch(x, idx, 4, EXPERTS, dispatch_wait_recv_cost_stats=x),
        lambda: buffer.low_latency_dispatch(x, idx, 4, 5),
        lambda: buffer.low_latency_dispatch(x, idx, 4, EXPERTS, use_nvfp4=True),
        lambda: buffer.low_latency_dispatch(x, idx, 4, EXPERTS, x_global_scale=x),
        lambda: buffer.low_latency_combine(x, idx, x, None, overlap=True, comp_signal=idx, block_m=64, threshold=2),
        lambda: buffer.low_latency_combine(x, idx, x, None, combine_wait_recv_cost_stats=x),
        lambda: buffer.low_latency_combine(x, idx, x, None, zero_copy=True),
        buffer.low_latency_clean_mask_buffer, lambda: buffer.low_latency_update_mask_buffer(1, True),
        lambda: buffer.low_latency_query_mask_buffer(idx), lambda: buffer.get_local_buffer_tensor(torch.uint8),
        lambda: EventOverlap().current_stream_wait(),
    ):  # fmt: skip
        try:
            call()
            said.append("nothing")
        except (NotImplementedError, RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    assert weakref.ref(buffer)() is buffer and (buffer.rank, buffer.group_size) == (dist.get_rank(), 2)
    assert buffer.group is group and buffer.num_nvl_bytes == buffer.num_rdma_bytes == 0
    gc.collect()
    return said


def test_what_is_rejected() -> None:
    texts = [
        "NotImplementedError: group must be a torch.distributed", "NotImplementedError: enable_shrink is set",
        "RuntimeError: destroy was called", "ValueError: num_sms is 5; allowed: even", "ValueError: num_experts is 5",
        "ValueError: num_tokens_per_rank, num_tokens_per_expert or is_token_in_rank is None",
        "ValueError: scales of x have shape (2, 2)", "ValueError: topk_idx or topk_weights are given",
        "NotImplementedError: dispatch_wait_recv_cost_stats", "ValueError: num_experts is 5",
        *2 * ["NotImplementedError: use_nvfp4 or x_global_scale is given"], "NotImplementedError: overlap is set",
        "NotImplementedError: combine_wait_recv_cost_stats", "ValueError: zero_copy is set",
        *3 * ["NotImplementedError: ranks cannot be masked"], "NotImplementedError: get_local_buffer_tensor",
        "RuntimeError: there is no event to wait for",
    ]  # fmt: skip
    for said in run_ranks(2, _rejections):
        assert len(said) == len(texts)
        for got, text in zip(said, texts, strict=True):
            assert got.startswith(text), (got, text)


def test_counts_do_not_wait_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the cute backend counts are copied on a stream of their own."""
    seen: list[str] = []

    class Counts:
        device = torch.device("cpu")

        def tolist(self) -> list[int]:
            seen.append("copied")
            return [0, 1, 128, 129]

    @contextlib.contextmanager
    def on(stream: str) -> Iterator[None]:
        seen.append(stream)
        yield
        seen.append("left")

    monkeypatch.setattr(communicators, "_stream", lambda device: "another")
    monkeypatch.setattr(torch.cuda, "stream", on)
    sent: Any = SimpleNamespace(route=SimpleNamespace(counts=Counts()))
    for backend, order in (("reference", ["copied"]), ("cute", ["another", "copied", "left"])):
        comm: Any = SimpleNamespace(config=SimpleNamespace(backend=backend))
        assert communicators.counts_of(sent, comm, 128) == [0, 128, 128, 256]
        assert seen == order
        seen.clear()


def test_scales_come_back_as_they_were_given() -> None:
    """Scales of any dtype and number of columns are sent as words, a column for each 128 numbers, and have their own
    dtype and columns again, in the layout in which they are received."""
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    x = torch.zeros(5, 512, dtype=torch.float8_e4m3fn)
    for columns, dtype in ((4, torch.float32), (1, torch.int32), (4, torch.int32)):
        scales = torch.randint(1 << 30, (5, columns), generator=draw, dtype=torch.int32).view(dtype)
        words = communicators.format_of(x, scales)["scales"]
        assert words.shape == (5, 4) and words.dtype == torch.float32
        for received in (words, words.t().contiguous().t()):
            rows, got = communicators.with_scales(x, received, scales)
            assert rows is x and got.dtype == dtype and got.shape == scales.shape
            assert torch.equal(got.view(torch.int32), scales.view(torch.int32))
            assert got.is_contiguous() or got.stride(0) == received.stride(0) == 1
    assert communicators.with_scales(x, None, scales) is x and communicators.with_scales(x, words, None) is x


def test_sizes_that_clients_ask_for() -> None:
    assert Buffer.get_dispatch_config(2) == Buffer.get_combine_config(7) == Config(Buffer.num_sms)
    assert Config(20, 24, 256, 6, 128).get_nvl_buffer_size_hint(7168, 8) == 0
    assert Config().get_rdma_buffer_size_hint(7168, 8) == Buffer.get_low_latency_rdma_size_hint(1, 2, 3, 4) == 0
    assert deep_ep.topk_idx_t == torch.int64 and deep_ep.__version__ == "2.1.0" and Buffer.is_sm90_compiled()


def test_events() -> None:
    event, waited = EventOverlap(EventHandle(), (torch.ones(1),)), []
    event.register_hook_after_wait(lambda: waited.append(1))
    with pytest.raises(RuntimeError, match="a hook is registered already"):
        event.register_hook_after_wait(waited.clear)
    with event as entered:
        assert entered is event and not waited
    assert waited == [1] and event.event is not None
    with event(release_handle=True):
        pass
    assert waited == [1] and event.event is None  # the hook runs once
    with event:  # nothing to wait for
        pass
    event = EventOverlap(EventHandle())
    event.current_stream_wait(release_handle=True)
    with pytest.raises(RuntimeError, match="there is no event"):
        event.current_stream_wait()


def test_the_bound_on_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "max_tokens_per_rank", None)
    monkeypatch.setitem(sys.modules, "deep_ep", deep_ep)  # as if it were installed
    deep_ep.install()
    assert Buffer.max_tokens_per_rank is None
    monkeypatch.setenv("EP_OPS_DEEP_EP_MAX_TOKENS", "24")
    deep_ep.install()
    assert Buffer.max_tokens_per_rank == 24
    deep_ep.install(max_tokens_per_rank=12)
    assert Buffer.max_tokens_per_rank == 12
    with pytest.raises(ValueError, match="max_tokens_per_rank is 0; expected a positive integer"):
        deep_ep.install(max_tokens_per_rank=0)
    monkeypatch.setenv("EP_OPS_DEEP_EP_MAX_TOKENS", "many")
    with pytest.raises(ValueError, match="EP_OPS_DEEP_EP_MAX_TOKENS is 'many'"):
        deep_ep.install()


def test_install() -> None:
    """install() works in a process of its own, as clients import it, and is rejected where DeepEP is installed."""
    code = (
        "import importlib.util, sys, types; sys.modules['deep_ep'] = types.ModuleType('deep_ep');"
        "import ep_ops.integrations.deep_ep as ours\n"
        "try:\n    ours.install()\n"
        "except RuntimeError as error:\n    assert 'already imported or installed' in str(error)\n"
        "else:\n    raise AssertionError\n"
        "del sys.modules['deep_ep']; ours.install(); ours.install()\n"
        "import deep_ep; from deep_ep import Buffer, Config, topk_idx_t;"
        "from deep_ep.utils import EventHandle, EventOverlap; from deep_ep.buffer import Buffer as again;"
        "assert EventOverlap is ours.EventOverlap and again is Buffer;"
        "assert deep_ep is ours and Buffer is ours.Buffer and importlib.util.find_spec('deep_ep') is not None;"
        "assert hasattr(deep_ep, 'ElasticBuffer') and not hasattr(deep_ep, 'HybridEPBuffer')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)


# ---------------------------------------------------------------------- bounds that differ


def _bounds(kind: str) -> list[str]:
    """Return the results of calls whose bounds are equal, differ within the communicator's size, and differ beyond
    it."""
    rank, said = dist.get_rank(), []
    buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=64, explicitly_destroy=True)
    draw = torch.Generator().manual_seed(rank)
    x, ids = torch.randn(4, 128, generator=draw).bfloat16(), torch.rand(4, 8, generator=draw).topk(2).indices
    weights = torch.ones(4, 2)
    per_rank, _, per_expert, there, _ = buffer.get_dispatch_layout(ids, 8)
    known = dict(num_tokens_per_rank=per_rank, is_token_in_rank=there, num_tokens_per_expert=per_expert)

    def step(bound: int) -> bool:
        if kind == "low latency":
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, bound, 8, use_fp8=False)
            return torch.equal(buffer.low_latency_combine(rows, ids, weights, handle)[0], 2 * x)
        if kind == "worst":
            routed = known | dict(topk_idx=ids, topk_weights=weights)
            rows, _, _, _, handle, _ = buffer.dispatch(x, **routed, num_worst_tokens=2 * bound)
            return torch.equal(buffer.combine(rows, handle)[0], there.sum(1, keepdim=True).bfloat16() * x)
        options = dict(num_experts=8, num_max_tokens_per_rank=bound, do_cpu_sync=kind == "elastic exact")
        rows, _, _, handle, _ = elastic.dispatch(x, topk_idx=ids, topk_weights=weights, **options)
        return torch.equal(elastic.combine(rows, handle)[0], there.sum(1, keepdim=True).bfloat16() * x)

    for bound in (64, 16 << rank, 64 << rank, 128 >> rank, 64, 256, 64):
        try:
            said.append(str(step(bound)))
        except ValueError as error:
            said.append(str(error).partition(": ")[2])
    buffer.destroy()
    elastic.destroy()
    return said


@pytest.mark.parametrize("kind", ["low latency", "worst", "elastic", "elastic exact"])
def test_bounds_that_differ(kind: str) -> None:
    """All ranks raise at once, also if one of them needs a larger communicator; the buffer can be used further."""
    text = "ranks disagree on max_tokens: [{}, {}] by rank; all ranks must pass the same"
    differ = [text.format(16, 32), text.format(64, 128), text.format(128, 64)]
    assert run_ranks(2, _bounds, kind) == [["True", *differ, "True", "True", "True"]] * 2
