"""FP8 checkpoints of transformers: `spread_experts` keeps their weights, and calls without gradients multiply rows that
are sent in e4m3. transformers' own kernels need a GPU: its forward runs with products that are computed on the CPU."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import fresh_seed
from e4m3_experts import assert_layer, exact, weights_of
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers_cases import made

import ep_ops
from ep_ops import formats

finegrained_fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")

E, H, F, K = 5, 256, 128, 2
FORM = formats.format_of("e4m3/128/fp32")
NAMES = ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv")


def fp8_model(weights: tuple[Tensor, ...], **config: Any) -> Any:
    """A model in bfloat16 whose experts alone are quantized, with these weights."""
    from transformers import FineGrainedFP8Config

    model = made(
        "qwen3_moe", "eager", num_experts=E, hidden_size=H, moe_intermediate_size=F, num_hidden_layers=1
    ).bfloat16()
    quantization = FineGrainedFP8Config(weight_block_size=(128, 128), **config)
    others = [name for name, _ in model.named_modules() if not name.endswith(".experts")]
    model = finegrained_fp8.replace_with_fp8_linear(
        model, modules_to_not_convert=[f"^{name}$" for name in others], quantization_config=quantization
    )
    experts = model.model.layers[0].mlp.experts
    assert type(experts) is finegrained_fp8.FP8Experts and experts.gate_up_proj.is_meta
    experts.to_empty(device="cpu")
    for name, w in zip(NAMES, weights, strict=True):
        setattr(experts, name, torch.nn.Parameter(w.clone(), requires_grad=False))
    return model


def linear(self: Any, x: Tensor, codes: Tensor, scales: Tensor, activation_scale: Any = None) -> Tensor:
    """In place of a kernel: rows are quantized by 128 and multiplied in fp64."""
    assert activation_scale is None and codes.dtype == torch.float8_e4m3fn and scales.dtype != torch.bfloat16
    return (exact(*formats.quantize(x, FORM)) @ exact(codes, scales).T).to(x.dtype)


def inputs(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(24, E, generator=draw).topk(K)
    return torch.randn(24, H, generator=draw).bfloat16()[:tokens], ids[:tokens], weights[:tokens]


def relative(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.isfinite().all()
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def spread(powers: bool, seed: int) -> list[Tensor]:
    from ep_ops.integrations.transformers import spread_experts

    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    whole = weights_of(E, H, F, seed, powers=powers)
    model = fp8_model(whole, **({"scale_fmt": "ue8m0"} if powers else {}))
    own = copy.deepcopy(model)
    own.model.layers[0].mlp.experts.linear = types.MethodType(linear, own.model.layers[0].mlp.experts)
    dtype = torch.bfloat16 if powers else None  # to which codes are not cast
    (name,) = spread_experts(model, max_tokens_per_rank=32, dtype=dtype, timeout=20)
    experts = model.get_submodule(name)
    mine = slice(experts.comm.first_local_expert, experts.comm.first_local_expert + experts.comm.num_local_experts)
    for last, w in zip(NAMES, whole, strict=True):
        p = getattr(experts, last)
        assert p.dtype == w.dtype and p.shape == w.shape and isinstance(p, DTensor) == (ranks > 1)
        held = p.to_local() if ranks > 1 else p
        assert torch.equal(held.view(torch.uint8), w[mine].view(torch.uint8))
    kept = experts.state_dict()
    assert sorted(kept) == sorted(NAMES)
    found = []
    with torch.no_grad():
        for tokens in (24, 3, 1):
            given = inputs(tokens, seed)
            out = experts(*given)
            assert_layer(out, *formats.quantize(given[0], FORM), *given[1:], whole)
            found.append(out)
        # All tokens together: both round numbers between the GEMMs to e4m3, and one token alone may differ by 0.05.
        assert relative(found[0], own.get_submodule(name)(*inputs(24, seed))) < 0.04
        ids = torch.randint(3, 64, (2, 6 + rank), generator=torch.Generator().manual_seed(rank))
        got, wanted = (one(ids, use_cache=False).logits for one in (model, own))
        assert relative(got, wanted) < 0.05
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*inputs(24, seed)), found[0])
    # With gradients, transformers' own forward runs on rows in bfloat16, and has a gradient of the rows.
    experts.linear = types.MethodType(linear, experts)
    x, *route = inputs(5, seed)
    assert relative(experts(x.requires_grad_(), *route), own.get_submodule(name)(x, *route)) < 0.02
    experts.comm.destroy()
    return found


@pytest.mark.parametrize(("ranks", "powers"), [
    (1, True), (2, False), pytest.param(2, True, marks=pytest.mark.drawn),
    pytest.param(4, False, marks=pytest.mark.drawn),
])  # fmt: skip
def test_spread_experts(ranks: int, powers: bool) -> None:
    """Weights and scales stay as they are; values within the bound of fp64, and like transformers' own forward; the
    same bits on all ranks and in every batch."""
    seed = fresh_seed()
    results = run_ranks(ranks, spread, powers, seed) if ranks > 1 else [spread(powers, seed)]
    whole = results[0][0]
    for found in results:
        for out in found:
            assert torch.equal(out, whole[: len(out)])


def saved(path: str, powers: bool, seed: int) -> None:
    from safetensors.torch import load_file

    from ep_ops.integrations.transformers import spread_experts

    whole = fp8_model(weights_of(E, H, F, seed, powers=powers), **({"scale_fmt": "ue8m0"} if powers else {}))
    model = copy.deepcopy(whole)
    spread_experts(model, max_tokens_per_rank=32, timeout=20)
    before = dict(model.named_parameters())
    model.save_pretrained(f"{path}/spread")
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[last] is p for last, p in before.items())
    if dist.get_rank() == 0:
        whole.save_pretrained(f"{path}/whole")
        got, want = (load_file(f"{path}/{which}/model.safetensors") for which in ("spread", "whole"))
        assert got.keys() == want.keys() and sum(w.dtype == torch.float8_e4m3fn for w in want.values()) == 3 * E
        for last, w in want.items():
            assert got[last].dtype == w.dtype and torch.equal(got[last].view(torch.uint8), w.view(torch.uint8))


@pytest.mark.parametrize("powers", [True, pytest.param(False, marks=pytest.mark.drawn)])
def test_save_pretrained(tmp_path: Path, powers: bool) -> None:
    """Codes and scales of all ranks, which gloo cannot send as such, are saved as they are."""
    run_ranks(2, saved, str(tmp_path), powers, fresh_seed())


@pytest.mark.parametrize(("change", "takes"), [
    ({}, True), ({"activation_scheme": "static"}, False), ({"block_size": (64, 128)}, False),
    ({"block_size": None}, False), ({"swiglu_alpha": 1.7}, False), ({"limit": 7.0}, False),
    ({"act_fn": torch.nn.GELU()}, False), ({"has_gate": False}, False), ({"has_bias": True}, False),
    ({"gate_softcap": 30.0}, False), ({"down_proj": torch.zeros(E, H, F, dtype=torch.int8)}, False),
    ({"gate_up_proj": torch.zeros(E, F, H).to(torch.float8_e4m3fn)}, False),
    ({"gate_up_proj": torch.zeros(E, 2 * F, H + 64).to(torch.float8_e4m3fn)}, False),
])  # fmt: skip
def test_which_experts_take_codes(change: dict[str, Any], takes: bool) -> None:
    from ep_ops.integrations.local_experts import LocalExperts

    experts = fp8_model(weights_of(E, H, F, 1)).model.layers[0].mlp.experts
    for name, value in change.items():
        given = torch.nn.Parameter(value, requires_grad=False) if isinstance(value, Tensor) else value
        setattr(experts, name, given)
    for dtype, allowed in ((torch.bfloat16, takes), (torch.float32, False)):
        with ep_ops.Communicator(
            num_experts=E, hidden_size=H, top_k=K, max_tokens_per_rank=8, dtype=dtype, device="cpu"
        ) as comm:
            assert LocalExperts(experts, experts.forward, None).takes_codes(comm) == allowed


def test_dtype_of_rows_for_quantized_experts() -> None:
    """Rows have the dtype of the model's first parameter that is not quantized."""
    from ep_ops.integrations.transformers import _plain_dtype

    codes, half = (torch.nn.Parameter(torch.zeros(4).to(kind), False) for kind in (torch.float8_e4m3fn, torch.float16))
    assert _plain_dtype(torch.nn.ParameterList([codes, half])) == torch.float16
    assert _plain_dtype(torch.nn.ParameterList([codes])) == torch.bfloat16


