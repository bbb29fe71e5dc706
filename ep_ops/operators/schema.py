"""What every operator takes and returns.

All are functional: they mutate nothing, and every output is fresh memory. A communicator goes by its name (``comm``),
state lives behind that name, and each int that sets the size of an output is an argument: compiled graphs, their
caches and exported programs depend on nothing else.

T tokens of this rank, K top_k, H hidden size, R rows, W ranks, El local experts. x, y, out and their gradients are
[., H] of the communicator's dtype, as is the residual, weights and their gradients float32 (float64 with float64
rows), everything else int32 (see ``ep_ops.backends.reference`` for what the values mean). Optional results that were
not asked for have shape [0].

``*_start`` and ``*_wait``, called with the same arguments, are dispatch and combine in two halves. The ticket between
them holds nothing (int64 [0]): it tells whoever orders operators that one half follows the other.
"""

from __future__ import annotations

import torch

_ROUTE = "Tensor topk_idx, Tensor send_rows, Tensor recv_rows, Tensor offs, Tensor counts"
_SIZES = "int num_local_experts, int world_size, str comm"
_PLANNED = "Tensor send_rows, Tensor recv_rows, Tensor offs, Tensor counts, Tensor dropped"

_DISPATCH = (
    "Tensor x, Tensor? topk_weights, Tensor topk_idx, SymInt capacity, int alignment, SymInt slots, SymInt max_tokens,"
    f" {_SIZES}"
)
_DISPATCHED = f"(Tensor recv_x, Tensor recv_weights, {_PLANNED})"
_COMBINE = f"Tensor y, Tensor? recv_weights, {_ROUTE}, int alignment, str comm"

SCHEMAS: dict[str, str] = {
    "plan": "(Tensor topk_idx, SymInt capacity, int alignment, SymInt slots, SymInt max_tokens,"
    f" {_SIZES}) -> ({_PLANNED})",
    "dispatch": f"({_DISPATCH}) -> {_DISPATCHED}",
    "dispatch_dynamic": "(Tensor x, Tensor? topk_weights, Tensor topk_idx, int alignment, SymInt max_tokens,"
    f" {_SIZES}) -> {_DISPATCHED}",
    "dispatch_planned": f"(Tensor x, Tensor? topk_weights, {_ROUTE}, SymInt num_rows, int alignment, str comm)"
    " -> (Tensor recv_x, Tensor recv_weights)",
    "combine": f"({_COMBINE}, Tensor? residual=None) -> Tensor out",
    "combine_gathered": f"(Tensor y, {_ROUTE}, int alignment, str comm) -> Tensor out",
    "dispatch_backward": f"(Tensor? grad_recv_x, Tensor? grad_recv_weights, {_ROUTE}, int alignment, str comm)"
    " -> (Tensor grad_x, Tensor grad_topk_weights)",
    "combine_backward": f"(Tensor grad_out, Tensor? y, Tensor? recv_weights, {_ROUTE}, SymInt num_rows, int alignment,"
    " str comm) -> (Tensor grad_y, Tensor grad_recv_weights)",
    "dispatch_start": f"({_DISPATCH}) -> Tensor ticket",
    "dispatch_wait": f"(Tensor ticket, {_DISPATCH}) -> {_DISPATCHED}",
    "combine_start": f"({_COMBINE}) -> Tensor ticket",
    "combine_wait": f"(Tensor ticket, {_COMBINE}) -> Tensor out",
}
"""Operator name -> its signature. Ops whose result's size depends on data are in ``DYNAMIC``."""

DYNAMIC = frozenset({"dispatch_dynamic"})

LIBRARY = torch.library.Library("ep", "DEF")

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides)

for _name, _schema in SCHEMAS.items():
    # What waits for the device cannot be part of a CUDA graph; Inductor then cuts the graph around it.
    LIBRARY.define(_name + _schema, tags=(*_TAGS, torch.Tag.cudagraph_unsafe) if _name in DYNAMIC else _TAGS)

OPERATORS: tuple[torch._ops.OpOverload, ...] = tuple(getattr(torch.ops.ep, _name).default for _name in SCHEMAS)
"""All operators, as overloads (``torch.ops.ep.plan.default``, ...)."""

HALVES: dict[torch._ops.OpOverload, torch._ops.OpOverload] = {
    torch.ops.ep.dispatch_wait.default: torch.ops.ep.dispatch_start.default,
    torch.ops.ep.combine_wait.default: torch.ops.ep.combine_start.default,
}
"""The half that ends an operation -> the one that begins it. What the program does between them stays between them."""
