"""Models of transformers with their experts spread over two ranks, against themselves in one piece."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import fresh_seed
from ranks import run_ranks
from torch.distributed.tensor import DTensor
from transformers_cases import MODELS, MORE, loss_of, made, need_implementations, rows_as_received, tokens

import ep_ops
from ep_ops.nn import expert_parameters


def spread(kind: str, how: str, implementation: str) -> dict[str, float]:
    """Largest relative differences: of the logits, and of each gradient of the losses' sum over ranks."""
    from ep_ops.integrations.transformers import register, spread_experts

    model, dense = made(kind, implementation), made(kind, implementation)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = [name for name, module in model.named_modules() if type(module).__name__.endswith("Experts")]
    batches = [0] * ranks if how == "same batch" else range(ranks)  # of each rank
    options = {"rows": "token_major", "redispatch": True} if "token-major" in how else {}
    if "registered" in how or how == "same batch":
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        register(max_tokens_per_rank=16, **options)
        shape = (1, ranks) if how == "same batch" else (ranks, 1)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("ep", "tp"))
        ep, tp = mesh["tp" if how == "same batch" else "ep"], mesh["tp"]
        plan = {}
        for name in names:
            plan |= {f"{name}.{p}": "grouped_gemm" for p, _ in model.get_submodule(name).named_parameters()}
            plan[name] = "ep_dispatch_experts"
        apply_expert_parallelism(model, ep, tp, plan, "ep_ops")
    else:
        assert spread_experts(model, max_tokens_per_rank=16, **options) == names and names
        held = [p for name in names for p in model.get_submodule(name).parameters()]
        assert all(isinstance(p, DTensor) and p.device_mesh.mesh_dim_names == ("ep",) for p in held)
        for _ in range(2):
            assert list(map(id, expert_parameters(model))) == list(map(id, held))
    if "compiled" in how:
        for name in names:
            block = model.get_submodule(name.rpartition(".")[0])
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=kind == "qwen3_moe")
    with rows_as_received() if implementation == "grouped_mm" else contextlib.nullcontext():
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


def spread_all(how: str, implementation: str, kinds: list[str]) -> dict[str, float]:
    return {
        f"{kind} {name}": difference for kind in kinds for name, difference in spread(kind, how, implementation).items()
    }


COMPILED = ["qwen3_moe", "gpt_oss"]  # one graph; graphs around a router, and experts with biases


