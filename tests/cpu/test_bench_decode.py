"""`ep-ops bench decode` on a CPU: sizes by name, what it measures and writes, and the table."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e4m3_experts import exact
from ranks import run_ranks
from torch import Tensor

import ep_ops
from ep_ops.bench import decode, other_layers
from ep_ops.bench.ranks import _process
from ep_ops.commands import cli
from ep_ops.commands import decode as demo

SMALL = "--device cpu --ranks 1 --tokens 1,3 --hidden 64 --width 32 --experts 8 --top-k 2 --replays 2 --calls 2"


def test_sizes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes are those of the model, except those that are given."""
    read = []
    monkeypatch.setattr(decode, "on_every_rank", lambda measure, args: read.append(args) or 0)
    for options in ("--model qwen3-30b", "--model deepseek-v3 --experts 32 --tokens 8"):
        assert decode.main(["--device", "cpu", *options.split()]) == 0
    first, second = ((args.hidden, args.width, args.experts, args.top_k, args.tokens) for args in read)
    assert first == (2048, 768, 128, 8, decode.TOKENS) and second == (7168, 2048, 32, 8, (8,))
    with pytest.raises(SystemExit):
        decode.main(["--model", "other"])
    assert "invalid choice: 'other'" in capsys.readouterr().err


def test_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert cli.main(["bench", "decode", *SMALL.split(), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["benchmark"] == "decode" and found["width"] == 32 and found["read_tb_s"] is None
    assert [result["tokens"] for result in found["results"]] == [1, 3]
    for result in found["results"]:
        assert result["correct"] and 0 < result["error"] < decode.MAX_ERROR["bf16"] and 0 < result["named"] <= 6
        assert all(result[name] > 0 for name in ("memory", "transposed", "torch", "gemms", "pair"))
    assert not any("floor" in line for line in decode.table(found)[2:])


def run_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: str) -> list[dict]:
    """Run the benchmark in this process and return its results."""
    out = tmp_path / "found.json"
    stores = (str(tmp_path / f"store{i}") for i in itertools.count(len(list(tmp_path.iterdir()))))
    monkeypatch.setattr(decode, "on_every_rank", lambda measure, args: _process(0, next(stores), 1, measure, args))
    assert cli.main(["bench", "decode", *SMALL.split(), *options.split(), "--out", str(out)]) == 0
    return json.loads(out.read_text())["results"]


E4M3 = "--weights e4m3 --hidden 128 --width 128"


def test_e4m3_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compared with the same weights in bfloat16."""
    for result in run_here(monkeypatch, tmp_path, E4M3):
        assert result["correct"] and 5e-3 < result["error"] < decode.MAX_ERROR["e4m3"]
        assert all(result[name] > 0 for name in ("memory", "torch", "gemms", "pair")) and "transposed" not in result
    assert "weights e4m3; graphs of 2" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["bench", "decode", *SMALL.split(), "--weights", "e4m3"])
    assert "--hidden is 64 and --width 32; allowed for e4m3: multiples of 128" in capsys.readouterr().err


def test_floor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The floor is the time in which memory delivers the weights of the experts that tokens name, at the measured
    speed: three matrices an expert, of 2 bytes a number, or of 1 byte."""
    monkeypatch.setattr(decode, "has_triton", lambda device: True)
    monkeypatch.setattr(decode, "read_speed", lambda timer: 0.25)
    for options, bytes_of_expert in (("", 3 * 64 * 32 * 2), (E4M3, 3 * 128 * 128)):
        for result in run_here(monkeypatch, tmp_path, f"{options} --only torch"):
            assert result["floor_us"] == pytest.approx(result["named"] * bytes_of_expert / 0.25e6, rel=1e-3)


def floor_of_demo() -> tuple[float, list[Tensor]]:
    """Return the floor of the decode demo on a GPU that reads 1 MB/s, and the ids of this rank's tokens by layer."""
    sizes = dict(num_experts=5, hidden_size=16, top_k=2, max_tokens_per_rank=2, dtype=torch.float32, device="cpu")
    options: Any = types.SimpleNamespace(hidden_size=16, tokens=2)
    with ep_ops.Communicator(**sizes) as comm, pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(demo, "memory_speed", lambda device: 1e6)
        layers = [demo.DecodeLayer(comm, options, seed) for seed in range(3)]
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(comm.rank))
        floor, ids = demo._floor(comm, layers, x), []
        for layer in layers:
            ids.append(layer.moe.router(x)[0])
            x = layer(x)
    return floor, ids


