"""Registration of all operators of the table, and of their implementations on CPUs and GPUs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

import meta_kernels

from .. import checks, registry
from ..backends.base import Backend
from .eager import Unchecked, check_data
from .library import CONTIGUOUS, define, differentiate
from .rejection import reject
from .table import OPERATORS, Operator


def _unchecked(op: Operator) -> Unchecked:
    """Return how an operator runs on a backend without checks."""
    name, record, run, new = op.name, op.arguments, op.run, tuple.__new__

    def bound(backend: Backend, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> Callable[..., Any]:
        found = backend.bind(name, *op.given(new(record, tensors + others)))
        return found or (lambda *given: run(backend, new(record, given + others)))

    def interrupted(backend: Backend, args: tuple[Any, ...], error: BaseException) -> None:
        a = new(record, args)
        with contextlib.suppress(Exception):  # the error of this rank must not be hidden
            flight, max_tokens = getattr(a, "flight", 0), getattr(a, "max_tokens", 0)
            backend.interrupted(name, error, functools.partial(run, backend, a), flight, max_tokens)

    return Unchecked(bound, interrupted)


def _reject(name: str, comm: registry.Living, a: Any, error: Exception) -> NoReturn:
    reject(name, comm.backend, error, getattr(a, "flight", 0), getattr(a, "max_tokens", 0))


def _implementation(op: Operator, interrupted: Callable[..., None]) -> Callable[..., Any]:
    """Return a function that finds the communicator, checks the arguments and passes them to the communicator's
    backend. Errors reach all ranks."""
    name, record, check, run = op.name, op.arguments, op.check, op.run
    whole, split, living = len(record._fields), "flight" in record._fields, registry.living

    def implementation(*args: Any) -> Any:
        a = tuple.__new__(record, args) if len(args) == whole else record(*args)
        comm = living.get(a.comm) or registry.get(a.comm)
        try:
            if split:
                checks.flight(a.flight)
            check(comm, a)
        except Exception as error:
            _reject(name, comm, a, error)
        comm.backend.calls += 1
        try:
            return run(comm.backend, a)
        except BaseException as error:
            interrupted(comm.backend, a, error)
            raise

    implementation.__name__ = name
    return implementation


def _fake(op: Operator) -> Callable[..., Any]:
    """Return the fake kernel, which first registers the operators' order with Inductor. It also gets calls with one
    tensor on the meta device."""

    returned = getattr(meta_kernels, op.name)

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


def _register_gradient(op: Operator) -> None:
    record, gradient = op.arguments, op.gradient
    assert gradient is not None

    def asked(ctx: Any) -> Any:
        # In setup_context behind the dispatcher, torch appends a flag for an argument of its own.
        return record(*ctx.needs_input_grad[: len(record._fields)])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        gradient.save(ctx, record(*inputs), asked(ctx), output)

    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        by_name = gradient.backward(ctx, asked(ctx), *grads)
        return tuple(by_name.get(name) for name in record._fields)

    differentiate(op.name, backward, setup_context)


for _op in OPERATORS:
    # An operator that synchronizes cannot be captured in a CUDA graph; Inductor splits the graph around it.
    _tags = (CONTIGUOUS, torch.Tag.cudagraph_unsafe) if _op.exact else (CONTIGUOUS,)
    _runs = _unchecked(_op)
    define(_op.name + _op.schema, _implementation(_op, _runs.interrupted), _fake(_op), _tags, _runs)
    if _op.gradient is not None:
        _register_gradient(_op)
