"""Models of transformers with their experts spread over two ranks, against themselves in one piece."""

from __future__ import annotations

import copy
import importlib
import pathlib
from typing import Any

import pytest

pytest.importorskip("transformers.distributed.expert_parallel", reason="needs transformers 5.23 or later")

import torch
import torch.distributed as dist
from ranks import run_ranks

import ep_ops
from ep_ops.nn import expert_parameters

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


def made(kind: str, experts: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | MODELS[kind])
    config._attn_implementation, config._experts_implementation = "eager", experts
    model = AutoModelForCausalLM.from_config(config).float()
    for parameter in model.parameters():  # biases begin as zeros
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(3, 64, (2, 5 + rank), generator=torch.Generator().manual_seed(rank))


def loss_of(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(ids, use_cache=False).logits
    return logits, logits.float().square().mean()


def spread(kind: str, how: str, implementation: str) -> dict[str, float]:
    """Largest relative differences: of the logits, and of each gradient of the losses' sum over ranks."""
    from torch.distributed.tensor import DTensor
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    from ep_ops.integrations.transformers import register, spread_experts

    model, dense = made(kind, implementation), made(kind, implementation)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = [name for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")]
    batches = [0] * ranks if how == "same batch" else range(ranks)  # of each rank
    if how != "spread" and how != "compiled":
        register(max_tokens_per_rank=16)
        shape = (1, ranks) if how == "same batch" else (ranks, 1)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("ep", "tp"))
        ep, tp = mesh["tp" if how == "same batch" else "ep"], mesh["tp"]
        plan = {}
        for name in names:
            plan |= {f"{name}.{p}": "grouped_gemm" for p, _ in model.get_submodule(name).named_parameters()}
            plan[name] = "ep_dispatch_experts"
        apply_expert_parallelism(model, ep, tp, plan, "ep_ops")
    else:
        assert spread_experts(model, max_tokens_per_rank=16) == names and names
        held = [p for name in names for p in model.get_submodule(name).parameters()]
        for _ in range(2):
            assert list(map(id, expert_parameters(model))) == list(map(id, held))
    if "compiled" in how:
        for name in names:
            block = model.get_submodule(name.rpartition(".")[0])
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=kind == "qwen3_moe")
    logits, loss = loss_of(model, tokens(batches[rank]))
    loss.backward()
    expected, _ = loss_of(dense, tokens(batches[rank]))
    sum(loss_of(dense, tokens(batch))[1] for batch in set(batches)).backward()

    def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
        assert got.shape == wanted.shape and got.isfinite().all()
        return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9))

    found = {"logits": difference(logits, expected)}
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        if q.grad is None:
            continue
        got = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        own = q.shape[0] // ranks
        if any(name.startswith(f"{e}.") for e in names):
            found[name] = difference(got, q.grad[rank * own : (rank + 1) * own])
        else:
            if how != "same batch":
                dist.all_reduce(got)
            found[name] = difference(got, q.grad)
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()
    return found


WAYS = [
    *(("spread", implementation) for implementation in ("eager", "grouped_mm", "batched_mm")),
    ("registered", "grouped_mm"), ("same batch", "grouped_mm"),
]  # fmt: skip
COMPILED = ("qwen3_moe", "gpt_oss")  # one graph; graphs around a router, and experts with biases


@pytest.mark.parametrize(("how", "implementation", "kind"), [
    *((*way, kind) for way in WAYS for kind in MODELS),
    *((how, "grouped_mm", kind) for how in ("compiled", "registered and compiled") for kind in COMPILED),
])  # fmt: skip
def test_spread_experts(kind: str, how: str, implementation: str) -> None:
    for found in run_ranks(2, spread, kind, how, implementation):
        worst = max(found, key=lambda name: found[name])
        assert found[worst] < 1e-3, (worst, found[worst])


OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "top_k_experts": ("gemma4", "Gemma4Text", dict(num_experts=6, top_k_experts=2)),
    "moe_topk": ("aria", "AriaText", dict(moe_num_experts=6, moe_topk=2)),
    "moe_topk of each layer": ("hunyuan_v1_moe", "HunYuanMoEV1", dict(num_experts=6, moe_topk=[2, 2])),
    "narrower rows": ("nemotron_h", "NemotronH", dict(n_routed_experts=6, moe_latent_size=16)),
    "a norm behind": ("muse_spark", "MuseSparkText", dict(num_local_experts=6, moe_hidden_size=16)),
}
"""Folder, name of the configuration, and sizes."""


