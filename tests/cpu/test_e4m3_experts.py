"""Layers whose experts have e4m3 weights: values, bits, checkpoints, conversions, and what is rejected."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import fresh_seed
from e4m3_experts import assert_layer, weights_of
from ranks import run_ranks
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ep_ops
from ep_ops import formats
from ep_ops.nn import (
    Experts,
    MoELayer,
    expert_mlp,
    expert_parameters,
    few_rows_mlp_e4m3,
    interleave,
    keep_experts_apart,
    load_experts,
)
from ep_ops.nn.e4m3_weights import gradient_problem, quantize_blocks

E, H, F, K = 5, 256, 128, 2
E4M3 = torch.float8_e4m3fn
NAMES = ("w_in", "in_scales", "w_out", "out_scales")
FORM = formats.format_of("e4m3/128/fp32")


def communicator(**more: Any) -> ep_ops.Communicator:
    sizes = dict(num_experts=E, hidden_size=H, top_k=K, max_tokens_per_rank=64, dtype=torch.bfloat16, device="cpu")
    return ep_ops.Communicator(**{**sizes, **more})


def tokens(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(count, E, generator=draw).topk(K)
    return torch.randn(count, H, generator=draw).bfloat16(), ids, weights


def local(experts: Experts) -> list[Tensor]:
    """w_in, in_scales, w_out, out_scales of this rank."""
    return [p.to_local() if isinstance(p, DTensor) else p for p in (getattr(experts, name) for name in NAMES)]


def state_of(weights: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return dict(zip(NAMES, weights, strict=True))


def read_from(weights: tuple[Tensor, ...]) -> Any:
    """Return a function that reads tensors by the names of DeepSeek-V3's checkpoints."""

    def read(name: str) -> Tensor:
        _, expert, projection, suffix = name.split(".")
        w_in, in_scales, w_out, out_scales = (w[int(expert)] for w in weights)
        joined, down = (w_in, w_out) if suffix == "weight" else (in_scales, out_scales)
        gate, up = joined.split(len(joined) // 2)
        return {"gate_proj": gate, "up_proj": up, "down_proj": down}[projection]

    return read


def values(powers: bool, format: str, seed: int) -> list[list[Tensor]]:
    """Return what the first tokens of a batch give, the same on all ranks, for weights of a checkpoint."""
    whole = weights_of(E, H, F, seed, powers=powers)
    x, ids, weights = tokens(64, seed)
    found = []
    with communicator() as comm, torch.no_grad():
        experts = Experts(comm, F, dtype=E4M3, format=format)
        for p in local(experts):
            p.view(torch.uint8).fill_(0xFF if p.dtype == torch.float32 else 0x7F)
        load_experts(experts, read_from(whole), "experts.")
        mine = slice(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
        for got, one in zip(local(experts), whole, strict=True):
            assert torch.equal(got.float(), one[mine].float())
        for count in (64, 7, 1):
            given = x[:count], ids[:count], weights[:count]
            out = experts(*given, max_tokens=count)
            (split,) = [step for step in experts.steps(*given, max_tokens=count) if step is not None]
            shared = experts(*given, max_tokens=count, shared=torch.zeros_like)
            w_in, in_scales, w_out, out_scales = local(experts)
            function = expert_mlp(comm, *given, w_in, w_out, in_scales, out_scales, max_tokens=count, format=format)
            # Rows that are sent in bfloat16 are quantized in the same way when they have arrived.
            sent = comm.dispatch(*given, max_tokens=count)
            rows = formats.quantize(sent.x, formats.format_of(format or FORM.name))
            y = few_rows_mlp_e4m3(*rows, w_in, in_scales, w_out, out_scales, sent.route, comm.world_size)
            home = comm.combine(y, sent.route, sent.weights)
            for same in (split.out, shared, function.out, home):
                assert torch.equal(same, out)
            found.append(out)
        assert int(experts.dropped.sum()) == 0
    assert_layer(found[0], *given_rows(x, format), ids, weights, whole)
    return found


def given_rows(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    return formats.quantize(x, formats.format_of(format or FORM.name))


@pytest.mark.parametrize(("ranks", "powers", "format"), [
    (1, False, ""), (2, True, ""), (1, True, "e4m3/128/pow2"),
    pytest.param(4, False, "e4m3/128/pow2", marks=pytest.mark.drawn),
])  # fmt: skip
def test_values(ranks: int, powers: bool, format: str) -> None:
    """Within the stated bound of fp64 on the same codes and scales; the same bits on all ranks and in every batch, with
    and without split operations."""
    seed = fresh_seed()
    results = run_ranks(ranks, values, powers, format, seed) if ranks > 1 else [values(powers, format, seed)]
    whole = results[0][0]
    assert whole.isfinite().all()
    for found in results:
        for out in found:
            assert torch.equal(out, whole[: len(out)])


def test_compiled() -> None:
    """A whole layer in one graph, with a shared expert, has the bits of eager mode."""
    torch._dynamo.reset()
    with communicator() as comm, torch.no_grad():
        layer = MoELayer(comm, F, dtype=E4M3, shared_intermediate_size=128)
        assert layer.shared.w_in.dtype == torch.bfloat16
        x = tokens(7, fresh_seed())[0]
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, max_tokens=8), layer(x, max_tokens=8))


def test_initial_weights() -> None:
    """The initial weights are those of other dtypes, quantized; also after to_empty."""
    with communicator() as comm:
        exact, experts = Experts(comm, F, dtype=torch.float32), Experts(comm, F, dtype=E4M3)
        with torch.device("meta"):
            later = Experts(comm, F, dtype=E4M3)
        assert later.w_in.is_meta
        later.to_empty(device="cpu").reset_parameters()
        for name, scales in (("w_in", "in_scales"), ("w_out", "out_scales")):
            codes, by = getattr(experts, name), getattr(experts, scales)
            wide = by.repeat_interleave(128, 1).repeat_interleave(128, 2)
            error = (codes.float() * wide - getattr(exact, name).mT).abs()
            assert (error <= getattr(exact, name).mT.abs() / 16 + wide / 1024).all()
            assert codes.float().abs().max() == 448
            assert torch.equal(getattr(later, name).view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(getattr(later, scales), by)


def test_blocks_of_weights() -> None:
    """The largest magnitude of a block becomes 448, and a block of zeros remains one."""
    w = torch.randn(256, 384, generator=torch.Generator().manual_seed(fresh_seed()))
    w[128:, :128] = 0
    codes, scales = quantize_blocks(w)
    most = w.abs().unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3))
    assert codes.dtype == E4M3 and torch.equal(scales, torch.where(most == 0, 1e-12, most) / 448)
    largest = codes.float().abs().unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3))
    assert torch.equal(largest, torch.where(most == 0, 0.0, 448.0))


