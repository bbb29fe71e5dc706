"""Small models of transformers for tests, their inputs and their loss. Skips modules that import it where
transformers is missing or too old."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("transformers.models.llama4.modeling_llama4", reason="needs transformers 5.19 or later")

import torch
import torch.distributed as dist

SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts_per_tok=2, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(num_experts=6),
    "mixtral": dict(num_local_experts=6),
    "deepseek_v3": dict(
        n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
    ),
    "gpt_oss": dict(num_local_experts=6, layer_types=["full_attention"] * 2),
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "llama4_text": dict(num_local_experts=6, intermediate_size_mlp=48, moe_layers=[1]),
    "afmoe": dict(num_experts=6, num_shared_experts=1, global_attn_every_n_layers=2, sliding_window=4),
    "jamba": dict(
        num_experts=6, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_expand=2
    ),
    "qwen3_next": dict(
        num_experts=6, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        full_attention_interval=2, shared_expert_intermediate_size=24,
    ),
}  # fmt: skip
"""Other attention or state-space layers around the experts. transformers itself does not spread Llama 4's."""


def made(kind: str, experts: str, **sizes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | (MODELS | MORE)[kind] | sizes)
    config._attn_implementation = "eager"
    if kind != "llama4_text":  # which has one implementation
        config._experts_implementation = experts
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():  # biases begin as zeros
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(3, 64, (2, 5 + rank), generator=torch.Generator().manual_seed(rank))


def loss_of(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(ids, use_cache=False).logits
    return logits, logits.float().square().mean()


def rows_as_received() -> Any:
    """Raise AssertionError in experts that would sort rows which are grouped already."""
    from ep_ops.integrations.local_experts import LocalExperts

    return mock.patch.object(LocalExperts, "with_ids", side_effect=AssertionError("rows are sorted again"))


def need_implementations() -> None:
    """Skip a test of transformers' own expert parallelism where its implementations cannot be registered."""
    from ep_ops.integrations import transformers as ours

    if ours._no_interface is not None:
        pytest.skip("needs transformers 5.23 or later")


@contextlib.contextmanager
def as_by_torchrun() -> Iterator[None]:
    """Set what accelerate reads in a process that torchrun has started, and reset accelerate in the end."""
    from accelerate.state import AcceleratorState

    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # not used: the group exists
    with mock.patch.dict(os.environ, names):
        try:
            yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
