"""benchmarks/rivals.py on a CPU: what it measures, other libraries' layouts of weights, and what it says of others."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.nn.functional import silu

from benchmarks import rivals

SMALL = "--device cpu --backend reference --hidden 64 --experts 8 --top-k 2 --width 32 --rounds 2 --calls 2"


def dense(x: Tensor, ids: Tensor, weights: Tensor, gates: Tensor, ups: Tensor, downs: Tensor) -> Tensor:
    """Weighted sums of SwiGLU experts. `gates`, `ups`: [E, F, H]; `downs`: [E, H, F]."""
    out = torch.zeros(x.shape)
    for e in range(gates.shape[0]):
        of_expert = (weights * (ids == e)).sum(1, keepdim=True)
        out = out + of_expert * ((silu(x @ gates[e].t()) * (x @ ups[e].t())) @ downs[e].t()).float()
    return out.to(x.dtype)


def stand_ins(wrong: bool) -> None:
    """Install stand-ins for Liger and SonicMoE, with their parameters and layouts of weights."""

    class LigerFusedMoEFunction:
        @staticmethod
        def apply(
            x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
        ) -> Any:
            assert gate_up_proj.is_contiguous() and down_proj.is_contiguous() and top_k_index.dtype == torch.int32
            gates, ups = gate_up_proj.chunk(2, 1)
            return dense(x, top_k_index, top_k_weights, gates, ups, down_proj)

    def moe_general_routing_inputs(
        x: Tensor, router_scores: Tensor, token_indices: Tensor, expert_indices: Tensor, w1: Tensor, b1: None,
        w2: Tensor, b2: None, E: int, stream_id: int, activation_type: str, is_inference_mode_enabled: bool = False,
        concat_layout: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert concat_layout and activation_type == "swiglu" and is_inference_mode_enabled != torch.is_grad_enabled()
        assert w1.shape[-1] == E and token_indices.tolist() == sorted(token_indices.tolist())
        gates, ups = w1.permute(2, 0, 1).chunk(2, 1)
        ids, scores = expert_indices.view(x.shape[0], -1), router_scores.view(x.shape[0], -1)
        out = dense(x, ids, scores, *((ups, gates) if wrong else (gates, ups)), w2.permute(2, 0, 1))
        return out, torch.zeros(E)

    modules = {
        "liger_kernel": {}, "liger_kernel.ops": {"LigerFusedMoEFunction": LigerFusedMoEFunction},
        "sonicmoe": {"moe_general_routing_inputs": moe_general_routing_inputs},
        "sonicmoe.enums": {"ActivationType": types.SimpleNamespace(SWIGLU="swiglu")},
    }  # fmt: skip
    for name, content in modules.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(content)
    torch.cuda.current_stream = lambda *_: types.SimpleNamespace(cuda_stream=0)  # type: ignore[assignment]


def measured(options: str, others: str, out: Path) -> None:
    args = rivals.options().parse_args([*options.split(), *SMALL.split(), "--out", str(out)])
    stream = torch.cuda.current_stream
    try:
        if others:
            stand_ins(others == "wrong")
        rivals.measure(torch.device("cpu"), args)
    finally:
        torch.cuda.current_stream = stream
        for name in [name for name in sys.modules if name.partition(".")[0] in ("liger_kernel", "sonicmoe")]:
            del sys.modules[name]


def run(options: str, others: str, out: Path) -> dict[str, Any]:
    run_ranks(1, measured, options, others, out)
    return json.loads(out.read_text())


def test_decode(tmp_path: Path) -> None:
    """Layers that are there are measured with each number of tokens, and the others are named with the reason."""
    found = run("decode --tokens 1,3", "", tmp_path / "found.json")
    assert found["benchmark"] == "rivals decode" and found["machine"]["torch"] and "liger-kernel" in found["versions"]
    assert [result["tokens"] for result in found["results"]] == [1, 3]
    for result in found["results"]:
        assert result["copies"] >= 2 and 0 < result["named"] <= 6 and "floor_us" not in result
        assert [row["layer"] for row in result["rows"]] == ["ep_ops", "torch"]
        assert all(row[name] > 0 for row in result["rows"] for name in ("us", "us_ratio", "ready_s"))
        assert all(row["error"] < 3e-2 for row in result["rows"])
    assert "flashinfer" in found["missing"] and "ep_ops, plain Triton GEMMs" in found["missing"]
    lines = rivals.table(found)
    assert lines[-1].startswith("flashinfer: ModuleNotFoundError: ")
    assert any(line.startswith("torch ") and line.count("(") == 2 for line in lines)


@pytest.mark.parametrize("others", ["right", "wrong"])
def test_training(others: str, tmp_path: Path) -> None:
    """Liger and SonicMoE get weights in their layouts. A layer with wrong results is named, and not measured."""
    found = run("training --tokens 16", others, tmp_path / "found.json")
    (result,) = found["results"]
    rows = {row["layer"]: row for row in result["rows"]}
    wanted = ["ep_ops", "ep_ops, token-major", "torch", "Liger", *["SonicMoE"] * (others == "right")]
    assert list(rows) == wanted and ("SonicMoE" in found["missing"]) == (others == "wrong")
    assert all(row[name] > 0 for row in rows.values() for name in ("forward_us", "forward_backward_us_ratio"))
    assert result["floor_forward_us"] > 0 and result["floor_forward_backward_us"] > 0
    assert rows["ep_ops"]["forward_us_ratio"] == 1 and rows["torch"]["error"] < 1e-3
    assert result["weights_mib"] == 8 * 3 * 64 * 32 * 2 / 2**20
    if others == "wrong":
        assert found["missing"]["SonicMoE"].startswith("ValueError: results differ from torch's: out ")


def interrupted(out: Path) -> None:
    def stop(*_: Tensor) -> Any:
        raise KeyboardInterrupt

    args = rivals.options().parse_args([*"training --tokens 16".split(), *SMALL.split(), "--out", str(out)])
    rivals.TRAINING = {"torch": rivals.of_torch, "Liger": stop}
    rivals.WAYS = rivals.WAYS | {rivals.QUACK: "token_major"}  # quack needs a GPU
    with pytest.raises(KeyboardInterrupt):
        rivals.measure(torch.device("cpu"), args)


def test_an_interrupted_run_has_the_layers_before(tmp_path: Path) -> None:
    run_ranks(1, interrupted, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    rows = {row["layer"]: row for row in found["results"][0]["rows"]}
    assert list(rows) == [*rivals.WAYS, "torch"]
    ratios = {name: [key for key in row if "_ratio" in key] for name, row in rows.items()}
    to_ours = ["forward_us_ratio", "forward_backward_us_ratio"]
    to_both = [f"{figure}_{name}" for figure in rivals.FIGURES for name in ("ratio", "ratio_quack")]
    assert ratios == {"ep_ops": to_ours, "ep_ops, token-major": to_ours, rivals.QUACK: to_both, "torch": to_both}
    assert rows[rivals.QUACK]["forward_us_ratio_quack"] == 1
    assert min(rows["torch"][key] for key in to_both) > 0
    assert any(line.startswith("torch ") and line.count(", ") == 2 for line in rivals.table(found))


def test_options(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are those of the model, except those that are given; one rank runs."""
    read = []
    monkeypatch.setattr(rivals, "on_every_rank", lambda measure, args: read.append(args) or 0)
    assert rivals.main("training --device cpu --model qwen3-30b --width 64".split()) == 0
    assert (read[0].hidden, read[0].width, read[0].tokens, read[0].ranks) == (2048, 64, (4096,), 1)
    with pytest.raises(SystemExit):
        rivals.main("decode --device cpu --ranks 2".split())
    assert "--ranks is 2; allowed: 1" in capsys.readouterr().err
