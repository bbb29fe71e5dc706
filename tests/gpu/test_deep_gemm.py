"""DeepGEMM's grouped GEMMs of Hopper on what a dispatch brings: codes, scales in columns, and the layouts of groups.

They are compiled by nvcc when they are called. `pip install vllm` brings the library (in vllm/third_party), not nvcc.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from typing import Any

import cases
import pytest
import torch
from operators import make_comm, ranks
from torch import Tensor

from ep_ops import formats

POW2 = "e4m3/128/pow2"
TOKENS, TOP_K, HIDDEN, OUT, ALIGNMENT = 96, 3, 512, 256, 128


@pytest.fixture(scope="module")
def deep_gemm() -> Any:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("these layouts are those of GPUs of capability 9.0")
    if shutil.which("nvcc") is None:
        pytest.skip("DeepGEMM compiles its kernels with nvcc, which is not installed")
    names = [name for name in ("deep_gemm", "vllm") if importlib.util.find_spec(name)]
    if not names:
        pytest.skip("DeepGEMM is not installed, by itself or with vLLM")
    return importlib.import_module("deep_gemm" if names[0] == "deep_gemm" else "vllm.third_party.deep_gemm")


def config(world_size: int) -> dict[str, Any]:
    return dict(
        num_experts=4 * world_size, hidden_size=HIDDEN, top_k=TOP_K, max_tokens_per_rank=TOKENS, dtype=torch.bfloat16,
        latency_max_tokens=0,
    )  # fmt: skip


def matrices(count: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [count, OUT, HIDDEN], a scale for each 128 x 128 of them, and the numbers in fp32."""
    w = torch.randn(count, OUT, HIDDEN, generator=draw, device="cuda")
    blocks = w.view(count, OUT // 128, 128, HIDDEN // 128, 128)
    scales = (blocks.abs().amax((2, 4)) / 448).log2().ceil().exp2()
    codes = (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
    exact = (codes.float() * scales[:, :, None, :, None]).view(w.shape)
    return codes.view(w.shape), scales.contiguous(), exact


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_what_arrives_is_taken_as_it_is(layout, seed, together, deep_gemm):
    """DeepGEMM takes rows as they arrive, and returns the products of what codes and scales stand for, to bfloat16's
    rounding."""
    _, world_size = ranks()
    slots = 0 if layout == "contiguous" else 128 * world_size
    with make_comm("cute", "deep", **config(world_size)) as comm:
        comm.warmup([(POW2, "columns")])
        local = comm.num_local_experts
        draw = torch.Generator(device="cuda").manual_seed(seed + comm.rank)
        x = torch.randn(TOKENS, HIDDEN, generator=draw, device="cuda").bfloat16()
        idx = torch.rand(TOKENS, comm.num_experts, generator=draw, device="cuda").argsort(1)[:, :TOP_K].int()
        codes, by, exact = matrices(local, draw)
        rows = slots * local or (world_size * TOKENS * TOP_K // ALIGNMENT + local) * ALIGNMENT
        sizes = dict(cases.room(rows, slots), alignment=ALIGNMENT)
        sent = comm.dispatch(x, idx, format=POW2, scales_as="columns", zeros=True, **sizes)
        route = sent.route
        if layout == "contiguous":
            out = torch.zeros(rows, OUT, dtype=torch.bfloat16, device="cuda")
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous((sent.x, sent.scales), (codes, by), out, route.m_indices)
        else:
            out = torch.zeros(local, slots, OUT, dtype=torch.bfloat16, device="cuda")
            a = sent.x.view(local, slots, HIDDEN), sent.scales
            deep_gemm.m_grouped_fp8_gemm_nt_masked(a, (codes, by), out, route.counts, TOKENS)
            out = out.view(rows, OUT)
        form = formats.format_of(POW2)
        scales = sent.scales.contiguous().view(rows, -1)
        expert = route.m_indices.long()
        held = expert >= 0
        values = formats.dequantize(sent.x, scales, form, torch.float32)[held]
        want = torch.empty(values.shape[0], OUT, device="cuda")
        for e in range(local):
            want[expert[held] == e] = values[expert[held] == e] @ exact[e].t()
        torch.cuda.synchronize()
        comm.check_errors()
        with together():
            assert held.any()
            error = (out[held].float() - want).norm() / want.norm()
            assert error < 5e-3, f"{float(error):.2g} from what codes and scales stand for"
