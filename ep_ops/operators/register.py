"""Registration of all operators of the table, and of their implementations on CPUs and GPUs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from meta_kernels import fakes
from meta_kernels.arguments import Args

from .. import checks, registry
from ..backends.base import Backend
from ..backends.calls import Call
from ..backends.split import parts_of
from ..registry import Living
from ..specs import Spec, spec_of
from . import recomputation
from .eager import RememberedOp, check_data
from .gradients import not_batched
from .library import CONTIGUOUS, LIBRARY, define, differentiate
from .operator import Operator
from .rejection import reject, reject_thread
from .table import OPERATORS


def _interrupted(op: Operator, comm: Living, a: Args, error: BaseException) -> None:
    """Inform the other ranks that a call raises on this rank after its checks."""
    with contextlib.suppress(Exception):  # the error of this rank must not be hidden
        flight, max_tokens = getattr(a, "flight", 0), getattr(a, "max_tokens", 0)
        comm.backend.interrupted(op.name, error, functools.partial(_accepted(op, comm, a).run, a), flight, max_tokens)


def _reject(name: str, comm: Living, a: Args, error: Exception) -> NoReturn:
    reject(name, comm, error, getattr(a, "flight", 0), getattr(a, "max_tokens", 0))


def _accepted(op: Operator, comm: Living, a: Args) -> Call:
    """Return the call of these sizes and this specification, after checking all arguments. A guard replaces the checks
    of arguments like those of an earlier call."""
    if op.split:
        checks.flight(getattr(a, "flight", None))
    key = found = spec = given = None
    try:
        key = op.registered.key(a)
        found = comm.calls[key]
        if found is not None:
            given = op.registered.guarded(a)
            if given is not None and any(accepts(*given) for accepts in found.checked):
                return found
    except Exception:  # invalid, which the check finds
        pass
    if found is None and (spec := spec_of(a)) is not None and spec not in comm.calls.specs:
        checks.spec(comm, spec)
        comm.calls.specs.add(spec)
    op.check(comm, a)
    if found is not None:
        if given is not None:
            found.add_checked(given)
        return found
    if op.starts is not None:
        made = Call(_wait(op, comm.backend, spec))
    else:
        assert spec is not None
        made = Call(comm.backend.bind_start(spec, a) if op.split else comm.backend.bind(spec, a))
    return made if spec is None else comm.calls.add(key, made)


def _wait(op: Operator, backend: Backend, spec: Spec | None) -> Callable[[Any], Any]:
    """Return what finishes a split operation."""
    wait, (whole, _) = backend.wait, parts_of(op.name)
    if spec is None:
        blank = getattr(fakes, op.name)
        return lambda a: wait(whole, a.flight, lambda: tuple(made.zero_() for made in blank(a)))
    return lambda a: wait(whole, a.flight, lambda: backend.bind(spec, a)(a))


def _implementation(op: Operator) -> Callable[..., Any]:
    """Return a function that finds the communicator, checks the arguments and runs the operator on the communicator's
    backend. Errors reach all ranks."""
    name, record = op.name, op.arguments
    whole, living, new = len(record._fields), registry.living, tuple.__new__
    top_hooks, reentrant = recomputation.top_hooks, recomputation.reentrant
    follows_ids = "topk_idx" in record._fields and "ticket" not in record._fields and "backward" not in name

    def implementation(*args: Any) -> Any:
        a = new(record, args) if len(args) == whole else record(*args)
        comm = living.get(a.comm) or registry.get(a.comm)
        if not comm.busy.acquire(blocking=False):
            reject_thread(comm, f"ep::{name}")
        try:
            try:
                run = _accepted(op, comm, a).run
                if follows_ids and (top_hooks(False) is not None or reentrant.region is not None):
                    recomputation.note(a.topk_idx)
            except Exception as error:
                _reject(name, comm, a, error)
            comm.backend.calls += 1
            try:
                return run(a)
            except BaseException as error:
                _interrupted(op, comm, a, error)
                raise
        finally:
            comm.busy.release()

    implementation.__name__ = name
    return implementation


def _fake(op: Operator) -> Callable[..., Any]:
    """Return the fake kernel, which first registers the operators' order with Inductor. It also gets calls with one
    tensor on the meta device."""

    returned = getattr(fakes, op.name)

    def fake(*args: Any) -> Any:
        from . import ordering

        ordering.install()
        a = op.arguments(*args)
        try:
            check_data(a._asdict())
        except ValueError as error:
            _reject(op.name, registry.get(a.comm), a, error)
        return returned(a)

    return fake


def _batched(op: Operator) -> Callable[..., Any]:
    """Return what rejects tensors of batched gradients, which compiled graphs pass to the operator."""

    @torch._disable_dynamo
    def rejected(*args: Any) -> Any:
        a = op.arguments(*args)
        _reject(op.name, registry.get(a.comm), a, not_batched(op))

    return rejected


def _register_gradient(op: Operator) -> None:
    record, gradient, new = op.arguments, op.gradient, tuple.__new__
    whole = len(record._fields)
    assert gradient is not None

    def of(values: tuple[Any, ...]) -> Any:
        """Return a record of the arguments, of which compiled graphs leave out the last ones if they are defaults."""
        return new(record, values) if len(values) == whole else record(*values)

    def asked(ctx: Any) -> Any:
        # In setup_context behind the dispatcher, torch appends a flag for an argument of its own.
        return of(ctx.needs_input_grad[:whole])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        gradient.save(ctx, of(inputs), asked(ctx), output)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        by_name = gradient.backward(ctx, asked(ctx), *grads)
        return tuple(by_name.get(name) for name in record._fields)

    differentiate(op.registered, backward, setup_context)


recomputation.watch_reentrant()
for _op in OPERATORS:
    # An operator that synchronizes cannot be captured in a CUDA graph; Inductor splits the graph around it.
    _tags = (CONTIGUOUS, torch.Tag.cudagraph_unsafe) if _op.exact else (CONTIGUOUS,)
    _made = functools.partial(RememberedOp, interrupted=functools.partial(_interrupted, _op))
    _op.registered = define(_op.name + _op.schema, _implementation(_op), _fake(_op), _tags, _made)
    LIBRARY.impl(_op.name, _batched(_op), "Batched")
    _op.repeat, _op.call = _op.registered.repeat, _op.registered.call
    if _op.gradient is not None:
        _register_gradient(_op)