def some_experts(folder: str, name: str, sizes: dict[str, Any]) -> Any:
    """A model that is one module of experts."""
    library = f"transformers.models.{folder}"
    sizes = dict(hidden_size=32, intermediate_size=24, moe_intermediate_size=24, num_attention_heads=4) | sizes
    if not any("top" in size for size in sizes):
        sizes["num_experts_per_tok"] = 2
    config = getattr(importlib.import_module(f"{library}.configuration_{folder}"), f"{name}Config")(**sizes)
    config._experts_implementation = "grouped_mm"
    modelling = vars(importlib.import_module(f"{library}.modeling_{folder}"))
    (made,) = [kind for key, kind in modelling.items() if key.endswith("Experts") and hasattr(kind, "_apply_gate")]
    torch.manual_seed(0)
    experts = made(config).float()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return torch.nn.ModuleList([experts])


def spread_others(kind: str) -> None:
    from ep_ops.integrations.transformers import spread_experts

    model, dense, rank = some_experts(*OTHERS[kind]), some_experts(*OTHERS[kind]), dist.get_rank()
    assert spread_experts(model, max_tokens_per_rank=16) == ["0"]
    width = dense[0].down_proj.shape[1 + dense[0].is_transposed]
    for number in range(2):  # of the rank whose tokens these are
        draw = torch.Generator().manual_seed(number)
        x, weights = torch.randn(5 + number, width, generator=draw), torch.rand(5 + number, 2, generator=draw)
        ids = torch.rand(5 + number, 6, generator=draw).argsort(1)[:, :2]
        wanted = dense[0](x, ids, weights)
        wanted.square().sum().backward()
        if number == rank:
            got = model[0](x, ids, weights)
            got.square().sum().backward()
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    held = expert_parameters(model)
    for p, q in zip(model.parameters(), dense.parameters(), strict=True):
        everyone = p.shape == q.shape  # which all ranks hold, and data parallelism averages
        assert any(p is own for own in held) != everyone
        if everyone:
            dist.all_reduce(p.grad)
        torch.testing.assert_close(
            p.grad, q.grad if everyone else q.grad[3 * rank : 3 * rank + 3], rtol=1e-3, atol=1e-3
        )
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


@pytest.mark.parametrize("kind", OTHERS)
def test_sizes_by_other_names(kind: str) -> None:
    run_ranks(2, spread_others, kind)


def test_nobody_says_top_k() -> None:
    from ep_ops.integrations.transformers import spread_experts

    model = some_experts("gemma4", "Gemma4Text", dict(num_experts=6, top_k_experts=None))
    with pytest.raises(ValueError, match="top_k is not given, and Gemma4TextConfig has none of num_experts_per_tok, "):
        spread_experts(model, max_tokens_per_rank=4)
    model[0].config.moe_topk = [2, 3]  # of each layer
    with pytest.raises(ValueError, match=r"top_k is not given, and Gemma4TextConfig tells \[2, 3\]; allowed: an int"):
        spread_experts(model, max_tokens_per_rank=4)
    assert spread_experts(model, max_tokens_per_rank=4, top_k=3) == ["0"]
    (comm,) = ep_ops.registry.living.values()
    with comm:
        assert (comm.top_k, comm.hidden_size) == (3, 32)


def test_a_model_without_experts() -> None:
    from ep_ops.integrations.transformers import spread_experts

    with pytest.raises(ValueError, match="Linear has no experts"):
        spread_experts(torch.nn.Linear(2, 2), max_tokens_per_rank=4)


def spread_again() -> None:
    from ep_ops.integrations.transformers import spread_experts

    model, dense = made("qwen3_moe", "grouped_mm"), made("qwen3_moe", "grouped_mm")
    (first, *_) = spread_experts(model, max_tokens_per_rank=16)
    with pytest.raises(ValueError, match=f"{first} of Qwen3MoeForCausalLM is spread over ranks already"):
        spread_experts(model, max_tokens_per_rank=16)
    ids = tokens(dist.get_rank())
    torch.testing.assert_close(loss_of(model, ids)[0], loss_of(dense, ids)[0])
    with torch.inference_mode():
        torch.testing.assert_close(loss_of(model, ids)[0], loss_of(dense, ids)[0])
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


