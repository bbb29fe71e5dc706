"""Which ep operators a compiled layer runs forward and backward, and what they are given.

EXPECTTEST_ACCEPT=1 python -m pytest tests/cpu/test_operators_graphs.py     # writes the pins anew
"""

from __future__ import annotations

import functools

import torch
import toy
from expecttest import TestCase
from graphs import captured_graphs

from ep_ops.nn import expert_lists, gather_rows, reduce_rows


class TestGraphs(TestCase):
    def setUp(self):
        self.comm = toy.communicator(name="pinned")
        self.x, self.topk_idx, self.weights = toy.inputs(5, grad=True)
        self.scale = toy.scales(grad=True)

    def tearDown(self):
        self.comm.destroy()

    def test_layer(self):
        layer = functools.partial(toy.layer, self.comm)
        forward, backward = captured_graphs(layer, self.x, self.topk_idx, self.weights, self.scale)
        self.assertExpectedInline(
            forward,
            """\
dispatch(input, input, input, 44, 4, 0, 16, 4, 1, pinned, distinct)
combine(computed, dispatch.recv_weights, input, dispatch.route, 4, 16, pinned)
""",
        )
        self.assertExpectedInline(
            backward,
            """\
combine_backward(grad, computed, dispatch.recv_weights, input, dispatch.route, 44, 4, 16, pinned)
dispatch_backward(computed, combine_backward.grad_recv_weights, input, dispatch.route, 4, 16, pinned, distinct)
""",
        )

    def test_layer_of_any_size(self):
        layer = functools.partial(toy.layer, self.comm)
        graphs = captured_graphs(layer, self.x, self.topk_idx, self.weights, self.scale, dynamic=True)
        self.assertExpectedInline(
            "\n".join(graphs),
            """\
dispatch(input, input, input, size, 4, 0, size, 4, 1, pinned, distinct)
combine(computed, dispatch.recv_weights, input, dispatch.route, 4, size, pinned)

combine_backward(grad, computed, dispatch.recv_weights, input, dispatch.route, size, 4, size, pinned)
dispatch_backward(computed, combine_backward.grad_recv_weights, input, dispatch.route, 4, size, pinned, distinct)
""",
        )

    def test_unweighted(self):
        layer = functools.partial(toy.layer, self.comm)
        graphs = captured_graphs(layer, self.x, self.topk_idx, None, self.scale)
        self.assertExpectedInline(
            "\n".join(graphs),
            """\
dispatch(input, None, input, 44, 4, 0, 16, 4, 1, pinned, distinct)
combine(computed, None, input, dispatch.route, 4, 16, pinned)

dispatch_planned(grad, None, input, dispatch.route, 44, 4, 16, pinned)
dispatch_backward(computed, None, input, dispatch.route, 4, 16, pinned, distinct)
""",
        )

    def test_residual(self):
        def layer(x, idx, w, scale):
            rows = self.comm.dispatch(x, idx, w)
            return self.comm.combine(toy.experts(rows, scale), rows.route, rows.weights, residual=torch.cos(x))

        graphs = captured_graphs(layer, self.x, self.topk_idx, self.weights, self.scale)
        self.assertExpectedInline(
            "\n".join(graphs),
            """\
dispatch(input, input, input, 44, 4, 0, 16, 4, 1, pinned, distinct)
combine(computed, dispatch.recv_weights, input, dispatch.route, 4, 16, pinned, computed)

combine_backward(grad, computed, dispatch.recv_weights, input, dispatch.route, 44, 4, 16, pinned)
dispatch_backward(computed, combine_backward.grad_recv_weights, input, dispatch.route, 4, 16, pinned, distinct)
""",
        )

    def test_inference(self):
        layer = functools.partial(toy.layer, self.comm)
        with torch.no_grad():
            graphs = captured_graphs(layer, self.x, self.topk_idx, self.weights, self.scale)
        self.assertExpectedInline(
            "\n".join(graphs),
            """\
dispatch(input, input, input, 44, 4, 0, 16, 4, 1, pinned, distinct, None, , , False)
combine(computed, dispatch.recv_weights, input, dispatch.route, 4, 16, pinned)
""",
        )

    def test_two_micro_batches(self):
        """Backward runs in the order of eager autograd: the last forward first."""

        def both(x1, idx1, w1, x2, idx2, w2, scale):
            first = self.comm.dispatch(x1, idx1, w1)
            second = self.comm.dispatch(x2, idx2, w2)
            one = self.comm.combine(toy.experts(first, scale), first.route, first.weights)
            two = self.comm.combine(toy.experts(second, scale), second.route, second.weights)
            return torch.cat([two, one])

        graphs = captured_graphs(both, *toy.inputs(5, grad=True), *toy.inputs(3, seed=1, grad=True), self.scale)
        self.assertExpectedInline(
            "\n".join(graphs),
            """\
dispatch(input, input, input, 44, 4, 0, 16, 4, 1, pinned, distinct)
dispatch'(input, input, input, 44, 4, 0, 16, 4, 1, pinned, distinct)
combine(computed, dispatch.recv_weights, input, dispatch.route, 4, 16, pinned)
combine'(computed, dispatch'.recv_weights, input, dispatch'.route, 4, 16, pinned)

combine_backward(computed, computed, dispatch'.recv_weights, input, dispatch'.route, 44, 4, 16, pinned)
combine_backward'(computed, computed, dispatch.recv_weights, input, dispatch.route, 44, 4, 16, pinned)
dispatch_backward(computed, combine_backward.grad_recv_weights, input, dispatch'.route, 4, 16, pinned, distinct)
dispatch_backward'(computed, combine_backward'.grad_recv_weights, input, dispatch.route, 4, 16, pinned, distinct)
""",
        )

    def test_token_major(self):
        def layer(x, idx, w):
            sent = self.comm.dispatch(x, idx, w, layout="token_major")
            lists = expert_lists(sent.local_idx, self.comm.num_local_experts)
            y = torch.tanh(gather_rows(sent.x, lists))
            return self.comm.combine(reduce_rows(y, lists, sent.weights), sent.route)

        graphs = captured_graphs(layer, self.x, self.topk_idx, self.weights)
        self.assertExpectedInline(
            "\n".join(graphs),
            """\
dispatch(input, input, input, 16, 1, 0, 16, 4, 1, pinned, token_major)
expert_lists(dispatch.recv_idx, 4, 1, 32)
sum_rows(dispatch.recv_x, computed, None)
sum_rows'(computed, expert_lists.places, dispatch.recv_weights)
combine(sum_rows', None, input, dispatch.route, 1, 16, pinned)

dispatch_planned(grad, None, input, dispatch.route, 16, 1, 16, pinned)
sum_rows(dispatch_planned.recv_x, computed, None)
sum_rows'(computed, expert_lists.places, None)
dispatch_backward(sum_rows', computed, input, dispatch.route, 1, 16, pinned, token_major)
""",
        )

    @torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    def test_plan_and_exact_size(self):
        def planned_and_dynamic(x, idx, w, scale):
            route, _ = self.comm.plan(idx)
            rows = self.comm.dispatch_planned(x, route).x
            out = self.comm.combine(torch.tanh(rows), route)
            exact = self.comm.dispatch(x + out, idx, w, exact=True)
            return self.comm.combine(torch.tanh(exact.x), exact.route, exact.weights)

        graphs = captured_graphs(planned_and_dynamic, self.x, self.topk_idx, self.weights, self.scale)
        self.assertExpectedInline(
            "\n".join(graphs),
            """\
plan(input, 44, 4, 0, 16, 4, 1, pinned, distinct)
dispatch_planned(input, None, input, plan.route, 44, 4, 16, pinned)
combine(computed, None, input, plan.route, 4, 16, pinned)
dispatch_dynamic(computed, input, input, 4, 16, 4, 1, pinned)
combine'(computed, dispatch_dynamic.recv_weights, input, dispatch_dynamic.route, 4, 16, pinned)

combine_backward(grad, computed, dispatch_dynamic.recv_weights, input, dispatch_dynamic.route, size, 4, 16, pinned)
dispatch_backward(computed, combine_backward.grad_recv_weights, input, dispatch_dynamic.route, 4, 16, pinned)
dispatch_planned(dispatch_backward.grad_x, None, input, plan.route, 44, 4, 16, pinned)
dispatch_backward'(computed, None, input, plan.route, 4, 16, pinned)
""",
        )
