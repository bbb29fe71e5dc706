"""Calls of operators from methods, layers and gradients.

PyTorch's dispatcher passes a call to autograd, to tracers and to the implementation. This takes as long on the host as
the kernels of a decode step, and several times as long with gradients. Where only autograd would act, an eager call
goes directly to the implementation, or to the autograd function around it. ``torch.ops.ep`` always uses the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._dynamo.guards import TensorGuards  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from .. import registry
from ..backends.base import Backend
from ..records import is_ordinary, whole, wrong_type
from .rejection import is_tracing, reject


class Caller(Protocol):
    """The attributes of a communicator that remembers its calls."""

    name: str
    backend: Backend
    accepted: dict[Any, Any]  # calls that have passed their checks, see _accept


class Unchecked(NamedTuple):
    """How an operator runs on a backend without checks."""

    bind: Callable[[Backend, tuple[Any, ...], tuple[Any, ...]], Callable[..., Any]]
    """Function from (backend, tensors that the arguments begin with, other arguments) to a function that runs the
    operator for other tensors like these."""
    interrupted: Callable[[Backend, tuple[Any, ...], BaseException], None]
    """Informs the other ranks that the operator raises on this rank; takes (backend, arguments, error)."""


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
"""Operator name -> what runs on a CPU or a GPU."""
UNCHECKED: dict[str, Unchecked] = {}
"""Operator name -> how it runs without checks, for arguments like those of an earlier call. Only operators whose calls
are remembered."""
DIFFERENTIABLE: dict[str, Callable[..., Any]] = {}
"""Operator name -> its implementation with its gradient, of operators that have one."""

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
_POSITIONS: dict[str, tuple[int, int, int, int]] = {}
"""Operator name -> where among its tensors are the rows, the one that may be None (0: none may), ``topk_idx`` and
``arrivals`` (0: there is none). Only operators whose calls are remembered."""
_MOST_ACCEPTED = 1024  # calls that a communicator remembers
_ALIGNED = 16  # bytes: rows begin at multiples of it, and arrivals at multiples of half of it


def learn(name: str, run: Callable[..., Any], unchecked: Unchecked | None = None) -> None:
    """Register what runs a defined operator, and the types of its arguments."""
    arguments = getattr(torch.ops.ep, name).default._schema.arguments
    IMPLEMENTATIONS[name], _PLAIN[name] = run, set()
    _ARGUMENTS[name] = tuple(_TYPES[str(a.type)] for a in arguments)
    names, kinds = [a.name for a in arguments], [str(a.type) for a in arguments]
    count = next((i for i, kind in enumerate(kinds) if kind not in ("Tensor", "Optional[Tensor]")), 0)
    optional = [i for i, kind in enumerate(kinds[:count]) if kind != "Tensor"]
    if unchecked is not None and "topk_idx" in names and len(optional) <= 1 and optional != [0]:
        UNCHECKED[name] = unchecked
        arrivals = names.index("arrivals") if "arrivals" in names else 0
        _POSITIONS[name] = int(names[0] == "ticket"), max(optional, default=0), names.index("topk_idx"), arrivals


def call(name: str, *args: Any) -> Any:
    """Return ``torch.ops.ep.<name>(*args)``. All arguments must be given."""
    if _heeded():
        return _dispatched(name, args)
    return _run(name, args)[0]


def repeat(comm: Caller, name: str, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
    """Return ``torch.ops.ep.<name>(*tensors, *others)`` of a communicator, and remember the call. ``tensors`` are those
    that the arguments begin with. A call like an earlier one is not checked again."""
    if _heeded():
        args = tensors + others
        return _dispatched(name, args)
    key = known = None
    try:
        rows_at, optional_at, ids_at, arrivals_at = _POSITIONS[name]
        rows, all_given = tensors[rows_at], tensors[optional_at] is not None
        key = name, others, all_given, rows.shape[0], tensors[ids_at].shape[0]
        known = comm.accepted.get(key)
        if all_given and tensors[optional_at].is_nested:  # guards would end the process (shapes of nested ones raise)
            known = None
    except Exception:  # invalid, which is detected below
        pass
    if known is not None:
        check, run = known
        given = tensors if all_given else tensors[:optional_at] + tensors[optional_at + 1 :]
        if (
            check(*given)
            and rows.data_ptr() % _ALIGNED == 0
            and (arrivals_at == 0 or tensors[arrivals_at].data_ptr() % (_ALIGNED // 2) == 0)
        ):
            try:
                return run(*tensors)
            except BaseException as error:
                UNCHECKED[name].interrupted(comm.backend, tensors + others, error)
                raise
    results, alone = _run(name, tensors + others)
    if alone and key is not None:
        _accept(comm, key, tensors, others)
    return results


def _run(name: str, args: tuple[Any, ...]) -> tuple[Any, bool]:
    """Return the results of a call that only autograd may intercept, and whether the implementation alone has run."""
    types = tuple(map(type, args))
    if not (types in _PLAIN[name] or _plain(name, types)) or _first(args).is_meta or _tracing_state() is not None:
        return _dispatched(name, args), False
    asks = _asks(*args)
    if asks and _is_grad_enabled():
        return DIFFERENTIABLE.get(name, getattr(torch.ops.ep, name))(*args), False
    return IMPLEMENTATIONS[name](*args), not asks


def _given(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


def _dispatched(name: str, args: tuple[Any, ...]) -> Any:
    """Call ``torch.ops.ep.<name>(*args)`` through PyTorch's dispatcher. What prevents it from reaching the operator is
    rejected on all ranks."""
    operator = getattr(torch.ops.ep, name)
    if _is_compiling():
        refuse_transforms(f"ep::{name}", args)
        return operator(*args)
    given = dict(zip((argument.name for argument in operator.default._schema.arguments), args, strict=True))
    comm = registry.living.get(given.get("comm", ""))
    calls = comm.backend.calls if comm is not None else 0
    try:
        _check_types(operator.default._schema.arguments, args)
        refuse_transforms(f"ep::{name}", args)
        return operator(*args)
    except Exception as error:
        if comm is not None and comm.backend.calls == calls and not _is_traced(args):
            reject(name, comm.backend, error, given.get("flight", 0), given.get("max_tokens", 0))
        raise


def _accept(comm: Caller, key: Any, tensors: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    """Remember a call that has passed its checks, the second time that it occurs: what checks its tensors, and what
    runs it. From then on tensors with the same types, dtypes, devices, sizes and strides are accepted, without
    gradients and in the same modes. The stride of a dimension of size 1 may be any, as for contiguous tensors."""
    accepted = comm.accepted
    # One that was destroyed may have passed the call to a communicator of the same name.
    if any(isinstance(other, Tensor) for other in others) or registry.living.get(comm.name) is not comm:
        return
    if key not in accepted:
        if len(accepted) >= _MOST_ACCEPTED:
            accepted.clear()
        accepted[key] = None
        return
    given = _given(tensors)
    sizes: list[Any] = [list(tensor.shape) for tensor in given]
    strides: list[Any] = [
        [None if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        for tensor in given
    ]
    guards = TensorGuards(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    accepted[key] = guards.check, UNCHECKED[key[0]].bind(comm.backend, tensors, others)


def _first(args: tuple[Any, ...]) -> Tensor:
    """Return the first tensor of the arguments. All tensors of an operator are on one device."""
    return args[0] if args[0] is not None else next(arg for arg in args if arg is not None)


def _check_types(arguments: Any, args: tuple[Any, ...]) -> None:
    """Raise TypeError for an argument that PyTorch's dispatcher would not accept, and ValueError for a tensor without
    data among others with data."""
    for argument, given in zip(arguments, args, strict=True):
        kind = str(argument.type)
        if not fits(kind, given):
            raise misfit(argument.name, given, kind)
    if not is_tracing():
        check_data({argument.name: given for argument, given in zip(arguments, args, strict=True)})


def check_data(args: dict[str, Any]) -> None:
    """Raise ValueError for tensors without data among tensors with data, for which nothing would be sent."""
    tensors = {name: given for name, given in args.items() if isinstance(given, Tensor)}
    blank = [name for name, given in tensors.items() if _is_blank(given)]
    if 0 < len(blank) < len(tensors):
        with_data = next(name for name in tensors if name not in blank)
        raise ValueError(
            f"{blank[0]} is a tensor without data (on the meta device, or a FakeTensor), and {with_data} has data;"
            " allowed: all tensors with data, or none"
        )


def _is_traced(args: tuple[Any, ...]) -> bool:
    """Return whether an operator on these arguments would only compute shapes: no tensor has data."""
    tensors = [given for given in args if isinstance(given, Tensor)]
    return is_tracing() or bool(tensors) and all(map(_is_blank, tensors))


def _is_blank(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def misfit(name: str, given: Any, kind: str) -> TypeError:
    """Return the error for an argument that does not have the type ``kind`` of a schema."""
    allowed = _ALLOWED[kind]
    if isinstance(given, DTensor):
        allowed = f"this rank's tensor, {name}.to_local()"
    elif isinstance(given, Tensor) and given.is_nested:
        allowed = f"a tensor without jagged dimensions, such as {name}.values()"
    elif isinstance(given, Tensor):
        allowed = f"an ordinary (strided) tensor, such as {name}.to_dense(), not one with layout {given.layout}"
    return wrong_type(name, given, allowed)


def fits(kind: str, given: Any) -> bool:
    """Return whether an argument has the type ``kind`` of a schema. Of tensors, only ordinary ones do."""
    if kind == "Optional[Tensor]":
        return given is None or fits("Tensor", given)
    if kind == "Tensor":
        return is_ordinary(given)
    if kind == "int":
        return isinstance(given, torch.dtype) or _is_int(given)
    if kind == "bool":
        return isinstance(given, (bool, torch.SymBool))
    return kind != "str" or isinstance(given, str)


def _is_int(given: Any) -> bool:
    try:
        whole("", given)
    except ValueError:
        return False
    return True


_ALLOWED = {
    "Tensor": "a tensor", "Optional[Tensor]": "a tensor, or None", "int": "an int", "bool": "a bool", "str": "a str",
}  # fmt: skip


def refuse_transforms(name: str, args: tuple[Any, ...]) -> None:
    """Raise NotImplementedError for forward-mode and torch.func derivatives, which are not supported.

    Otherwise forward-mode derivatives would silently be zero, and torch.func.grad would raise an error about an
    internal autograd.Function.
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
        if _is_compiling():  # Dynamo's error names the transform
            continue
        if torch._C._functorch.is_gradtrackingtensor(arg) and arg.requires_grad and _is_grad_enabled():
            raise NotImplementedError(
                f"{name} does not support the transforms of torch.func (grad, vjp, jacrev, hessian);"
                " allowed: backward and torch.autograd.grad"
            )


# Looked up once, because attribute lookups take a noticeable part of a decode step.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_asks = torch._C._any_requires_grad
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_profiler_enabled = torch.autograd._profiler_enabled
_tracing_state = torch._C._get_tracing_state  # of torch.jit.trace, whose tensors no guard accepts


def _heeded() -> bool:
    """Return whether a tracer, mode, transform or profiler, other than autograd, intercepts operators. Guards notice
    transforms and most modes, but not FakeTensorMode."""
    return (
        _is_compiling()
        or get_eval_frame_callback() is not None  # Dynamo would trace into this code
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _transforms() is not None
        or _profiler_enabled()
        or forward_ad._current_level >= 0  # torch.func.jvp also enters a level
    )


def _plain(name: str, types: tuple[type, ...]) -> bool:
    """Return whether all arguments have the plain types of the schema, and remember them if so."""
    plain = all(given in allowed for given, allowed in zip(types, _ARGUMENTS[name], strict=True))
    if plain:
        _PLAIN[name].add(types)
    return plain
