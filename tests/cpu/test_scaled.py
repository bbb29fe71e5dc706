"""Grouped GEMMs of quantized rows, the layer that has one, and the benchmarks of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from quantized import quantized
from ranks import run_ranks
from torch import Tensor

import ep_ops
from benchmarks import training
from ep_ops.bench import layer
from ep_ops.nn import MoELayer, scaled_grouped_mm

R, M, N, OFFS = 40, 32, 48, (8, 8, 31)  # rows behind the last segment; an expert without any


def given() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes with a NaN behind the segments, scales, matrices, ends of segments."""
    draw = torch.Generator().manual_seed(cases.fresh_seed())
    codes, scales = quantized(torch.randn(R, M, generator=draw), "row/fp32")
    codes, scales = codes.clone(), scales.float().flatten()
    codes[-1], scales[-1] = 0x7F, torch.nan
    w = torch.randn(len(OFFS), M, N, generator=draw).bfloat16()
    return codes.view(torch.float8_e4m3fn), scales, w, torch.tensor(OFFS, dtype=torch.int32)


def test_products_and_gradients() -> None:
    codes, scales, w, offs = given()
    rows = (codes.double() * scales.double()[:, None])[: OFFS[-1]]
    expert = torch.bucketize(torch.arange(OFFS[-1]), offs, right=True)
    columns, by = quantized(w.float().transpose(1, 2).reshape(-1, M), "row/fp32")
    exact = (columns.view(torch.float8_e4m3fn).double() * by.double()).view(-1, N, M).transpose(1, 2)
    w.requires_grad_()
    out = scaled_grouped_mm(codes, scales, w, offs)
    assert out.dtype == torch.bfloat16 and out.shape == (R, N)
    want = torch.einsum("rm,rmn->rn", rows, exact[expert])
    torch.testing.assert_close(out[: OFFS[-1]].double(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
    assert not torch.allclose(want, torch.einsum("rm,rmn->rn", rows, w.detach().double()[expert]), rtol=1e-3)

    grad = torch.randn(R, N).bfloat16()
    (of_w,) = torch.autograd.grad(out, w, grad)
    assert of_w.dtype == torch.bfloat16
    kept = torch.nn.functional.one_hot(expert, len(OFFS)).double()
    want = torch.einsum("re,rm,rn->emn", kept, rows, grad[: OFFS[-1]].double())
    torch.testing.assert_close(of_w.double(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


def test_compiled_layers_return_the_same_bits() -> None:
    """A layer whose first GEMM takes quantized rows compiles as one graph, with the bits of eager code."""
    sizes: dict[str, Any] = dict(num_experts=4, hidden_size=32, top_k=2, max_tokens_per_rank=8, device="cpu")
    with ep_ops.Communicator(**sizes) as comm:
        layer = MoELayer(comm, 16, format="e4m3/row/fp32")
        draw = torch.Generator().manual_seed(cases.fresh_seed())
        x = torch.randn(8, 32, generator=draw).bfloat16().requires_grad_()
        found = []
        for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            out = call(x)
            grads = torch.autograd.grad(out.float().square().sum(), (x, *layer.parameters()))
            found.append((out, *grads))
        for eager, compiled in zip(*found, strict=True):
            assert torch.equal(eager, compiled)


def test_what_is_rejected() -> None:
    codes, scales, w, offs = given()
    with pytest.raises(TypeError, match="rows have torch.uint8, scales torch.float32"):
        scaled_grouped_mm(codes.view(torch.uint8), scales, w, offs)
    with pytest.raises(ValueError, match=r"w \(3, 32, 47\); allowed: \[R, M\]"):
        scaled_grouped_mm(codes, scales, w[:, :, 1:], offs)
    with ep_ops.Communicator(num_experts=4, hidden_size=64, top_k=2, max_tokens_per_rank=8, device="cpu") as comm:
        for format in ("e4m3/128/pow2", None, 3):
            with pytest.raises(ValueError, match=f"format is {format!r}; allowed here: '', 'e4m3/row/fp32'"):
                MoELayer(comm, 16, format=format)
        if comm.dtype != torch.bfloat16:
            with pytest.raises(ValueError, match="on a communicator of torch.float32"):
                MoELayer(comm, 16, format="e4m3/row/fp32")


def layers(format: str, way: str, seed: int) -> dict[str, float]:
    """How far the output and each gradient are from those of the same layer without a format."""
    with ep_ops.Communicator(
        num_experts=4, hidden_size=128, top_k=2, max_tokens_per_rank=32, dtype=torch.bfloat16, device="cpu"
    ) as comm:
        draw = torch.Generator().manual_seed(seed + comm.rank)
        x, grad = (torch.randn(32, 128, generator=draw).bfloat16() for _ in range(2))
        results = []
        for asked in (format, ""):
            own = MoELayer(comm, 64, format=asked, dynamic=way == "dynamic")
            leaf = x.clone().requires_grad_()
            out = list(own.steps(leaf))[-1] if way == "steps" else own(leaf)
            assert out is not None
            results.append([out.detach(), *torch.autograd.grad(out, (leaf, *own.parameters()), grad)])
        dist.barrier()
        names = ("out", "x", "router", "w_in", "w_out")
        pairs = zip(names, *results, strict=True)
        return {name: float((a.double() - b.double()).norm() / b.double().norm()) for name, a, b in pairs}


@pytest.mark.parametrize(("format", "way"), [("e4m3/row/fp32", "dynamic"), ("wire:e4m3/128/pow2", "steps")])
def test_layer_is_near_the_one_without_a_format(format: str, way: str) -> None:
    """A layer with a format is near the one without, and not the same: rows have been rounded."""
    for errors in run_ranks(2, layers, format, way, cases.fresh_seed()):
        for name, error in errors.items():
            assert 0.005 < error < (0.2 if name == "router" else 0.08), errors


def benchmarks(folder: Path) -> list[str]:
    small = ["--device", "cpu", "--backend", "reference"]
    wanted = [
        (layer, "--tokens 16 --hidden 128 --width 16 --experts 4 --top-k 2 --times 3 --iterations 1"),
        (training, f"--steps 2 --hidden 128 --sequences 1 --only e4m3/row/fp32 --plot {folder}/curves.svg"),
    ]
    found = []
    for module, text in wanted:
        out = folder / f"{module.__name__}.json"
        args = module.parser().parse_args([*small, *text.split(), "--out", str(out)])
        module.measure(torch.device("cpu"), args)
        found.append(out)
    return [str(path) for path in found]


def test_benchmarks_on_cpu_processes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    of_layer, of_training = (json.loads(Path(path).read_text()) for path in run_ranks(2, benchmarks, tmp_path)[0])
    assert [result["way"] for result in of_layer["results"]] == list(layer.DEFAULT)
    rows = {result["way"]: result["capacity"] for result in of_layer["results"]}
    assert rows["exact"] is None and rows["mean"] < rows["worst"] == rows["wire"]
    assert all(result["forward_backward"] > 0 and result["dropped"] == 0 for result in of_layer["results"])
    plain, quantized_rows = of_training["results"]
    assert plain["format"] == "" and plain["output_error"] == 0 and plain["gap"] == 0
    assert 0.01 < quantized_rows["output_error"] < training.MAX_OUTPUT_ERROR and quantized_rows["correct"]
    assert len(plain["losses"]) == 2 and plain["losses"] != quantized_rows["losses"]
    assert "e4m3/row/fp32" in (tmp_path / "curves.svg").read_text()


def test_a_run_that_ends_elsewhere_is_called_wrong() -> None:
    results: list[dict[str, Any]] = [
        {"last": 1.0, "output_error": 0.0}, {"last": 1.2, "output_error": 0.05}, {"last": 1.0, "output_error": 0.2}
    ]  # fmt: skip
    training.judge(results)
    assert [result["correct"] for result in results] == [True, False, False]
