"""SwiGLU experts on several ranks whose matrices w_in are the transpose of contiguous ones: values, gradients, and
that gradients keep the strides in which they were computed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import cases
import pytest
import quacks
import torch
from ranks import run_ranks
from test_token_major_experts import QUACK, SIZES, TOKENS, F, H, layer_of, trained
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import ep_ops
from ep_ops.nn import quack_mm

PARAMETRIZED = "experts.parametrizations.w_in.original"


class Transposed(nn.Module):
    """Stores matrices as their transpose, as docs/training.md shows."""

    def forward(self, w: Tensor) -> Tensor:
        return w.transpose(1, 2)

    def right_inverse(self, w: Tensor) -> Tensor:
        return w.transpose(1, 2).contiguous()


def _steps(sizes: dict[str, Any], divisor: int | None, seed: int) -> tuple[list[dict[str, Tensor]], list[list[str]]]:
    """Results of a step of the ordinary layer, of one with transposed matrices, and of one with the parametrization;
    and the GEMMs of the last two."""
    called = quacks.install(mock.Mock(setattr=setattr), checks=False)
    run, written = quack_mm.gemm, set[int]()

    def gemm(*args: Any, **how: Any) -> None:
        run(*args, **how)
        written.add(args[2].data_ptr())

    quack_mm.gemm = gemm
    with ep_ops.Communicator(**SIZES | sizes, dtype=torch.float64) as comm:
        draw = torch.Generator().manual_seed(seed + comm.rank)
        x = torch.randn(TOKENS - comm.rank, H, generator=draw, dtype=torch.float64)
        plain, gemms = layer_of(comm), []
        plain.experts.gradient_divisor = divisor
        found = [trained(plain, x, plain)]
        for stored in ("experts.w_in", PARAMETRIZED):
            layer = layer_of(comm, rows="token_major", gemms=QUACK)
            layer.experts.gradient_divisor = divisor
            if stored == PARAMETRIZED:
                register_parametrization(layer.experts, "w_in", Transposed())
                layer.experts.reset_parameters()
            else:
                local = layer.experts.w_in.to_local().detach()
                layer.experts.w_in = nn.Parameter(layer.experts.from_local(quacks.transposed(local)))
            called.clear(), written.clear()
            found.append(trained(layer, x, layer))
            gemms.append([name for name, _ in called])
            parameter = layer.get_parameter(stored)
            assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
            own, local = parameter.grad.to_local(), parameter.to_local()
            if comm.num_local_experts:
                assert own.stride() == local.stride() and parameter.stride()[1:] == local.stride()[1:]
                assert divisor is not None or own.data_ptr() in written  # no copy of what the GEMM has written
    return found, gemms


@pytest.mark.parametrize(("sizes", "divisor"), [
    ({}, None), ({}, 3), ({"num_experts": 1, "top_k": 1}, None),
], ids=["even", "divided", "a rank without experts"])  # fmt: skip
def test_gradients_are_not_transposed(sizes: dict[str, Any], divisor: int | None) -> None:
    """With w_in transposed, or stored as [E, 2F, H] by a parametrization, quack's GEMMs compute SwiGLU in their
    epilogues. Gradients have the values of the ordinary layer, and those that are not divided are the tensors that the
    GEMMs have written."""
    for (expected, direct, parametrized), gemms in run_ranks(2, _steps, sizes, divisor, cases.fresh_seed()):
        stored = parametrized.pop(PARAMETRIZED)
        assert stored.is_contiguous() and stored.shape[1:] == (2 * F, H)
        torch.testing.assert_close({**parametrized, "experts.w_in": stored.transpose(1, 2)}, expected)
        torch.testing.assert_close(direct, expected)
        names = ["gated", "gemm", "gated_gradient", "gemm", "gemm", "gemm"] if len(stored) else []
        assert gemms == [names] * 2