def test_floor_of_the_demo() -> None:
    """The demo's floor counts the weights of all named experts of the rank with most of them."""
    (floor, one), (other_floor, other) = run_ranks(2, floor_of_demo)
    named = [{*first.flatten().tolist(), *second.flatten().tolist()} for first, second in zip(one, other, strict=True)]
    on_rank = [sum(low <= expert < high for experts in named for expert in experts) for low, high in ((0, 3), (3, 5))]
    assert 0 < min(on_rank) < max(on_rank) < 9
    assert floor == other_floor == max(on_rank) * 3 * 16 * 12 * 4


def test_quantized_weights() -> None:
    """Codes times scales are the weights that remain, and these differ from the given ones by rounding to e4m3."""
    given = torch.randn(2, 256, 384, generator=torch.Generator().manual_seed(3)).bfloat16()
    w = given.clone()
    codes, scales = decode.quantize_weights(w)
    by = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert codes.shape == (2, 384, 256) and torch.equal((codes.float() * by).mT.bfloat16(), w)
    assert ((w.float() - given.float()).abs() <= given.float().abs() / 16 + by.mT / 1024).all()


def dense(x: Tensor, ids: Tensor, weights: Tensor, gates: Tensor, ups: Tensor, downs: Tensor) -> Tensor:
    """Weighted sums of SwiGLU experts. `gates`, `ups`: [E, F, H]; `downs`: [E, H, F]."""
    out = torch.zeros_like(x)
    for t, k in ((t, k) for t in range(ids.shape[0]) for k in range(ids.shape[1])):
        e = int(ids[t, k])
        out[t] += weights[t, k] * (downs[e] @ (torch.nn.functional.silu(gates[e] @ x[t]) * (ups[e] @ x[t])))
    return out


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Stand-ins for vLLM 0.33, flashinfer 0.7.2 and DeepGEMM, with their parameters and layouts of weights. Returns
    whether each call of flashinfer was tuned."""
    tuned: list[bool] = []

    def fused_experts(
        hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, activation: str = "silu",
        *, quant_config: dict | None = None,
    ) -> Tensor:  # fmt: skip
        if quant_config is not None:
            assert quant_config["block_shape"] == [128, 128] and w1.dtype == torch.float8_e4m3fn
            w1, w2 = exact(w1, quant_config["w1_scale"]).float(), exact(w2, quant_config["w2_scale"]).float()
            hidden_states = hidden_states.float()
        assert hidden_states.is_contiguous() and w1.stride(-1) == 1 and w2.stride(-1) == 1
        assert hidden_states.size(1) == w1.size(2) and topk_weights.size() == topk_ids.size()
        assert topk_ids.dtype == torch.int32 and topk_weights.dtype == torch.float32
        gates, ups = w1.chunk(2, 1)
        return dense(hidden_states, topk_ids, topk_weights, gates, ups, w2)

    def cute_dsl_fused_moe_bf16(
        x: Tensor, token_selected_experts: Tensor, token_final_scales: Tensor, w1_weight: Tensor, w2_weight: Tensor,
        num_experts: int, top_k: int, num_local_experts: int | None = None, local_expert_offset: int = 0,
    ) -> Tensor:  # fmt: skip
        assert w1_weight.is_contiguous() and w2_weight.is_contiguous()
        assert token_selected_experts.dtype == torch.int32 and token_selected_experts.shape[1] == top_k
        ups, gates = w1_weight.unflatten(1, (-1, 2, 32)).unbind(2)
        assert gates.shape[0] == num_experts
        return dense(x, token_selected_experts, token_final_scales, gates.flatten(1, 2), ups.flatten(1, 2), w2_weight)

    @contextlib.contextmanager
    def autotune(tune_mode: bool = True) -> Iterator[None]:
        tuned.append(tune_mode)
        yield

    def fp8_m_grouped_gemm_nt_masked(
        a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, masked_m: Tensor, expected_m: int
    ) -> None:
        codes, scales = a
        groups, slots, depth = codes.shape
        assert slots % 128 == 0 and expected_m > 0 and masked_m.dtype == torch.int32 and b[0].is_contiguous()
        assert scales.shape == (groups, slots, depth // 128) and scales.stride(1) == 1
        x, w = codes.double() * scales.double().repeat_interleave(128, 2), exact(*b)
        for e, count in enumerate(masked_m.tolist()):
            d[e, :count] = (x[e, :count] @ w[e].T).to(d.dtype)
            d[e, count:] = torch.nan

    def module(name: str, **contents: object) -> None:
        made = types.ModuleType(name)
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        module(name)
    module("vllm.model_executor.layers.fused_moe", fused_experts=fused_experts)
    module("vllm.model_executor.layers.fused_moe.config", fp8_w8a8_moe_quant_config=dict)
    module("deep_gemm", fp8_m_grouped_gemm_nt_masked=fp8_m_grouped_gemm_nt_masked)
    module("flashinfer", autotune=autotune, cute_dsl_fused_moe_bf16=cute_dsl_fused_moe_bf16)
    return tuned


def test_layers_of_other_libraries(libraries: list[bool]) -> None:
    """Layers of other libraries get their weights in the order that they expect, and flashinfer tunes each shape
    once."""
    draw = torch.Generator().manual_seed(3)
    w_in, w_out = torch.randn(4, 16, 128, generator=draw) / 4, torch.randn(4, 64, 16, generator=draw) / 8
    comm: Any = None
    layers = other_layers.installed(("vllm", "flashinfer", "torch"), "bf16", comm, (w_in, w_out), print)
    gates, ups = w_in.mT.chunk(2, 1)
    for tokens in (3, 5, 3):
        x, weights = torch.randn(tokens, 16, generator=draw), torch.rand(tokens, 2, generator=draw)
        ids = torch.rand(tokens, 4, generator=draw).topk(2).indices.int()
        expected = dense(x, ids, weights, gates, ups, w_out.mT)
        for layer in layers.values():
            torch.testing.assert_close(layer(x, ids, weights), expected)
    assert list(layers) == ["vllm", "flashinfer"] and libraries == [True, True, False]


def test_other_libraries_are_measured(
    libraries: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on one rank measures other libraries. One that computes something else or fails is left out, and the run
    says why."""
    options = "--only torch,vllm,flashinfer"
    for result in run_here(monkeypatch, tmp_path, options):
        assert result["vllm"] > 0 and result["flashinfer"] > 0
    assert "vLLM's Triton kernels, no exchange" in capsys.readouterr().out
    for result in run_here(monkeypatch, tmp_path, f"{E4M3} --only torch,vllm,deep_gemm"):
        assert result["vllm"] > 0 and result["deep_gemm"] > 0
    monkeypatch.setitem(other_layers.LAYERS["bf16"], "vllm", lambda *_: lambda x, *_: x * 2)
    monkeypatch.setitem(other_layers.LAYERS["bf16"], "flashinfer", lambda *_: lambda *_: 1 // 0)
    capsys.readouterr()
    left = run_here(monkeypatch, tmp_path, options)
    said = capsys.readouterr().out
    assert said.count("vllm is not measured: its results differ by") == 1
    assert said.count("flashinfer is not measured: integer division") == 1
    assert not any("vllm" in result or "flashinfer" in result for result in left)


def test_libraries_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for name in ("vllm", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    comm: Any = None
    assert other_layers.installed(("vllm", "flashinfer"), "bf16", comm, (torch.zeros(2, 8, 8),) * 2, said.append) == {}
    assert [line.split(":")[0] for line in said] == ["vllm is not measured", "flashinfer is not measured"]


def test_table() -> None:
    run = {
        "experts": 8, "top_k": 2, "hidden": 64, "width": 32, "weights": "bf16", "calls": 10, "replays": 30,
        "read_tb_s": 3.09, "results": [
            {"tokens": 1, "named": 2.0, "floor_us": 10.0, "memory": 11.0, "pair": 5.0, "correct": True},
            {"tokens": 8, "named": 7.5, "floor_us": 40.0, "memory": 42.0, "torch": 60.0, "correct": True},
        ],
    }  # fmt: skip
    heading, *rows = decode.table(run)
    assert heading.endswith("graphs of 10, median of 30 replays; a kernel that only reads: 3.09 TB/s")
    assert [row.split()[-1] for row in rows] == ["8", "7.5", "40.0", "(1.05)", "(1.50)", "5.0"]
    assert rows[3].startswith("layer, kernels for few rows") and "11.0 (1.10)" in rows[3]
    run["results"][1]["correct"] = False
    assert "WRONG" in decode.table(run)[4]