def test_gradients_that_there_are_none_of() -> None:
    """One weight, one scale or the tokens suffice."""
    plain, asks = torch.zeros(2), torch.zeros(2, requires_grad=True)
    for at in range(4):
        given = [asks if i == at else plain for i in range(4)]
        assert "requires_grad of weights and scales must be False" in str(gradient_problem(plain, *given))
    assert "call them under torch.no_grad()" in str(gradient_problem(asks, plain, plain))
    assert gradient_problem(plain, plain) is None
    with torch.no_grad():
        assert gradient_problem(asks, asks) is None


def bits(module: torch.nn.Module) -> list[Tensor]:
    found = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    return [p.detach().contiguous().view(torch.uint8).clone() for p in found]


def under_fsdp2_and_ddp() -> None:
    """Data parallelism leaves experts with e4m3 weights alone."""
    mesh = dist.init_device_mesh("cpu", (2,))
    with communicator() as comm, torch.no_grad():
        layers = [MoELayer(comm, F, dtype=E4M3) for _ in range(2)]
        x = tokens(6, comm.rank)[0]
        want, before = layers[0](x), bits(layers[0].experts)
        for layer in layers:
            keep_experts_apart(layer, ranks=2)
        fully_shard(layers[0], mesh=mesh, ignored_params=set(expert_parameters(layers[0])))
        wrapped = DistributedDataParallel(layers[1])
        for model, layer in ((layers[0], layers[0]), (wrapped, layers[1])):
            assert torch.equal(model(x), want)
            assert all(torch.equal(a, b) for a, b in zip(bits(layer.experts), before, strict=True))


