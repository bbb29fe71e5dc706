"""How methods, layers and gradients call operators.

PyTorch's dispatcher hands a call to autograd, to tracers and to the implementation. That takes the host as long as a
decode step's kernels, and several times as long where gradients are asked for. Where only autograd would do anything,
an eager call goes to the implementation itself, or to the autograd function around it. ``torch.ops.ep`` always takes
the long way.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from .. import registry
from .rejection import reject

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
"""Operator name -> what runs on a CPU or a GPU."""
DIFFERENTIABLE: dict[str, Callable[..., Any]] = {}
"""The same with its gradient, of operators that have one."""

_TYPES: dict[str, frozenset[type]] = {
    "Tensor": frozenset({Tensor, torch.nn.Parameter}),
    "Optional[Tensor]": frozenset({Tensor, torch.nn.Parameter, NoneType}),
    "int": frozenset({int, torch.dtype}),
    "List[Tensor]": frozenset({list}),
    "List[int]": frozenset({list, tuple}),
    "str": frozenset({str}),
    "bool": frozenset({bool}),
}
_ARGUMENTS: dict[str, tuple[frozenset[type], ...]] = {}
"""Operator name -> the types that each of its arguments plainly has. Subclasses of Tensor may mean something else."""


_PLAIN: dict[str, set[tuple[type, ...]]] = {}
"""Operator name -> types of arguments that were found to be plain."""


def learn(name: str, run: Callable[..., Any]) -> None:
    """Note what runs an operator that is defined, and the types of its arguments."""
    arguments = getattr(torch.ops.ep, name).default._schema.arguments
    IMPLEMENTATIONS[name], _PLAIN[name] = run, set()
    _ARGUMENTS[name] = tuple(_TYPES[str(a.type)] for a in arguments)


def call(name: str, *args: Any) -> Any:
    """``torch.ops.ep.<name>(*args)``, with all arguments."""
    types = tuple(map(type, args))
    if _heeded() or not (types in _PLAIN[name] or _plain(name, types)) or _first(args).is_meta:
        if not _is_compiling():
            _reject_misfits(name, args, types)
        refuse_transforms(f"ep::{name}", args)
        return getattr(torch.ops.ep, name)(*args)
    if _is_grad_enabled() and _asks(*args):
        return DIFFERENTIABLE.get(name, getattr(torch.ops.ep, name))(*args)
    return IMPLEMENTATIONS[name](*args)


def _first(args: tuple[Any, ...]) -> Tensor:
    """Of the tensors among the arguments; those of an operator are all of one device."""
    return args[0] if args[0] is not None else next(arg for arg in args if arg is not None)


def _reject_misfits(name: str, args: tuple[Any, ...], types: tuple[type, ...]) -> None:
    """Raise TypeError on all ranks for an argument that PyTorch's dispatcher would reject on this rank alone."""
    if types in _PLAIN[name] or _plain(name, types):
        return
    arguments = getattr(torch.ops.ep, name).default._schema.arguments
    by_name = {argument.name: given for argument, given in zip(arguments, args, strict=True)}
    for argument in arguments:
        kind, given = str(argument.type), by_name[argument.name]
        if not _fits(kind, given):
            found = "None" if given is None else f"a {type(given).__name__}"
            reason = f"{argument.name} is {found}; allowed: {_ALLOWED[kind]}"
            if isinstance(given, DTensor):
                reason += f" of this rank alone, as {argument.name}.to_local() returns"
            comm = registry.living.get(by_name.get("comm", ""))
            error = TypeError(reason)
            if comm is None:
                raise error
            reject(name, comm.backend, error, by_name.get("flight", 0), by_name.get("max_tokens", 0))


def _fits(kind: str, given: Any) -> bool:
    if kind == "Optional[Tensor]":
        return given is None or _fits("Tensor", given)
    if kind == "Tensor":
        return isinstance(given, Tensor) and not isinstance(given, DTensor)
    if kind == "int":
        return isinstance(given, torch.dtype) or hasattr(given, "__index__")
    if kind == "bool":
        return isinstance(given, (bool, torch.SymBool))
    return kind != "str" or isinstance(given, str)


_ALLOWED = {
    "Tensor": "a tensor", "Optional[Tensor]": "a tensor, or None", "int": "an int", "bool": "a bool", "str": "a str",
}  # fmt: skip


def refuse_transforms(name: str, args: tuple[Any, ...]) -> None:
    """Raise NotImplementedError for forward-mode and torch.func derivatives, which are not supported.

    Without this check forward-mode derivatives would silently be zero, and torch.func.grad would fail with an error
    about an autograd.Function that the user has not written.
    """
    if forward_ad._current_level < 0 and (_is_compiling() or _transforms() is None):
        return
    for arg in args:
        if not isinstance(arg, Tensor) or not arg.is_floating_point():
            continue
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(arg).tangent is not None:
            raise NotImplementedError(
                f"{name} does not support forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad);"
                " allowed: backward and torch.autograd.grad"
            )
        if _is_compiling():  # whose own error names the transform
            continue
        if torch._C._functorch.is_gradtrackingtensor(arg) and arg.requires_grad and _is_grad_enabled():
            raise NotImplementedError(
                f"{name} does not support the transforms of torch.func (grad, vjp, jacrev, hessian);"
                " allowed: backward and torch.autograd.grad"
            )


# Looked up once: each dot costs a decode step some of its time.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_asks = torch._C._any_requires_grad
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_profiler_enabled = torch.autograd._profiler_enabled


def _heeded() -> bool:
    """Whether somebody but autograd wants to hear of operators: a tracer, a mode, a transform, a profiler."""
    return (
        _is_compiling()
        or get_eval_frame_callback() is not None  # Dynamo would trace into what it is not told to leave alone
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _transforms() is not None
        or _profiler_enabled()
        or forward_ad._current_level >= 0  # torch.func.jvp enters a level as well
    )


def _plain(name: str, types: tuple[type, ...]) -> bool:
    """Whether all arguments are what they plainly are; remembered if so."""
    plain = all(given in allowed for given, allowed in zip(types, _ARGUMENTS[name], strict=True))
    if plain:
        _PLAIN[name].add(types)
    return plain
