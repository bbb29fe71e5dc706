"""The integration into flashinfer's expert-parallel layers, run by flashinfer's own classes without its kernels."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer 0.7.2, which is not installed"
)
EXPERTS, K, H, C = 4, 3, 256, 9  # experts of each rank


def load() -> Any:
    """Return the integration. flashinfer's top-level module needs CUDA; its expert parallelism does not."""
    if "flashinfer" not in sys.modules:
        found = importlib.util.find_spec("flashinfer")
        package = types.ModuleType("flashinfer")
        package.__path__ = list(found.submodule_search_locations)  # type: ignore[union-attr, arg-type]
        sys.modules["flashinfer"] = package
    from ep_ops.integrations import flashinfer

    return flashinfer


def bootstrap() -> Any:
    from flashinfer.moe_ep.config import BootstrapConfig

    ranks, rank = dist.get_world_size(), dist.get_rank()
    return BootstrapConfig(world_size=ranks, rank=rank, process_group=dist.group.WORLD, auto_bootstrap=False)


def parameters(form: str | None = None, **changes: Any) -> Any:
    from flashinfer.moe_ep.core.comm import MoEEpCommParams

    experts = EXPERTS * dist.get_world_size()
    sizes = dict(num_experts=experts, top_k=K, max_tokens_per_rank=C, hidden_size=H, dtype=torch.bfloat16) | changes
    made = MoEEpCommParams(**sizes, invalid_expert_id=experts + 5)
    if form is not None:  # its class QuantFormat is in a module that needs CUDA
        object.__setattr__(made, "dispatch_format", types.SimpleNamespace(name=form))
    return made


