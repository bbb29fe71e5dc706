"""DeepEP's ElasticBuffer (ep_ops.integrations.deep_ep) against plain loops over all ranks' tokens."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import cases
import pytest
import quantized
import torch
import torch.distributed as dist
from deep_ep_cases import EXPERTS, HIDDEN, OWN, RANKS, TOKENS, TOP_K, Given, coming, draw, same
from ranks import run_ranks

from ep_ops.integrations import deep_ep
from ep_ops.integrations.deep_ep import ElasticBuffer, EPHandle


def _elastic(given: list[Given]) -> dict[tuple[bool, bool, int], dict[str, Any]]:
    """By whether rows are expanded, whether the host waits, and the alignment."""
    mine, results = given[dist.get_rank()], {}
    buffer = ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=16, explicitly_destroy=True)
    codes, scales = quantized.quantized(mine.x, "128/fp32")
    quantized_x = codes.view(torch.float8_e4m3fn), scales.float()
    for expand in (False, True):
        for sync in (False, True):
            for align in (1, 4):
                how: dict[str, Any] = dict(
                    topk_idx=mine.idx, num_experts=EXPERTS, expert_alignment=align, do_cpu_sync=sync, do_expand=expand,
                )  # fmt: skip
                stats = torch.zeros(OWN, dtype=torch.int32)
                rows, idx, weights, handle, event = buffer.dispatch(
                    mine.x, topk_weights=mine.weights, cumulative_local_expert_recv_stats=stats,
                    async_with_compute_stream=True, previous_event=buffer.capture(), num_max_tokens_per_rank=12, **how
                )  # fmt: skip
                event.current_stream_wait()
                out: dict[str, Any] = {"sent": (rows, idx, weights), "stats": stats}
                out["handle"] = {f.name: getattr(handle, f.name) for f in dataclasses.fields(handle)}
                del out["handle"]["route"]
                out["sources"], out["slots"] = handle.recv_src_metadata, handle.dst_buffer_slot_idx
                (recv, recv_scales), *_ = buffer.dispatch(quantized_x, use_tma_aligned_col_major_sf=expand, **how)
                out["quantized"] = recv.view(torch.uint8), recv_scales.contiguous()
                packed = (quantized_x[0], words_of(mine))
                (_, words), *_, again, _ = buffer.dispatch(packed, use_tma_aligned_col_major_sf=expand, **how)
                out["words"] = words, buffer.dispatch(packed, handle=again)[0][1]
                again = buffer.dispatch(2 * mine.x, topk_weights=mine.weights + 1, handle=handle)
                assert again[3] is handle
                out["again"] = again[:3]
                assert buffer.dispatch(mine.x, handle=handle)[2] is None
                y = rows.nan_to_num() * (dist.get_rank() + 2)
                home = (weights + 3).contiguous()
                out["combined"] = buffer.combine(y, handle, topk_weights=home, bias=mine.bias[0])[:2]
                assert torch.equal(buffer.combine(y, handle, bias=mine.bias[0])[0], out["combined"][0])
                results[expand, sync, align] = out
    buffer.destroy()
    return results


def test_elastic_buffer() -> None:
    given = draw(cases.fresh_seed())
    results = run_ranks(RANKS, _elastic, given)
    for rank, result in enumerate(results):
        here = coming(given, rank)
        ids = torch.stack([given[s].idx[t] for s, t in here])
        local = torch.where(ids // OWN == rank, ids - rank * OWN, -1)
        weights = torch.stack([given[s].weights[t] for s, t in here])
        counts = [int((local == expert).sum()) for expert in range(OWN)]
        for (expand, sync, align), got in result.items():
            sizes = [-(-count // align) * align for count in counts]
            handle = got["handle"]
            assert handle["num_recv_tokens_per_expert_list"] == (sizes if sync else [])
            assert handle["psum_num_recv_tokens_per_scaleup_rank"].tolist() == [
                sum(s <= r for s, _ in here) for r in range(RANKS)
            ]
            begins = [sum(sizes[:expert]) for expert in range(OWN)]
            ends = [begin + (count if expand else size)
                    for begin, count, size in zip(begins, counts, sizes, strict=True)]  # fmt: skip
            assert handle["psum_num_recv_tokens_per_expert"].tolist() == ends
            assert handle["num_unaligned_recv_tokens_per_expert"].tolist() == counts == got["stats"].tolist()
            _check_sources(got, rank, here, local, expand, begins)
            assert (handle["expert_alignment"], handle["num_max_tokens_per_rank"]) == (align, 12)
            assert torch.equal(handle["topk_idx"], given[rank].idx) and handle["num_experts"] == EXPERTS
            assert handle["num_recv_tokens"] == (len(here) if sync else RANKS * 12)
            # Of each row that holds a token: which (row here, k) it stands for.
            if expand:
                of = {}
                for expert, begin in enumerate(begins):
                    found = (local == expert).nonzero().tolist()
                    of |= {begin + number: tuple(at) for number, at in enumerate(found)}
                held = sum(sizes) if sync else RANKS * 12 * min(TOP_K, OWN) + OWN * (align - 1)
            else:
                of = {row: (row, None) for row in range(len(here))}
                held = len(here) if sync else RANKS * 12
            rows, idx, row_weights = got["sent"]
            assert rows.shape[0] == held if sync else held <= rows.shape[0] < held + align
            assert handle["num_expanded_tokens"] == (rows.shape[0] if expand else 0)
            assert (idx is None) == expand
            again, again_idx, again_weights = got["again"]
            recv, scales = got["quantized"]
            for row, (at, k) in of.items():
                x = given[here[at][0]].x[here[at][1]]
                same(rows[row], x)
                same(again[row], 2 * x)
                for words in got["words"]:
                    same(words[row], words_of(given[here[at][0]])[here[at][1]])
                codes, wanted = quantized.quantized(x[None], "128/fp32")
                same(recv[row], codes[0])
                same(scales[row], wanted[0].float())
                if k is None:
                    same(idx[row], local[at])
                    same(again_idx[row], local[at])
                    same(row_weights[row], weights[at].where(local[at] >= 0, 0))
                    same(again_weights[row], (weights[at] + 1).where(local[at] >= 0, 0))
                else:
                    assert row_weights[row] == weights[at, k] and again_weights[row] == weights[at, k] + 1
            if not expand:
                assert (idx[len(here) :] == -1).all()
    for one, result in zip(given, results, strict=True):
        for (expand, _, _), got in result.items():
            out, home = got["combined"]
            factor = torch.zeros(one.x.shape[0], 1)
            wanted = torch.zeros(one.idx.shape)
            for token, experts in enumerate(one.idx.tolist()):
                for r in one.ranks[token]:
                    named = [expert // OWN == r and expert >= 0 for expert in experts]
                    factor[token] += (r + 2) * (sum(named) if expand else 1)
                    own = torch.tensor(named)
                    if expand:
                        wanted[token] += torch.where(own, one.weights[token] + 3, 0)
                    else:
                        wanted[token] += torch.where(own, one.weights[token], 0) + 3
            torch.testing.assert_close(out.float(), one.x.float() * factor + one.bias[0].float(), rtol=3e-2, atol=3e-2)
            torch.testing.assert_close(home, wanted)


def words_of(one: Given) -> torch.Tensor:
    """int32 [T, 1]: scales of four exponents, many of which would be NaNs if they were numbers."""
    return (one.x[:, :2].contiguous().view(torch.int32) * 0x01000193) | 0x40000000


def _check_sources(
    got: dict[str, Any], rank: int, here: list[tuple[int, int]], local: torch.Tensor, expand: bool, begins: list[int]
) -> None:
    """``recv_src_metadata``, which is longer where the host has not waited."""
    place, bound = list(begins), 12
    for row, (source, token) in enumerate(here):
        ids = local[row].tolist()
        slots = [-1] * TOP_K
        for k in range(TOP_K) if expand else ():
            if ids[k] >= 0:
                slots[k], place[ids[k]] = place[ids[k]], place[ids[k]] + 1
        first = next(k for k in range(TOP_K) if ids[k] >= 0)
        assert got["sources"][row].tolist() == [source * bound + token, source * TOP_K + first, *slots]
    assert (got["sources"][len(here) :] == -1).all()
    assert got["slots"].shape == (TOKENS[rank], TOP_K) and got["slots"].dtype == torch.int32


def _home(given: list[Given], once: bool) -> list[Any]:
    """Rows of experts, by (token, k), and their sums with no, one and two biases; rows by token likewise."""
    rank, mine = dist.get_rank(), given[dist.get_rank()]
    buffer = ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=16, allow_multiple_reduction=once, explicitly_destroy=True
    )
    out = []
    for expand in (False, True):
        for sync in (False, True):
            how = dict(num_experts=EXPERTS, expert_alignment=4, do_expand=expand, do_cpu_sync=sync)
            rows, *_, handle, _ = buffer.dispatch(mine.x, mine.idx, mine.weights, **how)
            draw = torch.Generator().manual_seed(rank)
            y = torch.randn(rows.shape, generator=draw).bfloat16()
            sources, handle.recv_src_metadata = handle.recv_src_metadata, None
            combined = [buffer.combine(y, handle, bias=bias)[0] for bias in (None, mine.bias[0], mine.bias)]
            out.append((expand, y, sources, combined))
    buffer.barrier()
    buffer.destroy()
    return out


@pytest.mark.parametrize("several", [True, False])
def test_where_sums_are_rounded(several: bool) -> None:
    """Sums are rounded once, at the owner, but for a rank's partial sums of expanded rows if multiple reductions are
    allowed."""
    given = draw(cases.fresh_seed())
    results = run_ranks(RANKS, _home, given, several)
    for case in range(4):
        sums = [torch.zeros(one.x.shape) for one in given]
        for result in results:
            expand, y, sources, _ = result[case]
            for row, (asker, _, *slots) in enumerate(sources.tolist()):
                if asker < 0:
                    continue
                parts = [y[slot] for slot in slots if slot >= 0] if expand else [y[row]]
                part = torch.stack(parts).float().sum(0)
                sums[asker // 16][asker % 16] += part.bfloat16().float() if several else part
        for one, total, result in zip(given, sums, results, strict=True):
            first, second = one.bias[0].float(), one.bias[1].float()
            for got, bias in zip(result[case][3], (0, first, first + second), strict=True):
                same(got, (total + bias).bfloat16())


def _elastic_rejections() -> list[str]:
    buffer, said = ElasticBuffer(dist.group.WORLD, allow_multiple_reduction=False, num_bytes=7), []
    assert (buffer.num_bytes, buffer.num_max_tokens_per_rank, buffer.num_ranks) == (7, 0, RANKS)
    assert ElasticBuffer.get_buffer_size_hint(dist.group.WORLD, 8, 128) == 0
    assert buffer.get_theoretical_num_qps(20) == buffer.num_allocated_qps == 0
    assert buffer.get_logical_domain_size() == deep_ep.get_logical_domain_size(dist.group.WORLD) == (1, RANKS)
    assert buffer.get_physical_domain_size() == deep_ep.get_physical_domain_size(dist.group.WORLD) == (1, RANKS)
    assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, dist.get_rank())
    assert buffer.get_theoretical_num_sms(num_experts=8, num_topk=2) > 0 and weakref.ref(buffer)() is buffer
    x, idx = torch.zeros(2, HIDDEN).bfloat16(), torch.zeros(2, TOP_K).long()
    *_, handle, _ = buffer.dispatch(x, idx, idx.float(), num_experts=EXPERTS, num_max_tokens_per_rank=4, do_expand=True)
    assert isinstance(handle, EPHandle)
    y = torch.zeros(handle.num_expanded_tokens, HIDDEN).bfloat16()
    for call in (
        buffer.destroy, lambda: buffer.dispatch(x, idx, num_experts=EXPERTS),
        lambda: buffer.dispatch(x, idx, num_experts=5, num_max_tokens_per_rank=4),
        lambda: buffer.dispatch(x, idx, handle=handle), lambda: buffer.dispatch(x, handle=handle, do_cpu_sync=True),
        lambda: buffer.dispatch((x, idx.int()), idx, num_experts=EXPERTS, num_max_tokens_per_rank=4),
        lambda: buffer.dispatch((x, idx), idx, num_experts=EXPERTS, num_max_tokens_per_rank=4),
        lambda: buffer.combine(y, handle, topk_weights=y[:, 0].float()),
    ):  # fmt: skip
        try:
            call()
            said.append("nothing")
        except (RuntimeError, TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    buffer.communicators.destroy()
    return said


def test_what_the_elastic_buffer_rejects() -> None:
    texts = [
        "RuntimeError: destroy was called",
        "ValueError: topk_idx or num_experts is None, or num_max_tokens_per_rank is 0", "ValueError: num_experts is 5",
        *2 * ["ValueError: topk_idx or do_cpu_sync is given with handle"],
        "ValueError: scales of x have shape (2, 3)", "TypeError: scales of x have dtype torch.int64",
        "ValueError: topk_weights of expanded rows",
    ]  # fmt: skip
    for said in run_ranks(RANKS, _elastic_rejections):
        assert len(said) == len(texts)
        for got, text in zip(said, texts, strict=True):
            assert got.startswith(text), (got, text)