def test_data_parallelism() -> None:
    run_ranks(2, under_fsdp2_and_ddp)


def saved(module: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def conversions() -> None:
    with communicator() as comm, torch.no_grad():
        layer = MoELayer(comm, F, dtype=E4M3)
        before, x = bits(layer.experts), tokens(9, comm.rank)[0]
        want = layer(x)
        assert "float8_e4m3fn" in repr(layer) and "5 experts, hidden_size=256, width=128" in repr(layer)
        changes = [
            lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.float(), lambda m: m.to(torch.float64),
            lambda m: m.to("cpu", torch.bfloat16), lambda m: m.type(torch.float16), copy.deepcopy,
        ]  # fmt: skip
        if comm.world_size == 1:
            changes.append(saved)
        for change in changes:
            experts = change(layer.experts)
            assert [p.dtype for p in experts.parameters()] == [E4M3, E4M3, torch.float32, torch.float32]
            assert not any(p.requires_grad for p in experts.parameters())
            assert all(torch.equal(a, b) for a, b in zip(bits(experts), before, strict=True))
            layer.experts = experts
            assert torch.equal(layer(x), want)
        moved = copy.deepcopy(layer.experts).to("meta", torch.bfloat16)
        assert [p.dtype for p in moved.parameters()] == [E4M3, E4M3, torch.float32, torch.float32]
        assert all(p.is_meta for p in moved.parameters())
        plain = MoELayer(comm, F).experts
        for narrow in (lambda m: m.to(E4M3), lambda m: m.type(E4M3)):
            with pytest.raises(TypeError, match="without scales"):
                narrow(plain)
            assert all(p.dtype == comm.dtype for p in plain.parameters())


@pytest.mark.parametrize("ranks", [1, 2])
def test_conversions(ranks: int) -> None:
    run_ranks(ranks, conversions) if ranks > 1 else conversions()


def save(path: str, seed: int) -> None:
    whole = weights_of(E, H, F, seed)
    with communicator() as comm:
        layer = MoELayer(comm, F, dtype=E4M3)
        names = [f"experts.{name}" for name in ("w_in", "w_out", "in_scales", "out_scales")]
        assert list(layer.state_dict()) == ["router.weight", *names]
        assert all(isinstance(layer.state_dict()[name], DTensor) for name in names)
        load_experts(layer.experts, read_from(whole), "experts.")
        kept = bits(layer)
        for assign in (False, True):  # DTensors of other shapes and dtypes
            short = layer.experts.from_local(local(layer.experts)[1][:, :1].clone())
            with pytest.raises(RuntimeError, match="size mismatch for experts.in_scales"):
                layer.load_state_dict(layer.state_dict() | {"experts.in_scales": short}, assign=assign)
            wide = layer.experts.from_local(local(layer.experts)[0].bfloat16())
            with pytest.raises(TypeError, match="experts.w_in has dtype torch.bfloat16; allowed: torch.float8_e4m3fn"):
                layer.load_state_dict(layer.state_dict() | {"experts.w_in": wide}, assign=assign)
        assert all(torch.equal(a, b) for a, b in zip(bits(layer), kept, strict=True))
        dcp.save(layer.state_dict(), checkpoint_id=path)


def load(path: str, seed: int) -> None:
    with communicator() as comm:
        layer = MoELayer(comm, F, dtype=E4M3)
        state = layer.state_dict()
        dcp.load(state, checkpoint_id=path)
        layer.load_state_dict(state)
        for got, w in zip(local(layer.experts), weights_of(E, H, F, seed), strict=True):
            assert got.dtype == w.dtype and torch.equal(got.view(torch.uint8), w.view(torch.uint8))


def test_checkpoint(tmp_path: Path) -> None:
    """A state dict has the names and DTensors of other experts. Two ranks save, one loads."""
    seed = fresh_seed()
    run_ranks(2, save, str(tmp_path), seed)
    load(str(tmp_path), seed)


def test_what_is_loaded() -> None:
    """Scales in UE8M0 are converted exactly. Wrong shapes and dtypes raise errors with the name."""
    whole = weights_of(E, H, F, 1, powers=True)
    with communicator() as comm:
        experts, plain = Experts(comm, F, dtype=E4M3), Experts(comm, F)
        experts.load_state_dict(state_of(whole))
        assert experts.in_scales.dtype == torch.float32 and torch.equal(experts.in_scales, whole[1].float())
        kept = bits(experts)
        for name in NAMES:
            with pytest.raises(RuntimeError, match=f"size mismatch for {name}: "):
                experts.load_state_dict(state_of(whole) | {name: state_of(whole)[name][:, :1]})
            with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
                experts.load_state_dict({other: w for other, w in state_of(whole).items() if other != name})
        experts.load_state_dict(state_of(whole))
        for assign in (False, True):
            with pytest.raises(TypeError, match="w_in has dtype torch.bfloat16; allowed: torch.float8_e4m3fn, the dty"):
                experts.load_state_dict(state_of(whole) | {"w_in": whole[0].bfloat16()}, assign=assign)
            with pytest.raises(TypeError, match="w_out has dtype torch.float8_e4m3fn; allowed: torch.bfloat16"):
                plain.load_state_dict({"w_out": plain.w_out.to(E4M3), "w_in": plain.w_in}, assign=assign)
            for into, name, found in (
                (experts, "in_scales", whole[1].view(torch.uint8)), (plain, "w_in", plain.w_in.detach().to(torch.int8))
            ):  # fmt: skip
                state = into.state_dict() | {name: found}
                with pytest.raises(TypeError, match=f"{name} has dtype torch.u?int8; allowed: torch.*viewed as torch."):
                    into.load_state_dict(state, assign=assign)
        assert all(torch.equal(a, b) for a, b in zip(bits(experts), kept, strict=True))
        # Scales that are assigned stay UE8M0, with the same results.
        given = tokens(3, 1)
        with torch.no_grad():
            want = experts(*given)
            experts.load_state_dict(state_of(whole), assign=True)
            assert experts.out_scales.dtype == torch.float8_e8m0fnu and torch.equal(experts(*given), want)
        with pytest.raises(TypeError, match=r"experts.0.gate_proj.weight has dtype torch.bfloat16; allowed for"):
            load_experts(experts, lambda name: read_from(whole)(name).bfloat16(), "experts.")
        with pytest.raises(TypeError, match=r"experts.0.gate_proj.weight has dtype torch.float8_e4m3fn; allowed for"):
            load_experts(plain, read_from(whole), "experts.")
        with pytest.raises(TypeError, match=r"experts.0.gate_proj.weight_scale_inv has dtype torch.uint8; allowed: fl"):
            load_experts(experts, read_from((whole[0], whole[1].view(torch.uint8), *whole[2:])), "experts.")
        with pytest.raises(ValueError, match=r"experts.0.gate_proj.weight_scale_inv has shape \(2, 2\); allowed: "):
            load_experts(experts, read_from((whole[0], whole[1].repeat(1, 2, 1), *whole[2:])), "experts.")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scales_of_other_dtypes_are_loaded(dtype: torch.dtype) -> None:
    """Scales that checkpoints have in other dtypes become float32, assigned or copied, with the same results."""
    whole = weights_of(E, H, F, 1, powers=True)
    narrow = whole[0], whole[1].float().to(dtype), whole[2], whole[3].float().to(dtype)
    given = tokens(3, 1)
    with communicator() as comm, torch.no_grad():
        layer = MoELayer(comm, F, dtype=E4M3)
        layer.experts.load_state_dict(state_of(whole))
        want = layer.experts(*given)
        state = {f"experts.{name}": w for name, w in state_of(narrow).items()}
        for assign in (False, True):
            layer.experts.reset_parameters()
            layer.load_state_dict(layer.state_dict() | state, assign=assign)
            for name in ("in_scales", "out_scales"):
                scales = getattr(layer.experts, name)
                assert isinstance(scales, torch.nn.Parameter) and not scales.requires_grad
                assert scales.dtype == torch.float32
            assert torch.equal(layer.experts(*given), want)


def assigned_scales() -> None:
    """Scales of all ranks' experts stay DTensors when they are converted, also on the meta device before."""
    with communicator() as comm, torch.no_grad():
        source = Experts(comm, F, dtype=E4M3, seed=1)
        given = tokens(3, 1)
        state = {name: w.bfloat16() if name in source.scale_names else w for name, w in source.state_dict().items()}
        for name in source.scale_names:
            getattr(source, name).copy_(state[name])
        want = source(*given)
        with torch.device("meta"):
            experts = Experts(comm, F, dtype=E4M3)
        experts.load_state_dict(state, assign=True)
        experts.dropped = torch.zeros_like(source.dropped)
        assert all(isinstance(p, DTensor) and p.shape[0] == E for p in experts.parameters())
        assert experts.in_scales.dtype == experts.out_scales.dtype == torch.float32
        assert torch.equal(experts(*given), want)


def test_assigned_scales_of_all_ranks() -> None:
    run_ranks(2, assigned_scales)


def trained() -> None:
    with communicator(timeout=20) as comm:
        layer, others = MoELayer(comm, F, dtype=E4M3), torch.no_grad()
        x = tokens(5, comm.rank)[0]
        for steps in (False, True):
            given = x.clone().requires_grad_(comm.rank == 0)
            with pytest.raises((NotImplementedError, ValueError), match="experts with e4m3 weights have no gradient"):
                list(layer.steps(given)) if steps else layer(given)
        layer.experts.requires_grad_(comm.rank == 0)
        with pytest.raises((NotImplementedError, ValueError), match="e4m3 weights have no gradient; requires_grad"):
            layer(x)
        with others:
            assert layer(x).isfinite().all()
        layer.experts.requires_grad_(False)
        out = layer(x)  # The router learns from the outputs of its experts.
        out.float().square().sum().backward()
        assert layer.router.weight.grad.abs().sum() > 0
        assert all(p.grad is None for p in layer.experts.parameters())
        first, second = interleave(*(layer.steps(x, flight=flight) for flight in (0, 1)))
        assert torch.equal(first, out) and torch.equal(second, out)


def test_training_is_an_error_on_all_ranks() -> None:
    run_ranks(2, trained)


def converted() -> None:
    """Convert weights on one rank, as FSDP2 with a param_dtype does. The next calls have the former results."""
    with communicator(timeout=20) as comm, torch.no_grad():
        layer = MoELayer(comm, F, dtype=E4M3)
        x, codes = tokens(5, comm.rank)[0], layer.experts.w_out
        want = layer(x)
        for steps in (False, True):
            if comm.rank == 0:
                layer.experts.w_out = torch.nn.Parameter(codes.bfloat16(), requires_grad=False)
            with pytest.raises((TypeError, ValueError), match="e4m3 weights were converted to torch.bfloat16; allowed"):
                list(layer.steps(x)) if steps else layer(x)
            layer.experts.w_out = codes
            assert torch.equal(layer(x), want)


def test_converted_weights_are_an_error_on_all_ranks() -> None:
    run_ranks(2, converted)


def wrong_weights() -> list[str]:
    """Pass expert_mlp wrong weights on one rank, and valid ones on the other. Return the errors."""
    errors = []
    with communicator(timeout=20) as comm, torch.no_grad():
        experts, given = Experts(comm, F, dtype=E4M3), tokens(5, comm.rank)
        plain = [local_weight.bfloat16() for local_weight in (local(experts)[0].mT, local(experts)[2].mT)]
        coded = [local(experts)[i] for i in (0, 2, 1, 3)]
        want = [expert_mlp(comm, *given, *weights).out for weights in (plain, coded)]
        for weights, at, change in (
            (plain, 0, lambda w: w[:, :, 1:]), (plain, 1, lambda w: w[:, 1:]), (plain, 0, lambda w: None),
            (coded, 0, lambda w: w.bfloat16()), (coded, 1, lambda w: w.mT), (coded, 2, lambda w: w[0]),
            (coded, 3, lambda w: w.bfloat16()), (coded, 3, lambda w: None), (coded, 3, lambda w: 1),
        ):  # fmt: skip
            changed = [change(w) if i == at and comm.rank == 0 else w for i, w in enumerate(weights)]
            with pytest.raises((TypeError, ValueError)) as caught:
                expert_mlp(comm, *given, *changed)
            errors.append(str(caught.value))
            for valid, out in zip((plain, coded), want, strict=True):
                assert torch.equal(expert_mlp(comm, *given, *valid).out, out)
    return errors


def test_wrong_weights_are_an_error_on_all_ranks() -> None:
    """The other rank raises the same text, and the next calls have the former results."""
    own, others = run_ranks(2, wrong_weights)
    names = ("w_in", "w_out", "w_in", "w_in", "w_out", "in_scales", "out_scales", "out_scales is None", "out_scales")
    for name, text, other in zip(names, own, others, strict=True):
        assert name in text and "allowed" in text and "rejected by rank 0" in other and text in other


@pytest.mark.parametrize(("sizes", "options", "text"), [
    ({"dtype": torch.float16}, {}, "the communicator's dtype is torch.float16; allowed for e4m3 weights: torch.bf"),
    ({"hidden_size": 192}, {}, "hidden_size is 192 and the experts' width is 128; allowed for e4m3 weights: mul"),
    ({}, {"intermediate_size": 64}, "the experts' width is 64; allowed for e4m3 weights: multiples of 128"),
    ({}, {"gemms": "torch"}, "gemms is 'torch'; allowed for e4m3 weights: 'auto', 'memory'"),
    ({}, {"dtype": torch.float8_e5m2}, "dtype is torch.float8_e5m2; allowed: None, torch.bfloat16, "),
    ({}, {"rows": "token_major"}, "rows is 'token_major'; allowed for e4m3 weights: 'grouped'"),
    ({}, {"format": "wire:e4m3/128/pow2"}, "format is 'wire:e4m3/128/pow2'; allowed for e4m3 weights: '', 'e4m3"),
])  # fmt: skip
def test_rejections(sizes: dict[str, Any], options: dict[str, Any], text: str) -> None:
    with communicator(**sizes) as comm:
        given = {"intermediate_size": F, "dtype": E4M3} | options
        with pytest.raises(ValueError, match=text):
            MoELayer(comm, **given)


def test_a_function_needs_both_scales() -> None:
    with communicator() as comm:
        w_in, in_scales, w_out, _ = weights_of(E, H, F, 1)
        with pytest.raises(ValueError, match="one of in_scales and out_scales is None; allowed: both or none"):
            expert_mlp(comm, *tokens(2, 1), w_in, w_out, in_scales)
