"""Kernels of ep_ops.nn, which read vectors of 16 bytes, get copies of tensors that begin elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ep_ops import nn
from ep_ops.backends.cute import local_kernels
from ep_ops.nn import few_rows, few_rows_e4m3, list_operators, live_rows


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    memory[1:] = tensor.flatten()
    return memory[1:].view(tensor.shape)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that kernels get, which do not run."""
    found: list[torch.Tensor] = []

    def run(kernel: Any, blocks: int, device: torch.device, tensors: tuple[Any, ...], *numbers: int) -> None:
        found.extend(tensor for tensor in tensors if tensor is not None)

    monkeypatch.setattr(local_kernels, "_run", run)
    monkeypatch.setattr(local_kernels, "_multiprocessors", lambda index: 4)
    for module in (live_rows, list_operators, few_rows, few_rows_e4m3):
        monkeypatch.setattr(module, "kernels_on", lambda device: local_kernels)
    return found


def check(given: list[torch.Tensor], *wanted: torch.Tensor) -> None:
    assert given and all(tensor.data_ptr() % 16 == 0 and tensor.is_contiguous() for tensor in given)
    for tensor in wanted:
        assert any(torch.equal(tensor, other) for other in given if other.shape == tensor.shape)


def test_expert_lists(given: list[torch.Tensor]) -> None:
    local_idx = torch.randint(-1, 4, (6, 2), dtype=torch.int32)
    nn.expert_lists(misaligned(local_idx), 4)
    check(given, local_idx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_rows(given: list[torch.Tensor], dtype: torch.dtype) -> None:
    x, index, weights = torch.randn(5, 16).to(dtype), torch.zeros(3, 2, dtype=torch.int32), torch.rand(3, 2)
    torch.ops.ep.sum_rows(misaligned(x), misaligned(index), misaligned(weights))
    check(given, x, index, weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_swiglu(given: list[torch.Tensor], dtype: torch.dtype) -> None:
    x, offs = torch.randn(6, 32).to(dtype), torch.tensor([6], dtype=torch.int32)
    torch.ops.ep.swiglu(misaligned(x), offs, offs, 1, 0)
    check(given, x)
    given.clear()
    grad = torch.randn(6, 16).to(dtype)
    torch.ops.ep.swiglu_backward(misaligned(grad), misaligned(x), offs, offs, 1, 0)
    check(given, x, grad)
    given.clear()
    weights = torch.rand(6)
    torch.ops.ep.swiglu_weighted_backward(*map(misaligned, (grad, x, weights)), offs, offs, 1)
    check(given, x, grad, weights)


@pytest.mark.parametrize("transposed", [False, True])
def test_few_rows(given: list[torch.Tensor], transposed: bool) -> None:
    x, offs = torch.randn(6, 32).bfloat16(), torch.tensor([6], dtype=torch.int32)
    w_in, w_out = torch.randn(1, 32, 16).bfloat16(), torch.randn(1, 8, 32).bfloat16()
    odd = [misaligned(w.mT).mT if transposed else misaligned(w) for w in (w_in, w_out)]
    torch.ops.ep.few_rows_mlp(misaligned(x), *odd, offs, offs, 1, 6, 1, 1)
    check(given, x, *(w.mT if transposed else w for w in (w_in, w_out)))


def test_few_rows_e4m3(given: list[torch.Tensor]) -> None:
    codes = [torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((6, 128), (1, 256, 128), (1, 128, 128))]
    scales = [torch.rand(shape) for shape in ((6, 1), (1, 2, 1), (1, 1, 1))]
    offs = torch.tensor([6], dtype=torch.int32)
    tensors = [misaligned(tensor) for pair in zip(codes, scales, strict=True) for tensor in pair]
    torch.ops.ep.few_rows_mlp_e4m3(*tensors, offs, offs, 1, 6, 1, 1)
    assert given and all(tensor.data_ptr() % 16 == 0 and tensor.is_contiguous() for tensor in given)
    read = [(tensor.shape, tensor.view(torch.uint8).tolist()) for tensor in given]
    assert all((tensor.shape, tensor.view(torch.uint8).tolist()) in read for tensor in (*codes, *scales))


def test_routes_of_places(given: list[torch.Tensor]) -> None:
    ids, rows = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2, dtype=torch.int32)
    arrivals, places = torch.arange(4 * 3 + 4, dtype=torch.int32), torch.full((3, 2), 2, dtype=torch.int32)
    torch.ops.ep.places_route(*map(misaligned, (ids, rows, arrivals, places)), 6, 0, [2])
    check(given, ids, rows, arrivals, places)


def test_aligned_tensors_are_not_copied() -> None:
    x = torch.randn(4, 8)
    assert local_kernels.readable(x) is x
    assert torch.equal(local_kernels.readable(x.t()), x.t())
