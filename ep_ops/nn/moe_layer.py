"""A mixture-of-experts layer whose experts are spread over the ranks of a communicator, and its dense twin.

    comm = ep_ops.Communicator(num_experts=64, hidden_size=2048, top_k=8, max_tokens_per_rank=4096)
    layer = ep_ops.nn.MoELayer(comm, intermediate_size=1024).to(comm.device)
    out = layer(x)                                     # x [tokens of this rank, 2048], bfloat16

What crosses ranks is in two lines of ``MoELayer.forward``, dispatch and combine; the rest is ordinary PyTorch.
(``MoELayer.steps`` has them in halves.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ep_ops.communicator import Communicator
from ep_ops.nn.grouped import grouped_mm
from ep_ops.nn.live_rows import swiglu_rows
from ep_ops.nn.scaled import ROW, scaled_grouped_mm
from ep_ops.overflow import recomputing
from ep_ops.records import Dispatched


class MoELayer(nn.Module):
    """Top-k routed SwiGLU experts, ``comm.num_local_experts`` of them on this rank.

    Args:
        comm: gives the number of experts, top_k, hidden size H, dtype, and which experts live here.
        intermediate_size: F, the width inside each expert.
        capacity: rows of this rank's receive buffer, a multiple of ``comm.alignment``. Rows that do not fit are
            dropped and counted in ``dropped``. None: ``comm.capacity()``, the worst case, without drops.
        dynamic: size the receive buffer exactly, at the price of one host synchronisation a call. Under
            ``torch.compile(fullgraph=True)`` set ``torch._dynamo.config.capture_dynamic_output_shape_ops = True``.
        shared_intermediate_size: width of one more expert that every token visits on its own rank; 0 for none. It
            computes while rows are dispatched (unless ``dynamic``).
        format: what rows are dispatched as (docs/formats.md): empty for as they are, ``wire:`` and a format for fewer
            bytes on the way, or ``e4m3/row/fp32`` for a first GEMM in e4m3 (:func:`ep_ops.nn.scaled_grouped_mm`; the
            communicator's dtype must be bfloat16). Gradients are never quantised.
        seed: of the initial weights. They depend on it and on the sizes, not on the number of ranks.

    forward: x [T, H] or [B, S, H] in ``comm.dtype`` -> the same shape and dtype. T (B times S) is 0 to
    ``comm.max_tokens_per_rank`` and may differ between ranks, all of which take part in every call. ``max_tokens``, a
    smaller bound that all ranks pass alike, lets a call of few tokens take the decode kernels and a smaller buffer.
    Under ``torch.autocast`` the router stays in float32. Each rank's gradients are right as they are for
    ``w_in`` and ``w_out`` (the tokens of all ranks are in them); those of the parameters that every rank holds
    (router, shared expert) are to be summed over the ranks, as in data parallelism.

    ValueError for a size or a format that cannot be. A call raises what :meth:`ep_ops.Communicator.dispatch` raises.
    """

    dropped: Tensor  # [El] int32: rows dropped by each local expert since the layer was made

    def __init__(
        self,
        comm: Communicator,
        intermediate_size: int,
        *,
        capacity: int | None = None,
        dynamic: bool = False,
        shared_intermediate_size: int = 0,
        format: str = "",
        seed: int = 0,
    ) -> None:
        if not isinstance(comm, Communicator):
            raise TypeError(f"comm is {comm!r}; expected an ep_ops.Communicator, which has the numbers and sizes")
        super().__init__()
        if format not in ("", ROW) and not format.startswith("wire:"):
            raise ValueError(f"format is {format!r}; allowed here: '', {ROW!r}, or one that begins with 'wire:'")
        if format == ROW and comm.dtype != torch.bfloat16:
            raise ValueError(f"format is {ROW!r} on a communicator of {comm.dtype}; allowed: torch.bfloat16")
        self.format = format
        for name, size, least in (("", intermediate_size, 1), ("shared_", shared_intermediate_size, 0)):
            if type(size) is not int or size < least:
                raise ValueError(f"{name}intermediate_size is {size!r}; it must be an int of at least {least}")
        if dynamic and capacity is not None:
            raise ValueError(f"capacity={capacity} was given, but dynamic=True lets no row be dropped")
        self.comm, self.capacity, self.dynamic = comm, capacity, dynamic
        experts = range(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
        self.router = router_weight(comm.num_experts, comm.hidden_size, seed)
        self.w_in, self.w_out = expert_weights(experts, comm.hidden_size, intermediate_size, comm.dtype, seed)
        self.shared = shared_expert(comm.hidden_size, shared_intermediate_size, comm.dtype, seed)
        self.register_buffer("dropped", torch.zeros(comm.num_local_experts, dtype=torch.int32), persistent=False)

    def forward(self, x: Tensor, max_tokens: int | None = None) -> Tensor:
        if self.shared is not None and not self.dynamic:
            *_, out = self.steps(x, max_tokens=max_tokens)
            assert out is not None
            return out
        weights, experts = choose_experts(x, self.router, self.comm.top_k)
        if self.dynamic:
            received = self.comm.dispatch_dynamic(x, experts, weights, max_tokens=max_tokens, format=self.format)
        else:
            received = self.comm.dispatch(
                x, experts, weights, capacity=self.capacity, max_tokens=max_tokens, format=self.format
            )
        out = self.comm.combine(self._experts(received), received.route, received.weights)
        return out if self.shared is None else out + self.shared(x)

    def steps(self, x: Tensor, flight: int = 0, max_tokens: int | None = None) -> Iterator[Tensor | None]:
        """What ``forward`` does, for :func:`ep_ops.nn.interleave`: yields None between the halves of its dispatch, and
        of its combine, then the result. The shared expert runs beside the dispatch. RuntimeError if ``dynamic``."""
        if self.dynamic:
            raise RuntimeError("dynamic is True: exact sizes wait for the device, and split operations for nothing")
        weights, experts = choose_experts(x, self.router, self.comm.top_k)
        dispatch = self.comm.dispatch_start(
            x, experts, weights, capacity=self.capacity, max_tokens=max_tokens, flight=flight, format=self.format
        )
        try:
            shared = None if self.shared is None else self.shared(x)
            yield None
        except BaseException:
            _end(self.comm.dispatch_wait, dispatch)
            raise
        received = self.comm.dispatch_wait(dispatch)
        combine = self.comm.combine_start(self._experts(received), received.route, received.weights, flight=flight)
        try:
            yield None
        except BaseException:
            _end(self.comm.combine_wait, combine)
            raise
        out = self.comm.combine_wait(combine)
        yield out if shared is None else out + shared

    def _experts(self, received: Dispatched) -> Tensor:
        """The rows' outputs; drops are counted."""
        if self.capacity is not None and not recomputing():
            self.dropped += received.dropped
        if received.scales is None:
            y = grouped_mm(received.x, self.w_in, received.route.offs)
        else:
            y = scaled_grouped_mm(received.x, received.scales, self.w_in, received.route.offs)
        return grouped_mm(swiglu_rows(y, received.route), self.w_out, received.route.offs)

    def expert_parameters(self) -> list[nn.Parameter]:
        """Those that only this rank holds; their gradients are complete after backward."""
        return [self.w_in, self.w_out]


def _end(wait: Callable[[Any], Any], started: Any) -> None:
    """What was started is not to stay under way where nobody comes to its wait: something was raised between them, as
    checkpointing does to end a second run early, or the generator is not asked any more."""
    with contextlib.suppress(RuntimeError), torch.no_grad():
        wait(started)


class DenseMoE(nn.Module):
    """The same model with all experts on every rank and no communication: what ``MoELayer`` is checked against.

    With the sizes and seed of a ``MoELayer`` it has the same initial weights, and so the same outputs up to rounding.
    It runs every expert on every token: slow, plain, differentiable.
    """

    def __init__(
        self,
        comm: Communicator,
        intermediate_size: int,
        *,
        shared_intermediate_size: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.top_k = comm.top_k
        experts = range(comm.num_experts)
        self.router = router_weight(comm.num_experts, comm.hidden_size, seed)
        self.w_in, self.w_out = expert_weights(experts, comm.hidden_size, intermediate_size, comm.dtype, seed)
        self.shared = shared_expert(comm.hidden_size, shared_intermediate_size, comm.dtype, seed)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = choose_experts(x, self.router, self.top_k)
        out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for e in range(self.w_in.shape[0]):
            weight = (weights * (experts == e)).sum(dim=-1, keepdim=True)
            out = out + weight * (swiglu(x @ self.w_in[e]) @ self.w_out[e])
        out = out.to(x.dtype)
        return out if self.shared is None else out + self.shared(x)


class SwiGLU(nn.Module):
    """An ordinary expert, for every token: x [T, H] -> [T, H], with w_in [H, 2F] and w_out [F, H]."""

    def __init__(self, w_in: Tensor, w_out: Tensor) -> None:
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(w_in), nn.Parameter(w_out)

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x @ self.w_in) @ self.w_out


def choose_experts(x: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in fp32 (fp64 if x is), then the ``top_k`` largest, scaled to sum to one.

    x [..., H], router [E, H] -> weights [..., K], expert ids [..., K] int32.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    # Meta devices have no autocast, not even one to be turned off.
    with contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        scores = torch.softmax(x.to(dtype) @ router.to(dtype).t(), dim=-1)
        weights, experts = scores.topk(top_k, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), experts.to(torch.int32)


def swiglu(gate_and_up: Tensor) -> Tensor:
    """[..., 2F] -> [..., F]: silu of the first half times the second."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


# Initial weights: each expert has a random stream of its own, so that they do not depend on where the experts lie.


def router_weight(num_experts: int, hidden_size: int, seed: int) -> nn.Parameter:
    """[E, H] float32: choosing among close scores is worth the precision."""
    generator = torch.Generator().manual_seed(seed)
    drawn = _drawn((num_experts, hidden_size), generator) * hidden_size**-0.5
    return nn.Parameter(drawn.to(torch.get_default_device()))


def expert_weights(
    experts: range, hidden_size: int, intermediate_size: int, dtype: torch.dtype, seed: int
) -> tuple[nn.Parameter, nn.Parameter]:
    """w_in [len(experts), H, 2F], w_out [len(experts), F, H]"""
    w_in = torch.empty(len(experts), hidden_size, 2 * intermediate_size, dtype=dtype)
    w_out = torch.empty(len(experts), intermediate_size, hidden_size, dtype=dtype)
    for i, e in enumerate(experts):
        generator = torch.Generator().manual_seed((seed + 1) * 1_000_003 + e)
        w_in[i] = _drawn(w_in.shape[1:], generator) * hidden_size**-0.5
        w_out[i] = _drawn(w_out.shape[1:], generator) * intermediate_size**-0.5
    return nn.Parameter(w_in), nn.Parameter(w_out)


def _drawn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """The same numbers whatever torch's default dtype and device are."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def shared_expert(hidden_size: int, intermediate_size: int, dtype: torch.dtype, seed: int) -> SwiGLU | None:
    if intermediate_size == 0:
        return None
    w_in, w_out = expert_weights(range(-1, 0), hidden_size, intermediate_size, dtype, seed)
    return SwiGLU(w_in.detach()[0], w_out.detach()[0])
