"""A call that DeepEP's module rejects on one rank raises on all ranks, and the buffer can be used afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from ep_ops.integrations.deep_ep import Buffer, ElasticBuffer

EXPERTS, TOP_K, MOST, HIDDEN, TOKENS = 6, 2, 8, 128, 4
X, IDS, WEIGHTS = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.tensor([[0, 3]] * TOKENS), torch.ones(TOKENS, TOP_K)


def text_of(call: Callable[..., Any], given: dict[str, Any]) -> str:
    try:
        call(**given)
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


def low_latency(first: bool, sent: bool) -> list[tuple[str, str]]:
    """With a wrong argument on rank 1, (its name, the error here). `first`: in the first call of a buffer. `sent`: the
    weights are sent with the tokens."""
    wrong_rank = dist.get_rank() == 1
    dispatches: dict[str, dict[str, Any]] = {
        "num_experts": {"num_experts": 7}, "use_nvfp4": {"use_nvfp4": True},
        "dispatch_wait_recv_cost_stats": {"dispatch_wait_recv_cost_stats": WEIGHTS}, "x": {"x": X[None]},
        "topk_idx": {"topk_idx": IDS.tolist()}, "num_max_dispatch_tokens_per_rank":
        {"num_max_dispatch_tokens_per_rank": "8"},
    }  # fmt: skip
    combines: dict[str, dict[str, Any]] = {}
    if not first:
        combines = {
            "overlap": {"overlap": True}, "combine_wait_recv_cost_stats": {"combine_wait_recv_cost_stats": WEIGHTS},
            "zero_copy": {"zero_copy": True}, "handle": {"handle": (1, 2)}, "topk_weights": {"topk_weights": WEIGHTS.T},
            "topk_idx": {"topk_idx": IDS[1:]}, "x": {"x": X[:, 1:]},
        }  # fmt: skip
    found = []
    buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
    usual: dict[str, Any] = dict(
        x=X, topk_idx=IDS, num_max_dispatch_tokens_per_rank=MOST, num_experts=EXPERTS, use_fp8=False,
        topk_weights=WEIGHTS if sent else None,
    )  # fmt: skip
    if not first:
        rows, _, handle, *_ = buffer.low_latency_dispatch(**usual)
        back: dict[str, Any] = dict(x=rows, topk_idx=IDS, topk_weights=WEIGHTS, handle=handle)
        if sent:  # else the others create a communicator for the weights, which raises another error
            found.append(("x has", text_of(buffer.low_latency_combine, back | ({"x": X[:, 1:]} if wrong_rank else {}))))
        right = buffer.low_latency_combine(**back)[0]
    for name, wrong in dispatches.items():
        found.append((name, text_of(buffer.low_latency_dispatch, usual | (wrong if wrong_rank else {}))))
        if first:
            buffer.destroy()
            buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
        else:
            assert torch.equal(buffer.low_latency_dispatch(**usual)[1], handle.route.counts)
    for name, wrong in combines.items():
        found.append((name, text_of(buffer.low_latency_combine, back | (wrong if wrong_rank else {}))))
        assert torch.equal(buffer.low_latency_combine(**back)[0], right)
    buffer.low_latency_dispatch(**usual)
    buffer.destroy()
    return found


@pytest.mark.parametrize(("first", "sent"), [(False, False), (False, True), (True, False)])
def test_rejections_of_low_latency_operations(first: bool, sent: bool) -> None:
    for rank, found in enumerate(run_ranks(2, low_latency, first, sent)):
        for name, text in found:
            assert name in text, (rank, name, text)


def throughput(bound: int | None) -> list[tuple[str, str]]:
    wrong_rank, found = dist.get_rank() == 1, []
    Buffer.max_tokens_per_rank = bound
    buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(IDS, EXPERTS)
    usual: dict[str, Any] = dict(
        x=X, topk_idx=IDS, topk_weights=WEIGHTS, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
    )  # fmt: skip
    found.append(("topk_idx", text_of(buffer.dispatch, usual | ({"topk_idx": IDS[0]} if wrong_rank else {}))))
    rows, _, _, counts, handle, _ = buffer.dispatch(**usual)
    back: dict[str, Any] = dict(x=rows, handle=handle)
    found.append(("x", text_of(buffer.combine, back | ({"x": X[0]} if wrong_rank else {}))))
    right = buffer.combine(**back)[0]
    for name, wrong in {
        "num_experts": {"num_tokens_per_expert": per_expert.new_zeros(7)}, "topk_idx": {"topk_idx": IDS[0]},
        "is_token_in_rank": {"is_token_in_rank": None}, "scales": {"x": (X, X)},
        "expert_alignment": {"expert_alignment": torch.tensor([2, 2])}, "expert_alignment is 0":
        {"expert_alignment": 0},
    }.items():  # fmt: skip
        found.append((name, text_of(buffer.dispatch, usual | (wrong if wrong_rank else {}))))
        assert buffer.dispatch(**usual)[3] == counts
    again: dict[str, Any] = dict(x=X, handle=handle)
    for name, wrong in {"topk_idx": {"topk_idx": IDS}, "handle": {"handle": 3}}.items():
        found.append((name, text_of(buffer.dispatch, again | (wrong if wrong_rank else {}))))
        assert torch.equal(buffer.dispatch(**again)[0], rows)
    wrongs: dict[str, Any] = {"handle": {"handle": 3}, "topk_weights": {"topk_weights": torch.ones(3)}}
    wrongs |= {"x is": {"x": [1]}, "x has": {"x": X[0]}}
    wrongs |= {"bias is": {"bias": (1, 2)}, "bias has": {"bias": (X, X, X)}}
    for name, wrong in wrongs.items():
        found.append((name, text_of(buffer.combine, back | (wrong if wrong_rank else {}))))
        assert torch.equal(buffer.combine(**back)[0], right)
    buffer.destroy()
    Buffer.max_tokens_per_rank = None
    return found


@pytest.mark.parametrize("bound", [None, MOST])
def test_rejections_of_throughput_operations(bound: int | None) -> None:
    for rank, found in enumerate(run_ranks(2, throughput, bound)):
        for name, text in found:
            assert name in text, (rank, name, text)


def elastic() -> list[tuple[str, str]]:
    wrong_rank, found = dist.get_rank() == 1, []
    buffer = ElasticBuffer(
        dist.group.WORLD, num_max_tokens_per_rank=MOST, allow_multiple_reduction=False, explicitly_destroy=True
    )
    usual: dict[str, Any] = dict(x=X, topk_idx=IDS, topk_weights=WEIGHTS, num_experts=EXPERTS, do_expand=True)
    found.append(("topk_idx", text_of(buffer.dispatch, usual | ({"topk_idx": None} if wrong_rank else {}))))
    rows, _, weights, handle, _ = buffer.dispatch(**usual)
    back: dict[str, Any] = dict(x=rows, handle=handle)
    right = buffer.combine(**back)[0]
    for name, wrong in {
        "num_experts": {"num_experts": 7}, "topk_idx": {"topk_idx": None}, "scales": {"x": (X, X)},
        "num_max_tokens_per_rank": {"num_max_tokens_per_rank": 0}, "expert_alignment": {"expert_alignment": "2"},
    }.items():  # fmt: skip
        found.append((name, text_of(buffer.dispatch, usual | (wrong if wrong_rank else {}))))
        assert torch.equal(buffer.dispatch(**usual)[0], rows)
    wrongs: dict[str, Any] = {"topk_weights of": {"topk_weights": weights}, "handle": {"handle": 3}}
    wrongs |= {"bias": {"bias": 3}, "x": {"x": X[0]}, "topk_weights has": {"topk_weights": torch.ones(3)}}
    for name, wrong in wrongs.items():
        found.append((name, text_of(buffer.combine, back | (wrong if wrong_rank else {}))))
        assert torch.equal(buffer.combine(**back)[0], right)
    buffer.destroy()
    return found


def test_rejections_of_elastic_buffers() -> None:
    for rank, found in enumerate(run_ranks(2, elastic)):
        for name, text in found:
            assert name in text, (rank, name, text)