def test_a_model_is_spread_once() -> None:
    run_ranks(2, spread_again)


def saved(path: str) -> None:
    from torch.distributed import checkpoint as dcp
    from transformers import AutoModelForCausalLM

    from ep_ops.integrations.transformers import spread_experts
    from ep_ops.nn import resharding_state_dict

    model, dense = made("qwen3_moe", "grouped_mm"), made("qwen3_moe", "grouped_mm")
    (first, *_) = spread_experts(model, max_tokens_per_rank=16)
    for asked in (model.save_pretrained, copy.deepcopy(model).save_pretrained):
        with pytest.raises(NotImplementedError, match="save_pretrained would save the experts of one rank alone"):
            asked(path)
    comm = model.get_submodule(first).comm
    dcp.save(resharding_state_dict(model, comm), checkpoint_id=f"{path}/spread")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
    dcp.load(resharding_state_dict(model, comm), checkpoint_id=f"{path}/spread")
    ids = tokens(dist.get_rank())
    torch.testing.assert_close(loss_of(model, ids)[0], loss_of(dense, ids)[0])
    comm.destroy()
    model.save_pretrained(f"{path}/whole", state_dict=dense.state_dict())
    dist.barrier()
    read = AutoModelForCausalLM.from_pretrained(f"{path}/whole")
    torch.testing.assert_close(read.state_dict(), dense.state_dict(), rtol=0, atol=0)


def test_nothing_is_saved_in_part(tmp_path: pathlib.Path) -> None:
    run_ranks(2, saved, str(tmp_path))


def generated() -> None:
    """Ranks whose sequences end at different times."""
    from ep_ops.integrations.transformers import spread_experts

    model, dense = made("qwen3_moe", "grouped_mm").eval(), made("qwen3_moe", "grouped_mm").eval()
    spread_experts(model, max_tokens_per_rank=16)
    ids, rank = tokens(dist.get_rank()), dist.get_rank()
    how: dict[str, Any] = dict(max_new_tokens=3 + 4 * rank, do_sample=False, eos_token_id=None, pad_token_id=0)
    got = model.generate(ids, synced_gpus=True, **how)
    assert torch.equal(got, dense.generate(ids, **how)) and got.shape == (2, 8 + 5 * rank)
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


def loaded(path: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from ep_ops.integrations.transformers import register

    dense = made("qwen3_moe", "grouped_mm")
    dense.save_pretrained(path)
    dist.barrier()
    register(max_tokens_per_rank=16)
    ranks, ids = dist.get_world_size(), tokens(dist.get_rank())
    config = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="ep_ops")
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config, attn_implementation="eager")
    assert model.model.layers[0].mlp.experts.num_experts == 6 // ranks
    torch.testing.assert_close(loss_of(model, ids)[0], loss_of(dense, ids)[0])
    (comm,) = ep_ops.registry.living.values()
    comm.destroy()


def test_loading(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate, with which transformers loads in parts")
    run_ranks(2, loaded, str(tmp_path))


def test_generation() -> None:
    run_ranks(2, generated)


def more_ranks_than_experts(kind: str, frozen: bool) -> None:
    from ep_ops.integrations.transformers import spread_experts

    MODELS[kind] = MODELS[kind] | {name: 2 for name in MODELS[kind] if "experts" in name}
    model, dense, rank = made(kind, "grouped_mm"), made(kind, "grouped_mm"), dist.get_rank()
    names = spread_experts(model, max_tokens_per_rank=16)
    for whole in (model, dense):
        for name, p in whole.named_parameters():
            p.requires_grad_(not frozen or any(name.startswith(f"{e}.") for e in names))
    logits, loss = loss_of(model, tokens(rank))
    loss.backward()
    torch.testing.assert_close(logits, loss_of(dense, tokens(rank))[0])
    sum(loss_of(dense, tokens(batch))[1] for batch in range(3)).backward()
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        if not any(name.startswith(f"{e}.") for e in names) and q.grad is not None:
            dist.all_reduce(p.grad)
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
        elif rank < 2 and q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad[rank : rank + 1], rtol=1e-3, atol=1e-5)
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


@pytest.mark.parametrize("frozen", [False, True])  # but for the experts
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_rank_without_experts(kind: str, frozen: bool) -> None:
    run_ranks(3, more_ranks_than_experts, kind, frozen, timeout=60)
