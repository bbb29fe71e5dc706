"""The schemas that exported programs and compile caches depend on (docs/schemas.md).

EXPECTTEST_ACCEPT=1 python -m pytest tests/cpu/test_operators_schemas.py     # writes the pins anew
"""

from __future__ import annotations

import textwrap

from expecttest import TestCase

from ep_ops.operators.table import OPERATORS


class TestSchemas(TestCase):
    def test_pinned(self) -> None:
        schemas = (str(op.overload._schema) for op in OPERATORS)
        lines = (textwrap.fill(schema, 110, subsequent_indent="    ", break_long_words=False) for schema in schemas)
        self.assertExpectedInline(
            "\n".join(lines),
            """\
ep::plan(Tensor topk_idx, SymInt capacity, int alignment, SymInt slots, SymInt max_tokens, int
    num_local_experts, int world_size, str comm, str layout="grouped") -> (Tensor send_rows, Tensor arrivals,
    Tensor offs, Tensor counts, Tensor dropped, Tensor recv_idx)
ep::dispatch(Tensor x, Tensor? topk_weights, Tensor topk_idx, SymInt capacity, int alignment, SymInt slots,
    SymInt max_tokens, int num_local_experts, int world_size, str comm, str layout="grouped", Tensor?
    scales=None, str format="", str scales_as="", bool zeros=True) -> (Tensor recv_x, Tensor recv_scales,
    Tensor recv_weights, Tensor send_rows, Tensor arrivals, Tensor offs, Tensor counts, Tensor dropped, Tensor
    recv_idx)
ep::dispatch_dynamic(Tensor x, Tensor? topk_weights, Tensor topk_idx, int alignment, SymInt max_tokens, int
    num_local_experts, int world_size, str comm, str layout="grouped", Tensor? scales=None, str format="", str
    scales_as="", bool zeros=True) -> (Tensor recv_x, Tensor recv_scales, Tensor recv_weights, Tensor
    send_rows, Tensor arrivals, Tensor offs, Tensor counts, Tensor dropped, Tensor recv_idx)
ep::dispatch_planned(Tensor x, Tensor? topk_weights, Tensor topk_idx, Tensor send_rows, Tensor arrivals,
    Tensor offs, Tensor counts, SymInt num_rows, int alignment, SymInt max_tokens, str comm, str
    layout="grouped", SymInt slots=0, Tensor? scales=None, str format="", str scales_as="", bool zeros=True)
    -> (Tensor recv_x, Tensor recv_scales, Tensor recv_weights)
ep::combine(Tensor y, Tensor? recv_weights, Tensor topk_idx, Tensor send_rows, Tensor arrivals, Tensor offs,
    Tensor counts, int alignment, SymInt max_tokens, str comm, Tensor? residual=None, str grad_format="", str
    format="") -> Tensor out
ep::combine_gathered(Tensor y, Tensor topk_idx, Tensor send_rows, Tensor arrivals, Tensor offs, Tensor counts,
    int alignment, SymInt max_tokens, str comm) -> Tensor out
ep::dispatch_backward(Tensor? grad_recv_x, Tensor? grad_recv_weights, Tensor topk_idx, Tensor send_rows,
    Tensor arrivals, Tensor offs, Tensor counts, int alignment, SymInt max_tokens, str comm, str
    layout="grouped") -> (Tensor grad_x, Tensor grad_topk_weights)
ep::combine_backward(Tensor grad_out, Tensor? y, Tensor? recv_weights, Tensor topk_idx, Tensor send_rows,
    Tensor arrivals, Tensor offs, Tensor counts, SymInt num_rows, int alignment, SymInt max_tokens, str comm)
    -> (Tensor grad_y, Tensor grad_recv_weights)
ep::dispatch_start(Tensor x, Tensor? topk_weights, Tensor topk_idx, SymInt capacity, int alignment, SymInt
    slots, SymInt max_tokens, int num_local_experts, int world_size, str comm, str layout="grouped", Tensor?
    scales=None, str format="", str scales_as="", bool zeros=True, int flight=0) -> Tensor ticket
ep::dispatch_wait(Tensor ticket, Tensor x, Tensor? topk_weights, Tensor topk_idx, SymInt capacity, int
    alignment, SymInt slots, SymInt max_tokens, int num_local_experts, int world_size, str comm, str
    layout="grouped", Tensor? scales=None, str format="", str scales_as="", bool zeros=True, int flight=0) ->
    (Tensor recv_x, Tensor recv_scales, Tensor recv_weights, Tensor send_rows, Tensor arrivals, Tensor offs,
    Tensor counts, Tensor dropped, Tensor recv_idx)
ep::dispatch_backward_start(Tensor? grad_recv_x, Tensor? grad_recv_weights, Tensor topk_idx, Tensor send_rows,
    Tensor arrivals, Tensor offs, Tensor counts, int alignment, SymInt max_tokens, str comm, str
    layout="grouped", int flight=0) -> Tensor ticket
ep::dispatch_backward_wait(Tensor ticket, Tensor[] given, ScalarType dtype, SymInt tokens, SymInt hidden, int
    top_k, str comm, int flight=0) -> (Tensor grad_x, Tensor grad_topk_weights)
ep::combine_start(Tensor y, Tensor? recv_weights, Tensor topk_idx, Tensor send_rows, Tensor arrivals, Tensor
    offs, Tensor counts, int alignment, SymInt max_tokens, str comm, int flight=0, str format="") -> Tensor
    ticket
ep::combine_wait(Tensor ticket, Tensor y, Tensor? recv_weights, Tensor topk_idx, Tensor send_rows, Tensor
    arrivals, Tensor offs, Tensor counts, int alignment, SymInt max_tokens, str comm, int flight=0, str
    format="") -> Tensor out
ep::combine_backward_start(Tensor grad_out, Tensor? y, Tensor? recv_weights, Tensor topk_idx, Tensor
    send_rows, Tensor arrivals, Tensor offs, Tensor counts, SymInt num_rows, int alignment, SymInt max_tokens,
    str comm, int flight=0) -> Tensor ticket
ep::combine_backward_wait(Tensor ticket, Tensor[] given, ScalarType dtype, SymInt num_rows, SymInt hidden,
    bool scalars, str comm, int flight=0) -> (Tensor grad_y, Tensor grad_recv_weights)""",
        )