@pytest.mark.parametrize(("how", "implementation", "kinds"), [
    ("spread", "eager", list(MODELS)),
    ("spread", "grouped_mm", [*MODELS, *MORE]),
    ("spread", "batched_mm", list(MODELS)),
    ("registered", "grouped_mm", [kind for kind in [*MODELS, *MORE] if kind != "llama4_text"]),
    ("same batch", "grouped_mm", list(MODELS)),
    ("token-major", "grouped_mm", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next"]),
    pytest.param("compiled, token-major", "grouped_mm", ["qwen3_moe"], marks=pytest.mark.drawn),
    ("registered, token-major", "eager", ["qwen3_moe"]),
    ("compiled", "grouped_mm", COMPILED),
    pytest.param("registered and compiled", "grouped_mm", COMPILED, marks=pytest.mark.drawn),
])  # fmt: skip
def test_spread_experts(how: str, implementation: str, kinds: list[str]) -> None:
    if how not in ("spread", "token-major"):  # older versions do not compile backward of grouped_mm on CPUs
        need_implementations()
    for found in run_ranks(2, spread_all, how, implementation, kinds):
        worst = max(found, key=lambda name: found[name])
        assert found[worst] < 1e-3, (worst, found[worst])
        assert {name.split()[0] for name in found} == set(kinds) and len(found) > 10 * len(kinds)


OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "top_k_experts": ("gemma4", "Gemma4Text", dict(num_experts=6, top_k_experts=2)),
    "moe_topk": ("aria", "AriaText", dict(moe_num_experts=6, moe_topk=2)),
    "moe_topk of each layer": ("hunyuan_v1_moe", "HunYuanMoEV1", dict(num_experts=6, moe_topk=[2, 2])),
    "narrower rows": ("nemotron_h", "NemotronH", dict(n_routed_experts=6, moe_latent_size=16)),
    "a norm behind": ("muse_spark", "MuseSparkText", dict(num_local_experts=6, moe_hidden_size=16)),
    "an activation with parameters": ("nemotron_h", "NemotronH", dict(n_routed_experts=6, mlp_hidden_act="xielu")),
    "biases": ("gpt_oss", "GptOss", dict(num_local_experts=6)),
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


WAYS = {
    "float32": ("grouped_mm", torch.float32, None, 1e-4),
    "bfloat16": ("grouped_mm", torch.bfloat16, None, 2e-2),
    "mixed precision": ("grouped_mm", torch.float32, torch.bfloat16, 2e-2),
    "mixed precision, eager": ("eager", torch.float32, torch.bfloat16, 2e-2),
}
"""transformers' implementation, dtype of the parameters, the argument ``dtype``, and the allowed relative error against
float64."""


def spread_others(kind: str, way: str) -> None:
    from ep_ops.integrations.transformers import spread_experts

    implementation, kept, dtype, allowed = WAYS[way]
    model, dense, rank = some_experts(*OTHERS[kind]).to(kept), some_experts(*OTHERS[kind]).to(kept), dist.get_rank()
    model[0].config._experts_implementation = implementation
    dense = dense.double()
    dense[0].config._experts_implementation = "eager"  # grouped GEMMs do not take float64
    assert spread_experts(model, max_tokens_per_rank=16, dtype=dtype) == ["0"]
    width = dense[0].down_proj.shape[1 + dense[0].is_transposed]

    def close(got: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
        assert got.dtype == kept and got.shape == wanted.shape, (name, got.dtype, got.shape)
        assert (got - wanted).norm() <= allowed * wanted.norm(), (name, (got - wanted).norm() / wanted.norm())

    for number in range(2):  # of the rank whose tokens these are
        draw = torch.Generator().manual_seed(number)
        x, weights = torch.randn(5 + number, width, generator=draw), torch.rand(5 + number, 2, generator=draw)
        ids = torch.rand(5 + number, 6, generator=draw).argsort(1)[:, :2]
        wanted = dense[0](x.double(), ids, weights.double())
        wanted.square().sum().backward()
        if number == rank:
            with rows_as_received() if implementation == "grouped_mm" else contextlib.nullcontext():
                got = model[0](x.to(kept), ids, weights)
                got.float().square().sum().backward()
            close(got, wanted, "outputs")
    held = expert_parameters(model)
    for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        everyone = not isinstance(p, DTensor)  # which all ranks hold, and data parallelism averages
        assert any(p is own for own in held) != everyone and p.shape == q.shape
        if everyone:
            dist.all_reduce(p.grad)
        got = p.grad if everyone else p.grad.to_local()
        close(got, q.grad if everyone else q.grad[3 * rank : 3 * rank + 3], name)
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


@pytest.mark.parametrize(("kind", "way"), [
    pytest.param(kind, way, marks=pytest.mark.drawn if "eager" in way else ())
    for kind in OTHERS for way in WAYS
    if (kind, way) != ("an activation with parameters", "mixed precision, eager")  # its float32 parameters widen rows
])  # fmt: skip
def test_other_experts(kind: str, way: str) -> None:
    pytest.importorskip(f"transformers.models.{OTHERS[kind][0]}", reason="needs a newer transformers")
    run_ranks(2, spread_others, kind, way)


def test_token_major_rows_need_swiglu_experts_without_biases() -> None:
    from ep_ops.integrations.transformers import spread_experts

    for kind in ("gpt_oss", "llama4_text"):
        with pytest.raises(ValueError, match="rows is 'token_major', and the experts are a .*Experts; allowed: SiLU-"):
            spread_experts(made(kind, "eager"), max_tokens_per_rank=16, rows="token_major")
    with pytest.raises(ValueError, match="places is 5; allowed: None, or a positive multiple of alignment 16"):
        spread_experts(made("qwen3_moe", "eager"), max_tokens_per_rank=16, rows="token_major", places=5)
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


def test_register_says_which_version_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is called: spread_experts works with older versions."""
    from ep_ops.integrations import transformers as ours

    if ours._no_interface is None:
        monkeypatch.setattr(ours, "_no_interface", ModuleNotFoundError("No module named 'expert_parallel'"))
    with pytest.raises(ImportError, match="register needs transformers 5.23, .*expert_parallel.*or use spread_experts"):
        ours.register(max_tokens_per_rank=4)


def test_nobody_says_top_k() -> None:
    from ep_ops.integrations.transformers import spread_experts

    model = some_experts("gemma4", "Gemma4Text", dict(num_experts=6, top_k_experts=None))
    with pytest.raises(ValueError, match="top_k is not given, and Gemma4TextConfig has none of num_experts_per_tok, "):
        spread_experts(model, max_tokens_per_rank=4)
    model[0].config.moe_topk = [2, 3]  # of each layer
    with pytest.raises(ValueError, match=r"top_k is not given, and Gemma4TextConfig has \[2, 3\]; pass top_k"):
        spread_experts(model, max_tokens_per_rank=4)
    assert spread_experts(model, max_tokens_per_rank=4, top_k=3) == ["0"]
    (comm,) = ep_ops.registry.living.values()
    with comm:
        assert (comm.top_k, comm.hidden_size) == (3, 32)


def test_a_model_without_experts() -> None:
    from ep_ops.integrations.transformers import spread_experts

    with pytest.raises(ValueError, match="Linear has no MoE layer with transformers' interface of experts"):
        spread_experts(torch.nn.Linear(2, 2), max_tokens_per_rank=4)


def spread_again() -> None:
    from ep_ops.integrations.transformers import spread_experts

    model, dense = made("qwen3_moe", "grouped_mm"), made("qwen3_moe", "grouped_mm")
    (first, *_) = spread_experts(model, max_tokens_per_rank=16)
    with pytest.raises(ValueError, match=r"is \(2, 4\); spread_experts takes the default, \(3, 3\)"):
        spread_experts(dense, max_tokens_per_rank=16, experts_per_rank=[2, 4])
    with pytest.raises(ValueError, match=f"{first} of Qwen3MoeForCausalLM is already spread over ranks"):
        spread_experts(model, max_tokens_per_rank=16)
    ids = tokens(dist.get_rank())
    torch.testing.assert_close(loss_of(model, ids)[0], loss_of(dense, ids)[0])
    with torch.inference_mode():
        torch.testing.assert_close(loss_of(model, ids)[0], loss_of(dense, ids)[0])
    tied = made("qwen3_moe", "grouped_mm")
    one, two = (layer.mlp.experts for layer in tied.model.layers[:2])
    two.down_proj = one.down_proj
    one.gate_up_proj.requires_grad_(False)
    spread_experts(tied, max_tokens_per_rank=16)
    assert one.down_proj is two.down_proj and isinstance(one.down_proj, DTensor)
    trained = [one.gate_up_proj.requires_grad, two.gate_up_proj.requires_grad, one.down_proj.requires_grad]
    assert trained == [False, True, True]
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


def test_a_model_is_spread_once() -> None:
    """Parameters that layers share are shared afterwards, and frozen ones are frozen."""
    run_ranks(2, spread_again)


def test_checksums() -> None:
    """A checksum depends on each bit, and on the order of rows and of columns."""
    from ep_ops.integrations.spread_checks import checksum

    whole = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(fresh_seed()))
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        w, other = whole.to(dtype), whole.clone()
        other[1, 5, 3] *= -1
        changed = [other.to(dtype), *(w.view(torch.uint8).flip(dim).view(dtype) for dim in range(2)), w.mT]
        assert len({checksum(one) for one in (w, *changed)}) == 5, dtype
        assert checksum(w.clone()) == checksum(w)


def rejected() -> None:
    """Return the errors that spread_experts raises before it changes the model."""
    from ep_ops.integrations.transformers import spread_experts

    ids, rank, ranks = tokens(dist.get_rank()), dist.get_rank(), dist.get_world_size()
    model, dense = made("qwen3_moe", "grouped_mm"), made("qwen3_moe", "grouped_mm")
    experts = model.model.layers[1].mlp.experts

    for change in ("one number", "two experts", "two rows", "two columns"):  # on the last rank
        whole = experts.down_proj.detach().clone()
        with torch.no_grad():
            if rank == ranks - 1:
                part = {"two rows": experts.down_proj[4], "two columns": experts.down_proj[4].t()}.get(change)
                part = experts.down_proj if part is None else part
                if change == "one number":
                    part[5, 3, 2] += 2**-20
                else:
                    part[:2] = part[[1, 0]].clone()
        with pytest.raises(ValueError, match=rf"layers.1.mlp.experts.down_proj differs .* and ranks \[{ranks - 1}\]"):
            spread_experts(model, max_tokens_per_rank=16)
        with torch.no_grad():
            experts.down_proj.copy_(whole)

    name = "model.layers.0.mlp.experts.gate_up_proj"
    for ranks_with in (range(ranks), range(1)):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if rank in ranks_with else None
        kind = RuntimeError if rank in ranks_with else ValueError
        with pytest.raises(kind, match=f"an optimizer holds {name}, which .*create optimizers after"):
            spread_experts(model, max_tokens_per_rank=16)
        del optimizer

        if rank in ranks_with:
            torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", torch.nn.Identity())
        with pytest.raises(ValueError, match="layers.1.mlp.experts is parametrized .*call spread_experts before"):
            spread_experts(model, max_tokens_per_rank=16)
        if rank in ranks_with:
            torch.nn.utils.parametrize.remove_parametrizations(experts, "down_proj")

    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (torch.nn.Linear(2, 2), {}, "Linear has no MoE layer"),
        (model, {"num_experts": 6}, "spread_experts got unknown arguments num_experts; allowed: "),
        (model, {"misspelled": 2}, "got unknown arguments misspelled"),
        (model, {"alignment": [4]}, r"alignment is \[4\]"),
        (model, {"rows": "padded"}, "rows is 'padded'; allowed: 'grouped', 'token_major'"),
        (model, {"rows": "token_major", "places": 5}, "places is 5; allowed: None, or a positive multiple of"),
        (model, {"places": 16}, "places is 16 with rows 'grouped'; allowed only with rows 'token_major'"),
        (model, {"redispatch": True}, "redispatch is True with rows 'grouped'; allowed only with rows 'token_major'"),
    ]
    for given, options, text in wrong:  # on the last rank
        with pytest.raises((TypeError, ValueError), match=text):
            spread_experts(
                *((given,) if rank == ranks - 1 else (model,)),
                max_tokens_per_rank=16,
                **(options if rank == ranks - 1 else {}),
            )

    assert not any(isinstance(p, DTensor) for p in model.parameters())
    others = torch.optim.SGD(model.lm_head.parameters(), lr=1.0)  # holds no experts
    spread_experts(model, max_tokens_per_rank=16)
    torch.testing.assert_close(loss_of(model, ids)[0], loss_of(dense, ids)[0])
    optimizer = torch.optim.SGD(model.model.parameters(), lr=1.0)
    before = model.model.layers[1].mlp.experts.down_proj.to_local().clone()
    loss_of(model, ids)[1].backward()
    optimizer.step(), others.step()
    assert not torch.equal(model.model.layers[1].mlp.experts.down_proj.to_local(), before)
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


def pickled_by_rank_0(path: str) -> None:
    from ep_ops.integrations.transformers import spread_experts

    model, ids, rank = made("qwen3_moe", "grouped_mm"), tokens(0), dist.get_rank()
    spread_experts(model, max_tokens_per_rank=16, timeout=20)
    expected = loss_of(model, ids)[0]
    torch.save(model, f"{path}/{rank}")
    dist.barrier()
    own, other = (torch.load(f"{path}/{of}", weights_only=False).requires_grad_(False) for of in (rank, 0))
    torch.testing.assert_close(loss_of(own, ids)[0], expected)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(loss_of(copied, ids)[0], expected)
    numbers = [m.layer_number for one in (model, own, copied) for m in one.modules() if hasattr(m, "layer_number")]
    assert len(set(numbers)) == len(numbers) == 6, "each layer of a copy is a layer of its own"
    if rank:
        with (
            torch.inference_mode(),
            pytest.raises(ValueError, match="gate_up_proj is the shard of the rank with coord"),
        ):
            loss_of(other, ids)
    dist.barrier()
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


def test_models_pickled_by_another_rank(tmp_path: pathlib.Path) -> None:
    run_ranks(2, pickled_by_rank_0, str(tmp_path))


def test_what_is_rejected() -> None:
    run_ranks(2, rejected)


def test_processes_that_do_not_know_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from ep_ops.integrations.transformers import spread_experts

    model = made("qwen3_moe", "grouped_mm")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE is 2 .*init_process_group\(\) before spread_experts"):
        spread_experts(model, max_tokens_per_rank=16)
    monkeypatch.setenv("WORLD_SIZE", "1")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # one rank keeps its parameters
    name = spread_experts(model, max_tokens_per_rank=16)[0]
    loss_of(model, tokens(0))[1].backward()
    before = model.get_submodule(name).down_proj.detach().clone()
    optimizer.step()
    assert not torch.equal(model.get_submodule(name).down_proj, before)
    (comm,) = ep_ops.registry.living.values()
    comm.destroy()


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
    for _ in range(2):  # layers find another communicator once theirs was destroyed
        torch.testing.assert_close(loss_of(model, ids)[0], loss_of(dense, ids)[0])
        (comm,) = ep_ops.registry.living.values()
        comm.destroy()


def test_loading(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate, with which transformers loads in parts")
    need_implementations()
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
            torch.testing.assert_close(p.grad.to_local(), q.grad[rank : rank + 1], rtol=1e-3, atol=1e-5)
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()


@pytest.mark.parametrize("frozen", [False, True])  # but for the experts
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_rank_without_experts(kind: str, frozen: bool) -> None:
    run_ranks(3, more_ranks_than_experts, kind, frozen)
