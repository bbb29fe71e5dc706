"""This rank's experts of a module of transformers, computed on the rows of a dispatch."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.activations import SiLUActivation
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    _default_apply_gate,
    _grouped_linear,
    grouped_mm_experts_forward,
)

try:
    from transformers.integrations.finegrained_fp8 import FP8Experts
except ImportError:
    FP8Experts = None

from ep_ops.communicator import Communicator
from ep_ops.config import DTYPES
from ep_ops.formats import ELEMENT
from ep_ops.nn import expert_mlp, expert_of_rows, few_rows_mlp_e4m3, mask_rows, of_rows, swiglu_rows
from ep_ops.nn.expert_module import local_part
from ep_ops.nn.few_rows_e4m3 import BLOCK
from ep_ops.nn.gemms import choose
from ep_ops.nn.token_major import Rows
from ep_ops.records import TOKEN_MAJOR, Dispatched, Route

GROUPED_ROWS = Rows()


class LocalExperts:
    """Computes a module of experts, which holds this rank's, on rows that are grouped by expert.

    Where ``forward`` of the module would run transformers' "grouped_mm", the same GEMMs run on the rows as they are.
    That implementation sorts and gathers its rows first, and weights and scatters the results. All other
    implementations get the rows with their expert ids.
    """

    def __init__(
        self, module: Any, forward: Callable[..., Tensor], dtype: torch.dtype | None, rows: Rows = GROUPED_ROWS
    ) -> None:  # fmt: skip
        """``forward``: of the module, on local expert ids. ``dtype``: to which parameters are cast; None: none are.
        ``rows``: which rows are received.

        Raises:
            ValueError: rows are token-major, and the experts are not SwiGLU experts without biases.
        """
        self.module, self.forward, self.dtype, self.rows = module, forward, dtype, rows
        if rows.layout == TOKEN_MAJOR and not _is_plain(module):
            raise ValueError(
                f"rows is {TOKEN_MAJOR!r}, and the experts are a {type(module).__name__}; allowed: SiLU-gated experts"
                " without biases, norms and quantized parameters, whose inputs are not weighted"
            )
        self._chooses = _chooses(forward)

    def __call__(self, sent: Dispatched) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of the experts [R, H], and the weights with which they are combined."""
        module, route, weights = self.module, sent.route, sent.weights
        x = sent.x
        if getattr(module, "weights_first", False):
            assert weights is not None
            x, weights = x * mask_rows(weights, route).unsqueeze(1).to(x.dtype), None
        with _local_parameters(module, self.dtype):
            if route.offs.shape[0] == 0:  # depend on the parameters, to take part in backward
                trained = [p.sum() for p in module.parameters() if p.requires_grad and p.dtype in DTYPES]
                y = mask_rows(x + sum(trained, x.new_zeros(())).to(x.dtype), route)
            elif self._runs_grouped_mm():
                y = _grouped(module, x, route)
            else:
                y = self.with_ids(x, route)
        return y, weights

    def token_major(
        self, comm: Communicator, x: Tensor, ids: Tensor, weights: Tensor, capacity: int | None
    ) -> Tensor:  # fmt: skip
        """Return the weighted sums of the experts' outputs for tokens, sent as token-major rows. Collective."""
        module, how = self.module, self.rows
        with _local_parameters(module, self.dtype):
            w_in, w_out = module.gate_up_proj, module.down_proj
            if not module.is_transposed:  # [El, 2F, H] and [El, H, F]
                w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
            return expert_mlp(
                comm, x, ids, weights, w_in, w_out, capacity=capacity, rows=how.layout, places=how.places,
                redispatch=how.redispatch,
            ).out  # fmt: skip

    @torch.compiler.assume_constant_result  # called while torch.compile traces
    def takes_codes(self, comm: Communicator) -> bool:
        """Return whether calls without gradients run :func:`ep_ops.nn.few_rows_mlp_e4m3`, on rows that are sent in
        e4m3. The result is the same on all ranks.

        That is so for experts with blocks of 128 x 128 if few rows arrive for each, and on CPUs, where transformers has
        no kernels.
        """
        if comm.dtype != torch.bfloat16 or not _has_block_scales(self.module):
            return False
        width = self.module.down_proj.shape[-1]
        few = choose(comm, "auto", width).tokens >= comm.max_tokens_per_rank
        return few or comm.device.type == "cpu"

    def of_codes(self, sent: Dispatched, ranks: int) -> Tensor:
        """Return the outputs [R, H] of experts that take codes."""
        module = self.module
        with _local_parameters(module, None):
            w_in, w_out = module.gate_up_proj, module.down_proj
            of_in, of_out = module.gate_up_proj_scale_inv, module.down_proj_scale_inv
            return few_rows_mlp_e4m3(sent.x, sent.scales, w_in, of_in, w_out, of_out, sent.route, ranks)

    def _runs_grouped_mm(self) -> bool:
        if isinstance(self.forward, functools.partial):
            return self.forward.func is grouped_mm_experts_forward
        name = self.module.config._experts_implementation if self._chooses else None
        return name is not None and ALL_EXPERTS_FUNCTIONS.get(name) is grouped_mm_experts_forward

    def with_ids(self, x: Tensor, route: Route) -> Tensor:
        """Return the results of the module's own forward."""
        expert = expert_of_rows(route).unsqueeze(1)
        there = expert >= 0
        # Rows that hold no token are undefined. Implementations skip the id num_experts. Eager loops of some models do
        # not, and get rows of zeros with weight zero.
        config = getattr(self.module, "config", None)
        eager = config is not None and config._experts_implementation == "eager"
        ids = torch.where(there, expert, 0 if eager else route.offs.shape[0])
        y = self.forward(torch.where(there, x, 0), ids, there.to(x.dtype))
        if torch.is_grad_enabled():  # the gradient of undefined rows is undefined, and NaN times zero is NaN
            y = torch.where(there, y, 0)
        return y


