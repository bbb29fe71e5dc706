"""Every operator: schema, fake, gradient registration and tracing agree with what it does (torch.library.opcheck)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import toy
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

import ep_ops
from ep_ops.operators import OPERATORS

DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(scope="module")
def comm():
    with toy.communicator() as comm:
        yield comm


def calls(comm, tokens=5):
    """Arguments for every operator: {what: (operator name, arguments)}. Float inputs of forwards ask for gradients."""
    x, topk_idx, weights = toy.inputs(tokens, dtype=comm.dtype, grad=True)
    sizes = (16, comm.num_local_experts, 1, comm.name)
    flat, padded = (44, 4, 0, *sizes), (48, 4, 12, *sizes)
    rows = comm.dispatch(x.detach(), topk_idx, weights.detach(), capacity=44)
    route, ep = rows.route, (4, comm.name)
    y, recv_weights = rows.x.nan_to_num(), rows.weights.nan_to_num()
    grad = torch.randn(tokens, toy.HIDDEN, dtype=comm.dtype)
    asked = [t.clone().requires_grad_() for t in (y, recv_weights)]
    ticket = torch.empty(0, dtype=torch.int64)
    return {
        "plan": ("plan", (topk_idx, *flat)),
        "plan padded": ("plan", (topk_idx, *padded)),
        "dispatch": ("dispatch", (x, weights, topk_idx, *flat)),
        "dispatch padded": ("dispatch", (x, weights, topk_idx, *padded)),
        "dispatch unweighted": ("dispatch", (x, None, topk_idx, *flat)),
        "dispatch, only weights learn": ("dispatch", (x.detach(), weights, topk_idx, *flat)),
        "dispatch_dynamic": ("dispatch_dynamic", (x, weights, topk_idx, 4, *sizes)),
        "dispatch_dynamic unweighted": ("dispatch_dynamic", (x, None, topk_idx, 4, *sizes)),
        "dispatch_planned": ("dispatch_planned", (x, weights, *route, 44, *ep)),
        "dispatch_planned unweighted": ("dispatch_planned", (x, None, *route, 44, *ep)),
        "combine": ("combine", (*asked, *route, *ep)),
        "combine unweighted": ("combine", (asked[0], None, *route, *ep)),
        "combine with residual": ("combine", (*asked, *route, *ep, grad.clone().requires_grad_())),
        "combine, only the residual learns": ("combine", (y, None, *route, *ep, grad.clone().requires_grad_())),
        "combine, only weights learn": ("combine", (y, asked[1], *route, *ep)),
        "combine_gathered": ("combine_gathered", (asked[0], *route, *ep)),
        "dispatch_backward": ("dispatch_backward", (y, recv_weights, *route, *ep)),
        "dispatch_backward of rows": ("dispatch_backward", (y, None, *route, *ep)),
        "dispatch_backward of weights": ("dispatch_backward", (None, recv_weights, *route, *ep)),
        "combine_backward": ("combine_backward", (grad, y, recv_weights, *route, 44, *ep)),
        "combine_backward of rows": ("combine_backward", (grad, None, recv_weights, *route, 44, *ep)),
        "combine_backward unweighted": ("combine_backward", (grad, None, None, *route, 44, *ep)),
        "dispatch_start": ("dispatch_start", (x, weights, topk_idx, *flat)),
        "dispatch_wait": ("dispatch_wait", (ticket, x, weights, topk_idx, *flat)),
        "dispatch_wait padded": ("dispatch_wait", (ticket, x, weights, topk_idx, *padded)),
        "dispatch_wait unweighted": ("dispatch_wait", (ticket, x, None, topk_idx, *flat)),
        "combine_start": ("combine_start", (*asked, *route, *ep)),
        "combine_wait": ("combine_wait", (ticket, *asked, *route, *ep)),
        "combine_wait unweighted": ("combine_wait", (ticket, asked[0], None, *route, *ep)),
    }


with toy.communicator() as _comm:
    CALLS = tuple(calls(_comm))
OPS = {op._opname: op for op in OPERATORS}


def test_no_operator_is_forgotten(comm):
    assert {name for name, _ in calls(comm).values()} == set(OPS)


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("tokens", [5, 0])
def test_opcheck(comm, what, tokens):
    # What opcheck compares must not be NaN where nothing is defined.
    comm.backend.unused = 0.0
    try:
        name, args = calls(comm, tokens)[what]
        opcheck(OPS[name], args)
    finally:
        comm.backend.unused = float("nan")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", CALLS)
def test_fakes_give_what_is_returned(what, dtype):
    """Whatever the rows' dtype: weights are float64 where the rows are, else float32, also where none were given."""
    with toy.communicator(dtype=dtype) as comm:
        _fake_is_like_real(comm, what)