def quantized(x: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    block = 128 if form == "DeepSeekFp8" else 32
    blocks = x.float().view(len(x), H // block, block)
    scale = (blocks.abs().amax(2) / 448).clamp(min=1e-8)
    if form == "MXFP8":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes = (blocks / scale[..., None]).view(len(x), H).to(torch.float8_e4m3fn)
    return codes, scale.to(torch.float8_e8m0fnu) if form == "MXFP8" else scale


def dequantized(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (rows.float().view(len(rows), scale.shape[1], H // scale.shape[1]) * scale.float()[..., None]).view(
        len(rows), H
    )


def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply by (id + 1), apply weights, and sum over this rank's experts. NaN in rows without a token."""
    first = EXPERTS * dist.get_rank()
    own = (ids >= first) & (ids < first + EXPERTS)
    y = x.float() * (torch.where(own, ids + 1, 0) * torch.where(own, weights, 0)).sum(1, keepdim=True)
    return torch.where(own.any(1, keepdim=True), y, float("nan")).to(torch.bfloat16)


def drawn(tokens: int, seed: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    ids = torch.rand(tokens, EXPERTS * ranks, generator=generator).argsort(1)[:, :K]
    return x, ids, torch.rand(tokens, K, generator=generator)


def contract(form: str | None) -> None:
    """Dispatch and combine with different numbers of tokens on each rank, with a bound for a call, and with none."""
    ours = load()
    from flashinfer.moe_ep.core.comm import available_communication_backends, create_communication

    assert "ep_ops" in available_communication_backends()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = [create_communication(bootstrap(), parameters(form), ours.EpOpsConfig()) for _ in range(2)]
    assert made[0].comm is made[1].comm  # of two layers
    for step, (tokens, most) in enumerate([(5 + rank, None), (0 if rank == 0 else C, C), (7, 7), (0, 0)]):
        x, ids, weights = drawn(tokens, step, ranks)
        sent, scale = (x, None) if form is None else quantized(x, form)
        layer = made[step % 2]
        got = layer.dispatch(
            sent, ids.int() if step % 2 else ids, weights, hidden_states_scale=scale, max_tokens_per_rank=most
        )
        room = ranks * (C if most is None else max(1, most))
        assert got.tokens_per_rank * ranks == room == len(got.hidden_states) == len(got.topk_ids)
        rows = got.hidden_states
        if form is not None:
            rows = dequantized(rows, got.hidden_states_scale)
        invalid = EXPERTS * ranks + 5
        own = (got.topk_ids >= EXPERTS * rank) & (got.topk_ids < EXPERTS * (rank + 1))
        assert (own | (got.topk_ids == invalid)).all()
        y = experts(rows, got.topk_ids, got.topk_weights)
        output = torch.full((tokens, H), float("nan"), dtype=torch.bfloat16) if step % 2 else None
        shaped = y.view(ranks, -1, H) if step == 2 else y
        out = layer.combine(shaped, output=output)
        assert out is output or output is None
        wanted = (x if form is None else dequantized(sent, scale)) * ((ids + 1) * weights).sum(1, keepdim=True)
        error = (out.float() - wanted.float()).abs().amax() if tokens else torch.zeros(())
        assert float(error) < 0.01 * float(wanted.abs().amax() if tokens else 1), step
    for layer in made:
        assert not layer.comm.destroyed
        layer.destroy()
        layer.destroy()
    assert made[0].comm.destroyed


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.drawn)])
@pytest.mark.parametrize("form", [None, "DeepSeekFp8", "MXFP8"])
def test_contract(form: str | None, ranks: int) -> None:
    run_ranks(ranks, contract, form)


def layer() -> None:
    """flashinfer's layer without its experts: each rank returns the rows that it received."""
    ours = load()
    from flashinfer.moe_ep import MoEEpLayer, SplitConfig
    from flashinfer.moe_ep.config import EpLayout, FleetParams
    from flashinfer.moe_ep.modes import split_layer
    from flashinfer.moe_ep.tensors import MoEEpTensors
    from flashinfer.moe_ep.weights import MoEWeightPack

    split_layer.ensure_moe_ep_cuda_device = lambda bootstrap: None  # the only change
    ranks = dist.get_world_size()
    sizes = FleetParams(
        num_experts=EXPERTS * ranks, max_tokens_per_rank=C, token_hidden_size=H, layout=EpLayout.RANK_MAJOR
    )
    weights = MoEWeightPack(torch.zeros(EXPERTS, 32, H).bfloat16(), torch.zeros(EXPERTS, H, 16).bfloat16())
    made = MoEEpLayer(bootstrap(), sizes, weights, backend=SplitConfig(comm=ours.EpOpsConfig()))
    x, ids, routing = drawn(C, 7, ranks)
    out = made.forward(MoEEpTensors(x, ids.int(), routing))
    reached = torch.stack([(ids // EXPERTS == rank).any(1) for rank in range(ranks)]).sum(0)
    assert torch.equal(out, x * reached[:, None])


def test_layer() -> None:
    run_ranks(2, layer)


def rejected() -> None:
    ours = load()
    x, ids, weights = drawn(4, 1, 1)
    with pytest.raises(ValueError, match="dispatch_format is NVFP4; allowed: None, BF16, FP16, DeepSeekFp8, MXFP8"):
        ours.EpOpsCommunication(bootstrap(), parameters("NVFP4"))
    made = ours.EpOpsCommunication(bootstrap(), parameters())
    with pytest.raises(RuntimeError, match="combine was called before dispatch"):
        made.combine(x)
    with pytest.raises(NotImplementedError, match="eplb_local_stats is given"):
        made.dispatch(x, ids, weights, eplb_local_stats=weights)
    with pytest.raises(ValueError, match="hidden_states_scale is given; dispatch_format is None"):
        made.dispatch(x, ids, weights, hidden_states_scale=weights)
    got = made.dispatch(x, ids, weights)
    with pytest.raises(RuntimeError, match="dispatch was called twice"):
        made.dispatch(x, ids, weights)
    assert torch.equal(made.combine(got.hidden_states), x)
    fp8 = ours.EpOpsCommunication(bootstrap(), parameters("MXFP8"))
    with pytest.raises(ValueError, match="hidden_states_scale is None; dispatch_format MXFP8 needs scales"):
        fp8.dispatch(x, ids, weights)
    made.destroy(), fp8.destroy()
    assert made.comm.destroyed
    halves = ours.EpOpsCommunication(
        bootstrap(), parameters("FP16", dtype=torch.float16), ours.EpOpsConfig(options={"timeout": 33.0})
    )
    assert (halves.comm.dtype, halves.comm.config.timeout) == (torch.float16, 33.0)
    got = halves.dispatch(x.half(), ids, weights)
    assert torch.equal(halves.combine(got.hidden_states), x.half())
    halves.comm.destroy()  # by the program
    halves.destroy()


def test_what_is_rejected() -> None:
    run_ranks(1, rejected)