def give_interface(experts: Any, top_k: int) -> None:
    """Give Llama 4's experts, whose inputs are multiplied by their scores, the interface of other models' experts."""
    experts.has_gate, experts.has_bias, experts.has_post_expert_norm = True, False, False
    experts.is_transposed, experts._is_expert_parallel, experts.weights_first = True, False, True
    experts.top_k = top_k
    experts._apply_gate = functools.partial(_default_apply_gate, experts)
    experts.forward = functools.partial(grouped_mm_experts_forward, experts)


def _chooses(forward: Callable[..., Any]) -> bool:
    """Return whether ``forward`` is what ``use_experts_implementation`` of transformers has made for one of
    ``ALL_EXPERTS_FUNCTIONS``. Quantized experts have functions of their own."""
    function = getattr(forward, "__func__", forward)
    if not inspect.isfunction(function):
        return False
    return inspect.getclosurevars(function).nonlocals.get("experts_interface") is ALL_EXPERTS_FUNCTIONS


def _grouped(experts: Any, x: Tensor, route: Route) -> Tensor:
    """Return what ``grouped_mm_experts_forward`` computes for rows along a route.

    GEMMs and swiglu_rows ignore rows after the last segment. Padding rows of segments hold zeros where gradients are
    enabled, and so do their gradients, so they add nothing to the gradients of matrices. The gradients of biases, and
    of parameters of norms and activations, are sums over all rows, so the others are masked.
    """
    y = _product(experts, "gate_up_proj" if experts.has_gate else "up_proj", x, route)
    if experts.has_gate and _is_swiglu(experts):
        y = swiglu_rows(y, route)
    else:
        activation = experts._apply_gate if experts.has_gate else experts.act_fn
        own = getattr(experts, "act_fn", None)
        learns = isinstance(own, nn.Module) and any(True for _ in own.parameters())
        y = _masked(activation, y, route) if learns else activation(y)
    y = _product(experts, "down_proj", y, route)
    if getattr(experts, "has_post_expert_norm", False):
        y = _masked(experts.post_expert_norm, y, route)
    return y


def _masked(function: Callable[[Tensor], Tensor], x: Tensor, route: Route) -> Tensor:
    """Return ``function(x)`` such that rows without a token add nothing to the gradients of its parameters."""
    return mask_rows(function(mask_rows(x, route)), route)


def _product(experts: Any, name: str, x: Tensor, route: Route) -> Tensor:
    bias = of_rows(getattr(experts, f"{name}_bias"), route) if experts.has_bias else None
    return _grouped_linear(x, getattr(experts, name), route.offs, bias=bias, is_transposed=experts.is_transposed)


def _is_swiglu(experts: Any) -> bool:
    """Return whether the experts' activation is silu of the first half of each row times the second half."""
    gate = experts._apply_gate
    function = gate.func if isinstance(gate, functools.partial) else getattr(gate, "__func__", gate)
    return function is _default_apply_gate and _is_silu(experts.act_fn)


def _is_silu(function: Any) -> bool:
    return function is nn.functional.silu or isinstance(function, (SiLUActivation, nn.SiLU))


def _is_plain(experts: Any) -> bool:
    """Return whether experts are SwiGLU experts of two matrices each."""
    others = experts.has_bias, getattr(experts, "has_post_expert_norm", False), getattr(experts, "weights_first", False)
    return experts.has_gate and not any(others) and not is_quantized(experts) and _is_swiglu(experts)


def _has_block_scales(experts: Any) -> bool:
    """Return whether experts are transformers' FP8 experts with e4m3 weights, scales for blocks of 128 x 128, rows that
    are quantized in each call, and SwiGLU."""
    if FP8Experts is None or not isinstance(experts, FP8Experts) or not experts.has_gate or experts.has_bias:
        return False
    changes = "swiglu_alpha", "limit", "gate_softcap"  # of the activation
    return (
        experts.down_proj.dtype == ELEMENT
        and list(experts.block_size or ()) == [BLOCK, BLOCK]
        and experts.activation_scheme == "dynamic"
        and experts.gate_up_proj.shape[1] % (2 * BLOCK) == experts.gate_up_proj.shape[2] % BLOCK == 0
        and type(experts)._apply_gate is FP8Experts._apply_gate
        and all(getattr(experts, name, None) is None for name in changes)
        and _is_silu(experts.act_fn)
    )


def is_quantized(experts: nn.Module) -> bool:
    """Return whether parameters of experts are codes and scales, which must not be cast."""
    return any(p.dtype not in DTYPES for p in experts.parameters())


@contextlib.contextmanager
def _local_parameters(experts: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Replace the parameters of the experts within the block by this rank's shards, in ``dtype`` unless it is None or
    they are quantized."""
    parameters: dict[str, Any] = experts._parameters
    keep = dtype is None or is_quantized(experts)
    names, whole = getattr(experts, "expert_names", ()), {name: p for name, p in parameters.items() if p is not None}
    try:
        for name, p in whole.items():
            own = local_part(experts, p) if isinstance(p, DTensor) or name in names else p
            parameters[name] = own if keep else own.to(dtype)
        yield
    finally:
        parameters.update(whole)
