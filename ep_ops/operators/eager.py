"""Calls of operators from methods, layers and gradients.

PyTorch's dispatcher passes a call to autograd, to tracers and to the implementation. This takes as long on the host as
the kernels of a decode step, and several times as long with gradients. Where only autograd would act, an eager call
goes directly to the implementation, or to the autograd function around it. ``torch.ops.ep`` always uses the dispatcher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from .. import registry
from ..records import is_ordinary, whole, wrong_type
from . import recomputation
from .rejection import is_tracing, reject, reject_thread

_TYPES: dict[str, frozenset[type]] = {
    "Tensor": frozenset({Tensor, torch.nn.Parameter}),
    "Optional[Tensor]": frozenset({Tensor, torch.nn.Parameter, NoneType}),
    "int": frozenset({int, torch.dtype}),
    "List[Tensor]": frozenset({list}),
    "List[int]": frozenset({list, tuple}),
    "str": frozenset({str}),
    "bool": frozenset({bool}),
}
"""Types that arguments plainly have, by type in the schema. Subclasses of Tensor may mean something else."""

_ALIGNED = 16  # bytes: rows begin at multiples of it, and arrivals at multiples of half of it


class Op:
    """An operator of the library ``ep`` as it is called in eager code, with its arguments in the order of the schema.
    All must be given."""

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.name = name
        self.run = run
        """What runs on a CPU or a GPU."""
        self.differentiable: Callable[..., Any] | None = None
        """The same with its gradient, if it has one."""
        self.schema = self.overload._schema
        self._allowed = tuple(_TYPES[str(argument.type)] for argument in self.schema.arguments)
        self._plain: set[tuple[type, ...]] = set()

    @functools.cached_property
    def overload(self) -> torch._ops.OpOverload:
        """Return ``torch.ops.ep.<name>.default``."""
        return getattr(torch.ops.ep, self.name).default

    def __call__(self, *args: Any) -> Any:
        """Return the results of the operator."""
        return self.dispatched(args) if _is_intercepted() else self.direct(args)[0]

    def direct(self, args: tuple[Any, ...]) -> tuple[Any, bool]:
        """Return the results of a call that only autograd may intercept, and whether ``run`` alone has run."""
        if not self.plain(args) or _first(args).is_meta or _tracing_state() is not None:
            return self.dispatched(args), False
        asks = _asks(*args)
        if asks and _is_grad_enabled():
            return (self.differentiable or self.overload)(*args), False
        return self.run(*args), not asks

    def dispatched(self, args: tuple[Any, ...]) -> Any:
        """Call the operator through PyTorch's dispatcher. What prevents it from reaching the operator is rejected on
        all ranks."""
        name = f"ep::{self.name}"
        if _is_compiling():
            reject_transforms(name, args)
            return self.overload(*args)
        given = dict(zip((argument.name for argument in self.schema.arguments), args, strict=True))
        comm = registry.living.get(given.get("comm", ""))
        calls = comm.backend.calls if comm is not None else 0
        try:
            _check_types(self.schema.arguments, args)
            reject_transforms(name, args)
            return self.overload(*args)
        except Exception as error:
            if comm is not None and comm.backend.calls == calls and not _is_traced(args):
                reject(self.name, comm, error, given.get("flight", 0), given.get("max_tokens", 0))
            raise

    def plain(self, args: tuple[Any, ...]) -> bool:
        """Return whether all arguments have the plain types of the schema, and remember these types if so."""
        types = tuple(map(type, args))
        if types in self._plain:
            return True
        plain = all(given in allowed for given, allowed in zip(types, self._allowed, strict=True))
        if plain:
            self._plain.add(types)
        return plain


class RememberedOp(Op):
    """An operator of communicators, whose calls are remembered (``ep_ops.backends.calls``)."""

    def __init__(self, name: str, run: Callable[..., Any], interrupted: Callable[..., None]) -> None:
        """``interrupted`` informs the other ranks that a call without checks raises; it takes (communicator, arguments,
        error)."""
        super().__init__(name, run)
        self.key, self.repeat, self.call = _remembering(self, interrupted)
        """Functions of the record of the arguments. ``key`` returns what identifies a call of an operator with
        ``topk_idx``: specification and sizes. ``repeat`` returns the results of a call like an earlier one, which is
        not checked again; None: there is no such call. ``call`` returns the results of any call."""
        self.guarded = _guarded_of(self)
        """Function of the record of the arguments: the tensors whose checks a guard can replace, without those that are
        None, or None if some argument needs its check. May raise if the arguments are invalid."""


class _Positions(NamedTuple):
    """Indices of arguments of an operator of communicators."""

    leading: int  # number of tensors that the arguments begin with
    other: int  # the tensor behind them; 0: there is none
    one: int  # the leading tensor that may be None
    ids: int  # `topk_idx`; the other leading tensors follow it
    rows: int  # the first tensor of rows; 1: it follows a ticket
    lists: int  # `arrivals`; 0: there are none
    name: int  # `comm`
    types: tuple[tuple[int, type], ...]  # of arguments whose types methods do not check
    recognized: bool  # whether calls are remembered


def _positions(schema: Any) -> _Positions:
    names = [argument.name for argument in schema.arguments]
    kinds = [str(argument.type) for argument in schema.arguments]
    tensors = [i for i, kind in enumerate(kinds) if kind in ("Tensor", "Optional[Tensor]")]
    leading = next(i for i in range(len(kinds)) if i not in tensors)
    other = next((i for i in tensors if i > leading), 0)
    optional = [i for i in tensors if i < leading and kinds[i] != "Tensor"]
    ids = names.index("topk_idx") if "topk_idx" in names else 0
    one = optional[0] if optional else ids
    recognized = "topk_idx" in names and len(optional) <= 1 and optional != [0]
    rows = int(names[0] == "ticket")
    lists = names.index("arrivals") if "arrivals" in names else 0
    # Methods check sizes of a new route; those of an existing one are in a record that users can change.
    ints = [i for i, kind in enumerate(kinds) if kind == "int" and (lists or names[i] == "flight")]
    types = (*((i, int) for i in ints), *((i, bool) for i, kind in enumerate(kinds) if kind == "bool"))
    return _Positions(leading, other, one, ids, rows, lists, names.index("comm"), types, recognized)


def _key_of(op: RememberedOp) -> Callable[[Any], Any]:
    """Return the function ``key`` of an operator."""
    leading, other, one, ids, rows, *_, recognized = _positions(op.schema)

    def key(a: tuple[Any, ...]) -> Any:
        if not recognized:  # gradients
            return op, a[leading:], *(None if i is None else i.shape[0] for i in a[:leading])
        if other and a[other] is not None:
            a = (*a[:other], True, *a[other + 1 :])
        return op, a[leading:], a[one] is None, a[rows].shape[0], a[ids].shape[0]

    return key


def _guarded_of(op: RememberedOp) -> Callable[[Any], Any]:
    """Return the function ``guarded`` of an operator."""
    leading, other, _, ids, _, lists, _, types, _ = _positions(op.schema)

    def guarded(a: Any) -> Any:
        if other and a[other] is not None:
            return None
        for i, kind in types:  # 1 equals True
            if type(a[i]) is not kind:
                return None
        if lists and a[lists].data_ptr() % (_ALIGNED // 2):
            return None
        for tensor in a[:ids]:  # rows and their weights
            if tensor is not None and tensor.data_ptr() % _ALIGNED:
                return None
        for tensor in a[:leading]:
            if tensor is not None and tensor.is_nested:  # guards would end the process
                return None
        return [tensor for tensor in a[:leading] if tensor is not None]

    return guarded


def _remembering(
    op: RememberedOp, interrupted: Callable[..., None]
) -> tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]:
    """Return ``key``, ``repeat`` and ``call`` of an operator. They are closures, because they are part of every step of
    a decoder."""
    leading, other, one, ids, rows, lists, name, types, recognized = _positions(op.schema)
    key, living = _key_of(op), registry.living

    def repeat(a: Any) -> Any:
        if _is_intercepted() or other and a[other] is not None:
            return None
        try:
            given, others = a[:leading], a[leading:]
            if absent := given[one] is None:
                given = given[:one] + given[one + 1 :]
            for tensor in given:
                if tensor.is_nested:  # guards would end the process
                    return None
            for i, kind in types:  # 1 equals True
                if type(a[i]) is not kind:
                    return None
            comm = living[a[name]]
            latest = comm.calls.latest
            known: Any = latest.get(op)
            if not (known and known.others == others and known.absent is absent and known.accepts(*given)):
                known = comm.calls[op, others, absent, a[rows].shape[0], a[ids].shape[0]]
                if not (known and known.accepts and known.accepts(*given)):
                    return None
                latest[op] = known
            if a[rows].data_ptr() % _ALIGNED or lists and a[lists].data_ptr() % (_ALIGNED // 2):
                return None
        except Exception:  # invalid, which is detected later
            return None
        busy = comm.busy
        if not busy.acquire(False):
            reject_thread(comm, f"ep::{op.name}")
        try:
            return known.run(a)
        except BaseException as error:
            interrupted(comm, a, error)
            raise
        finally:
            busy.release()

    def call(a: Any) -> Any:
        if not _is_grad_enabled() or _is_intercepted() or not _asks(*a):
            if recognized and (results := repeat(a)) is not None:
                return results
            if _is_intercepted():
                return op.dispatched(a)
        results, alone = op.direct(a)
        if alone and recognized and not (other and a[other] is not None):
            found = living[a[name]].calls[key(a)]
            if found is not None:
                found.remember(a[:leading], a[leading:])
        return results

    return key, repeat, call


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


def reject_transforms(name: str, args: tuple[Any, ...]) -> None:
    """Raise NotImplementedError for forward-mode and torch.func derivatives and torch.vmap, which are not supported.

    Otherwise forward-mode derivatives would silently be zero, torch.func.grad would raise an error about an internal
    autograd.Function, and torch.vmap would run the operator as often as this rank's batch is long.
    """
    if forward_ad._current_level < 0 and (_is_compiling() or _transforms() is None):
        return
    for arg in args:
        if isinstance(arg, Tensor) and not _is_compiling() and torch._C._functorch.is_batchedtensor(arg):
            raise NotImplementedError(
                f"{name} does not support torch.vmap, nor transforms of torch.func that use it; allowed: one call with"
                " the tokens of all samples"
            )
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


def is_transformed() -> bool:
    """Return whether a transform of torch.func is active in eager code."""
    return not _is_compiling() and _transforms() is not None


# Looked up once, because attribute lookups take a noticeable part of a decode step.
_is_compiling = torch.compiler.is_compiling
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling  # takes half the time
_is_grad_enabled = torch.is_grad_enabled
_asks = torch._C._any_requires_grad
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_profiler_enabled = torch.autograd._profiler_enabled
_top_hooks = recomputation.top_hooks
_reentrant_runs = recomputation.reentrant_runs
_tracing_state = torch._C._get_tracing_state  # of torch.jit.trace, whose tensors no guard accepts


def _is_intercepted() -> bool:
    """Return whether a tracer, mode, transform, profiler or checkpoint, other than autograd, intercepts operators.

    Guards notice transforms and most modes, but not FakeTensorMode.
    """
    return (
        _is_dynamo_compiling()
        or get_eval_frame_callback() is not None  # Dynamo would trace into this code
        or _dispatch_modes() != 0  # also of torch.export
        or _function_modes() != 0
        or _transforms() is not None
        or _profiler_enabled()
        or forward_ad._current_level >= 0  # torch.func.jvp also enters a level
        or _reentrant_runs != []  # checkpointing, whose calls must not be remembered
        or _top_hooks(False) is not None
    )