def test_which_calls_take_codes_on_gpus() -> None:
    """Calls take codes if tokens are so few that experts have at most 64 rows on average. On the reference backend none
    does, because transformers' kernels run on GPUs."""
    from ep_ops.integrations.local_experts import LocalExperts

    experts = fp8_model(weights_of(E, H, F, 1)).model.layers[0].mlp.experts
    local = LocalExperts(experts, experts.forward, None)
    comm: Any = types.SimpleNamespace(  # of two ranks, as far as it is looked at
        num_experts=E, top_k=K, world_size=2, hidden_size=H, dtype=torch.bfloat16, device=torch.device("cuda", 0),
        backend=types.SimpleNamespace(name="cute"),
    )  # fmt: skip
    for tokens, takes in ((1, True), (64 * E // (2 * K), True), (64 * E // (2 * K) + 1, False)):
        comm.max_tokens_per_rank = tokens
        assert local.takes_codes(comm) == takes, tokens
    comm.max_tokens_per_rank, comm.backend.name = 1, "reference"
    assert not local.takes_codes(comm)


def replaced(seed: int) -> None:
    from ep_ops.integrations import transformers as integration

    model = fp8_model(weights_of(E, H, F, seed))
    integration.spread_experts(model, max_tokens_per_rank=32, timeout=20)
    before = dict(model.named_parameters())
    with pytest.raises(KeyError, match="no space"), integration._codes_as_bytes(model) as dtypes:
        assert sorted(name.rpartition(".")[2] for name in dtypes) == ["down_proj", "gate_up_proj"]
        assert all(model.get_parameter(name).dtype == torch.uint8 for name in dtypes)
        raise KeyError("no space")
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is p for name, p in before.items())


def test_a_save_that_fails_leaves_the_model_as_it_was() -> None:
    run_ranks(2, replaced, fresh_seed())
