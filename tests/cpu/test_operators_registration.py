"""Every operator: schema, fake, gradient registration and tracing agree with what it does (torch.library.opcheck)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.library import opcheck

import ep_ops
from ep_ops.operators import OPERATORS, table

OPS = {op.name: op for op in OPERATORS}
EXACT = ("dispatch_dynamic",)
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
VARIANTS = {
    "": {},
    "padded": {"capacity": 48, "slots": 12, "layout": "padded"},
    "unweighted": {"topk_weights": None, "recv_weights": None},
    "only weights learn": {"learns": ("ticket", "topk_weights", "recv_weights")},
    "only the residual learns": {"learns": ("residual",), "recv_weights": None},
    "with residual": {},
    "of rows": {"grad_recv_weights": None, "y": None},
    "of weights": {"grad_recv_x": None},
    "of rows alone": {"y": None, "recv_weights": None},
    "undefined padding": {"zeros": False},
    "of no rows": {"hidden": 0},
    "of no weights": {"top_k": 0, "scalars": False},
    "token-major": {},
    "token-major unweighted": {"recv_weights": None, "topk_weights": None},
}


def variants(op: Any) -> list[str]:
    """Those that mean something to the operator."""
    names = set(op.arguments._fields)
    backward = op.name.endswith("_backward")
    meant = {
        "": True,
        "token-major": "layout" in names,
        "token-major unweighted": op.name.startswith("combine")
        and "_wait" not in op.name
        or op.name == "dispatch_planned",
        "padded": "slots" in names and "capacity" in names,
        "unweighted": not backward and bool(names & {"topk_weights", "recv_weights"}),
        "only weights learn": op.gradient is not None and bool(names & {"topk_weights", "recv_weights"}),
        "only the residual learns": "residual" in names,
        "with residual": "residual" in names,
        "of rows": backward,
        "of weights": op.name in ("dispatch_backward", "dispatch_backward_start"),
        "of rows alone": op.name in ("combine_backward", "combine_backward_start"),
        "of no rows": op.name == "dispatch_backward_wait",
        "of no weights": op.name == "combine_backward_wait",
        "undefined padding": "zeros" in names,
    }
    return [variant for variant, means in meant.items() if means]


def arguments(comm: ep_ops.Communicator, name: str, variant: str, tokens: int = 5) -> tuple[Any, ...]:
    """Return the arguments of a call on fresh data; floating inputs of operators that have a gradient require one."""
    x, topk_idx, weights = toy.inputs(tokens, dtype=comm.dtype)
    sent = comm.dispatch(x, topk_idx, weights, capacity=44)
    assert sent.weights is not None
    y, recv_weights, route = sent.x.nan_to_num(), sent.weights.nan_to_num(), sent.route
    layout, align, capacity = "grouped", toy.ALIGNMENT, 44
    if variant.startswith("token-major"):
        layout, align, capacity = "token_major", 1, 7
        copies = comm.dispatch(x, topk_idx, weights, capacity=7, layout="token_major")
        y, recv_weights, route = copies.x.nan_to_num(), copies.weights, copies.route
    known = {
        "x": x, "topk_weights": weights, "y": y, "recv_weights": recv_weights, "residual": None,
        "grad_recv_x": y, "grad_recv_weights": recv_weights, "grad_out": torch.randn_like(x),
        "ticket": torch.empty(0), "flight": 1, "given": [], "dtype": comm.dtype, "tokens": tokens,
        "hidden": toy.HIDDEN, "top_k": toy.TOP_K, "scalars": True, **route._asdict(),
        "layout": layout, "alignment": align, "capacity": capacity, "slots": 0, "max_tokens": 16,
        "num_local_experts": comm.num_local_experts, "world_size": 1,
        "comm": comm.name, "scales": None, "format": "", "scales_as": "", "zeros": True, "grad_format": "",
    }  # fmt: skip
    if "residual" in variant:
        known["residual"] = torch.randn_like(x)
    changed = dict(VARIANTS[variant])
    op = OPS[name]
    learns = changed.pop("learns", op.arguments._fields if op.gradient is not None else ())
    known.update(changed)
    values = [known[field] for field in op.arguments._fields]
    return tuple(
        value.clone().requires_grad_()
        if field in learns and isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for field, value in zip(op.arguments._fields, values, strict=True)
    )


CALLS = [(name, variant) for name, op in OPS.items() for variant in variants(op)]


@pytest.fixture(scope="module")
def comm():
    with toy.communicator() as comm:
        yield comm


@pytest.fixture(scope="module")
def lenient():
    """opcheck compares and copies what is undefined: it must not be NaN, nor lie in one place alone."""
    with toy.communicator(strict=False) as comm:
        yield comm


@pytest.mark.parametrize(("name", "variant", "tokens"), [
    *((*call, 5) for call in CALLS),
    *(pytest.param(*call, 0, marks=pytest.mark.drawn if call[1] else ()) for call in CALLS),
])  # fmt: skip
def test_opcheck(lenient, name, variant, tokens):
    opcheck(OPS[name].overload, arguments(lenient, name, variant, tokens))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "variant"), CALLS)
def test_fakes_give_what_is_returned(name, variant, dtype):
    """Fakes return the dtypes of the operators: weights are float64 where the rows are, else float32, also where none
    were given."""
    with toy.communicator(dtype=dtype, strict=False) as comm:
        _fake_is_like_real(comm, name, variant)


def _fake_is_like_real(lenient, name, variant):
    op, args = OPS[name].overload, arguments(lenient, name, variant)
    real = op(*args)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        # No communicator of that name exists: fakes must not need one.
        fake_args = [mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a for a in args]
        fake = op(*("unheard of" if a == lenient.name else a for a in fake_args))
    real, fake = ((out,) if isinstance(out, torch.Tensor) else out for out in (real, fake))
    for returned, expected in zip(fake, real, strict=True):
        assert returned.dtype == expected.dtype and returned.device == expected.device
        assert returned.is_contiguous() and expected.is_contiguous()
        assert returned.ndim == expected.ndim
        for size, known in zip(returned.shape, expected.shape, strict=True):
            assert size == known if isinstance(size, int) else name in EXACT, (size, known)


def test_no_gradient_at_all_is_an_error_while_tracing(comm):
    """While tracing, an operator with no gradient at all raises the error that it raises eagerly."""
    _, _, *rest = arguments(comm, "dispatch_backward", "")
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        rest = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in rest]
        with pytest.raises(ValueError, match="one of grad_recv_x and grad_recv_weights must be given"):
            torch.ops.ep.dispatch_backward(None, None, *rest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_code_returns_what_eager_code_does(dtype):
    """A sum with the weights has the dtype that the fake has predicted, because that becomes part of a compiled
    graph."""

    def rows_and_weights(comm, x, topk_idx, weights):
        route, _ = comm.plan(topk_idx)
        sizes = (44, toy.ALIGNMENT, 0, 16, comm.num_local_experts, 1, comm.name)
        _, _, given, *_ = torch.ops.ep.dispatch(x, weights, topk_idx, *sizes)
        _, _, none, *_ = torch.ops.ep.dispatch(x, None, topk_idx, *sizes)
        held = route.recv_from >= 0
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
    for name, op in ((name, op.overload) for name, op in OPS.items()):
        assert torch.Tag.pt2_compliant_tag in op.tags and torch.Tag.needs_contiguous_strides in op.tags
        assert (torch.Tag.cudagraph_unsafe in op.tags) == (name in EXACT)
        assert not op._schema.is_mutable and all(out.alias_info is None for out in op._schema.returns)


def test_records_have_the_schemas_arguments():
    for op in OPERATORS:
        arguments = op.overload._schema.arguments
        assert op.arguments._fields == tuple(a.name for a in arguments)
        assert op.arguments._field_defaults == {a.name: a.default_value for a in arguments if a.has_default_value()}


def test_waits_take_the_ticket_and_the_arguments_of_their_start():
    """Methods make one record from the fields of the other."""
    for whole in (table.DISPATCH, table.COMBINE):
        start, wait = (next(op for op in OPERATORS if op.name == f"{whole.name}_{part}") for part in ("start", "wait"))
        assert wait.arguments._fields == ("ticket", *start.arguments._fields)
        assert wait.arguments._field_defaults == start.arguments._field_defaults


def test_the_documentation_shows_the_table():
    assert table.markdown() in (Path(ep_ops.__file__).parent.parent / "docs/operators.md").read_text()


def test_unknown_communicator_is_an_error():
    x, topk_idx, weights = toy.inputs(2)
    with pytest.raises(RuntimeError, match="'nobody'"):
        torch.ops.ep.dispatch(x, weights, topk_idx, 44, 4, 0, 16, 4, 1, "nobody")
