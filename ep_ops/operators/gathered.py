"""Compiled code writes the rows of a gathering combine directly to symmetric memory.

``ep::combine_gathered`` copies rows that lie elsewhere to symmetric memory, and Inductor allocates its input like any
other. The lowering in this file requests symmetric memory (``ep::rows_to_gather``) and makes the kernel that computes
the rows write to it, if Inductor passes that kernel its output memory: kernels that Inductor generates, and products
(``torch.mm``, ``torch.addmm``). If other nodes read the rows too, a generated kernel writes a second copy. Rows that an
operator allocates itself (``torch._grouped_mm``, operators of other libraries), views of them, and graph inputs that
lie elsewhere are copied.

All calls use the same memory. It is therefore requested in the operators' sequence (ordering.py), after the previous
gathering combine; Inductor gives it to no other tensor; and no other node reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import checks, registry
from .library import define
from .rejection import reject


def _rows_to_gather(near: Tensor, num_rows: int, hidden: int, dtype: torch.dtype, comm: str) -> Tensor:
    found = registry.get(comm)
    try:
        checks.empty_rows(found, num_rows)
    except ValueError as error:
        reject("combine_gathered", found, error)
    return found.backend.empty_rows(num_rows)


def _fake(near: Tensor, num_rows: int, hidden: int, dtype: torch.dtype, comm: str) -> Tensor:
    return near.new_empty((num_rows, hidden), dtype=dtype)


# Returns [num_rows, hidden], undefined. `near`: any tensor on the device. Only the lowering below may call it, because
# the result is not newly allocated.
define(
    "rows_to_gather(Tensor near, SymInt num_rows, SymInt hidden, ScalarType dtype, str comm) -> Tensor",
    _rows_to_gather, _fake, tags=(),
)  # fmt: skip


def lowering(default: Callable[..., Any]) -> Callable[..., Any]:
    """Return the lowering of a gathering combine, which is ``default`` if its input cannot be written in place."""
    from torch._inductor import ir
    from torch._inductor.lowering import fallback_handler
    from torch._inductor.virtualized import V

    ask = fallback_handler(torch.ops.ep.rows_to_gather.default, add_to_fallback_set=False)

    def lower(y: Any, topk_idx: Any, *along: Any) -> Any:
        graph, along = V.graph, (topk_idx, *along)
        y.realize()
        if graph.cpp_wrapper or y.get_name() in graph.graph_inputs:
            return default(y, *along)
        rows = ask(topk_idx, *y.get_size(), y.get_dtype(), along[-1])
        memory = rows.data.data
        graph.never_reuse_buffers.add(memory.get_name())
        made: Any = y.data.data if _is_alone(graph, y) else None
        if not isinstance(made, (ir.ComputedBuffer, ir.ExternKernelOut)) or not made.get_layout().is_contiguous():
            ir.MutationLayoutSHOULDREMOVE.realize_into(y, rows)
            return default(rows, *along)
        made.layout = ir.NonOwningLayout(ir.ReinterpretView(data=rows.data, layout=made.get_layout().as_fixed()))
        made.get_inputs_that_alias_output = lambda: [memory.get_name()]  # type: ignore[method-assign]
        graph.never_reuse_buffers.add(made.get_name())
        graph.additional_buffer_deps[made.get_operation_name()].add(memory.get_name())
        return default(y, *along)

    lower._is_fallback_handler = True  # type: ignore[attr-defined]
    return lower


def _is_alone(graph: Any, y: Any) -> bool:
    """Return whether no other node of the graph uses the buffer ``y`` or a view of it."""
    from torch._inductor import ir

    def buffer(value: Any) -> Any:
        while isinstance(value, (ir.TensorBox, ir.BaseView)):
            value = value.data
        return value

    if not isinstance(y.data, ir.StorageBox):
        return False
    nodes = [node for node, value in graph.env.items() if isinstance(value, ir.TensorBox) and buffer(value) is y.data]
    return not nodes or nodes == [graph.current_node.args[0]] and len(nodes[0].users) == 1