def _fake_is_like_real(comm, what):
    name, args = calls(comm)[what]
    real = OPS[name](*args)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        # No communicator of that name exists: fakes must not need one.
        fake_args = [mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a for a in args]
        fake = OPS[name](*("unheard of" if a == comm.name else a for a in fake_args))
    real, fake = ((out,) if isinstance(out, torch.Tensor) else out for out in (real, fake))
    for returned, expected in zip(fake, real, strict=True):
        assert returned.dtype == expected.dtype and returned.device == expected.device
        assert returned.is_contiguous() and expected.is_contiguous()
        assert returned.ndim == expected.ndim
        for size, known in zip(returned.shape, expected.shape, strict=True):
            assert size == known if isinstance(size, int) else name == "dispatch_dynamic", (size, known)


def test_no_gradient_at_all_is_an_error_while_tracing(comm):
    """As it is for the operator itself."""
    name, (_, _, *rest) = calls(comm)["dispatch_backward"]
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        rest = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in rest]
        with pytest.raises(ValueError, match="one of grad_recv_x and grad_recv_weights must be given"):
            OPS[name](None, None, *rest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_code_returns_what_eager_code_does(dtype):
    """What a fake says becomes part of a compiled graph: a sum with the weights has the dtype that it foresaw."""

    def rows_and_weights(comm, x, topk_idx, weights):
        route, _ = comm.plan(topk_idx)
        sizes = (44, toy.ALIGNMENT, 0, 16, comm.num_local_experts, 1, comm.name)
        _, given, *_ = torch.ops.ep.dispatch(x, weights, topk_idx, *sizes)
        _, none, *_ = torch.ops.ep.dispatch(x, None, topk_idx, *sizes)
        held = route.recv_rows[route.recv_rows >= 0].long()
        return x.sum() + given[held].sum(), torch.cat([none, none]), none.new_ones(3) / 3

    with toy.communicator(dtype=dtype) as comm:
        x, topk_idx, weights = toy.inputs(5, dtype=dtype)
        topk_idx = topk_idx.clamp(min=0)
        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            got = torch.compile(rows_and_weights, backend="aot_eager", fullgraph=True)(comm, x, topk_idx, weights)
        expected = rows_and_weights(comm, x, topk_idx, weights)
        assert expected[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_tags_and_schemas():
    for name, op in OPS.items():
        assert torch.Tag.pt2_compliant_tag in op.tags and torch.Tag.needs_contiguous_strides in op.tags
        assert (torch.Tag.cudagraph_unsafe in op.tags) == (name == "dispatch_dynamic")
        assert not op._schema.is_mutable and all(out.alias_info is None for out in op._schema.returns)


def test_unknown_communicator_is_an_error():
    x, topk_idx, weights = toy.inputs(2)
    with pytest.raises(RuntimeError, match="'nobody'"):
        torch.ops.ep.dispatch(x, weights, topk_idx, 44, 4, 0, 16, 4, 1, "nobody")


def test_import_is_light():
    """No Inductor, no kernels, no process group: importing registers the operators and does nothing else."""
    code = (
        "import sys, torch; before = set(sys.modules); import ep_ops;"
        "torch.ops.ep.dispatch.default; assert not torch.distributed.is_initialized();"
        "heavy = {'torch._inductor.lowering', 'torch._dynamo', 'cutlass', 'cute_kernels'};"
        "new = (set(sys.modules) - before) & heavy; assert not new, new; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ep_ops.__path__[0] + "/..")
