"""Checking mode (``EP_OPS_CHECK=1``): run every operation on the reference backend too, and compare the results.

An operation runs on the selected backend and then, with the same tensors, on the reference backend. All ranks exchange
the outcome before any of them raises. The caller gets the results of the selected backend.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from meta_kernels.arguments import AnyStart, Args

from .. import arrivals
from ..config import Member
from ..specs import CombineBackwardSpec, Spec
from .base import Backend
from .reference import ReferenceBackend
from .split import nothing

BY_ROW = frozenset({"recv_x", "recv_weights", "grad_y", "grad_recv_weights"})
"""Outputs with one entry for each row of the receive buffer, some of which are undefined."""

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CheckedBackend:
    """A backend whose operators are compared. Synchronizes the host in every operator but the start of a split
    operation."""

    calls = 0

    def __init__(self, member: Member, backend: Backend) -> None:
        self._backend = backend
        self._reference = ReferenceBackend(member)
        self._reference.strict = False  # the selected backend is strict: it owns the rows, and records starts
        self._reference.rows.unused = float("nan")
        self._name, self._rank, self._world_size = member.name, member.rank, member.world_size
        self._device = member.device
        self._operations = 0
        self._unmet = False  # whether the operator has raised before the reference backend ran
        self._started: dict[int, tuple[Spec, Any, str]] = {}  # flight -> specification, arguments, layer
        if member.rank == 0:
            warnings.warn(
                f"EP_OPS_CHECK is 1: every operation of communicator {member.name!r} also runs on the reference"
                " backend, to compare the results, which is slow",
                RuntimeWarning, stacklevel=5,
            )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the backend, other than an operator."""
        return getattr(self._backend, name)

    def bind(self, spec: Spec, a: Args) -> Callable[[Any], Any]:
        return functools.partial(self.run, spec, self._backend.bind(spec, a))

    def bind_start(self, spec: Spec, a: Args) -> Callable[[Any], Tensor]:
        return functools.partial(self.start, spec, self._backend.bind_start(spec, a))

    def start(self, spec: Spec, start: Callable[[Any], Tensor], a: AnyStart) -> Tensor:
        """Start an operation, whose wait compares it."""
        with self._meeting(f"{spec.kind}_start"):
            made = start(a)
        self._started[a.flight] = spec, a, calling_layer()
        return made

    def wait(self, operator: str, flight: int, again: Callable[[], Any]) -> Any:
        if flight in self._started:  # what runs again is not compared twice
            spec, a, _ = self._started[flight]
            again = functools.partial(self._backend.bind(spec, a), a)
        with self._meeting(f"{operator}_wait"):
            got = self._backend.wait(operator, flight, again)
            self._synchronize()
        if flight not in self._started:  # without strict, another wait for a start runs the operation again
            return got
        spec, a, layer = self._started.pop(flight)
        return self._compared(f"{operator}_wait", spec, a, got, layer)

    def run(self, spec: Spec, run: Callable[[Any], Any], a: Args) -> Any:
        """Run a whole operation and compare it."""
        with self._meeting(spec.kind):
            got = run(a)
            self._synchronize()
        return self._compared(spec.kind, spec, a, got, calling_layer())

    @contextlib.contextmanager
    def _meeting(self, operator: str) -> Iterator[None]:
        """Run what the selected backend does, before the reference backend runs."""
        self._unmet = False
        if _capturing(self._device):
            raise RuntimeError(
                f"communicator {self._name!r}: ep::{operator} cannot be captured in a CUDA graph while EP_OPS_CHECK is"
                " 1: it is compared on the host. Run without CUDA graphs, or without EP_OPS_CHECK."
            )
        try:
            yield
        except Exception:
            self._unmet = True
            raise

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._backend.check_errors()

    def _compared(self, operator: str, spec: Spec, a: Args, got: Any, layer: str) -> Any:
        """Return the results of the selected backend if all ranks find them equal to those of the reference backend."""
        self._operations += 1
        with self._reference.together(f"comparison of ep::{operator}"):
            expected = self._reference.bind(spec, a)(a)
            slack = self._rounding(spec, a) if isinstance(spec, CombineBackwardSpec) else None
            text = self._difference(spec.kind, a, got, expected, slack)
            noted = [said.partition("|") for said in self._reference.exchange.all_gather_text(f"{layer}|{text}")]
        self._compare_layers(operator, [calling for calling, _, _ in noted])
        found = [difference for _, _, difference in noted]
        differing = [rank for rank, text in enumerate(found) if text]
        if differing:
            more = f"; ranks {differing[1:]} have differences, too" if differing[1:] else ""
            raise RuntimeError(
                f"communicator {self._name!r}: ep::{operator}, operation {self._operations}, is not what the reference"
                f" backend returns: {found[differing[0]]}{more}"
            )
        return got

    def _compare_layers(self, operator: str, layers: list[str]) -> None:
        """Raise RuntimeError if the ranks' layers are known and differ."""
        if len({layer for layer in layers if layer}) > 1:
            called = ", ".join(f"rank {rank}: {layer or 'unknown'}" for rank, layer in enumerate(layers))
            raise RuntimeError(
                f"communicator {self._name!r}: ep::{operator}, operation {self._operations}, was called by different"
                f" layers ({called}, numbered in the order of creation); all ranks must call layers in one order"
            )

    def end_flights(self) -> None:
        for flight, (spec, *_) in [*self._started.items()]:
            with contextlib.suppress(Exception):
                self.wait(spec.kind, flight, nothing)

    def interrupted(
        self, operator: str, error: BaseException, again: Callable[[], Any], flight: int = 0, max_tokens: Any = 0
    ) -> None:
        """Inform the other ranks in both backends."""
        runs = []

        def compared() -> Any:
            runs.append(operator)
            return again()

        if self._unmet:
            try:
                self._backend.interrupted(operator, error, compared, flight, max_tokens)
            finally:
                if not runs:
                    self._leave(operator, str(error))

    def reject(self, operator: str, reason: str, flight: int = 0, max_tokens: Any = 0) -> None:
        """Inform the other ranks in both backends, because they wait in both."""
        try:
            self._backend.reject(operator, reason, flight, max_tokens)
        finally:
            self._leave(operator, reason)

    def _leave(self, operator: str, reason: str) -> None:
        """Reject the operation in the reference backend, where the other ranks raise the reason.

        Does nothing if the other ranks do not wait there: after a failure of the kernels, or if the compared backend is
        a reference backend, whose errors all ranks raise.
        """
        self._operations += 1
        if self._backend.name == "reference":
            return
        if not _capturing(self._device) and not self._backend.has_failed():
            with contextlib.suppress(RuntimeError):  # ranks that run another operator raise by themselves
                self._reference.reject(operator, reason)

    def destroy(self, keep: bool) -> None:
        self._backend.destroy(keep)
        self._reference.destroy(keep)

    # ------------------------------------------------------------------ comparison

    def _rounding(self, spec: CombineBackwardSpec, a: Any) -> Tensor | None:
        """Return the largest difference of two sums of the same products in different orders, [R]. Collective."""
        if not (spec.products and spec.weighted):
            return None
        absolute = a._replace(grad_out=a.grad_out.abs(), y=a.y.abs())
        _, magnitude = self._reference.bind(spec, absolute)(absolute)
        exact = torch.finfo(magnitude.dtype)
        return a.y.shape[1] * (exact.eps * magnitude + exact.tiny)

    def _difference(self, operator: str, a: Args, got: Any, expected: Any, slack: Tensor | None) -> str:
        """Return a text for the first difference, or "". Integers come first: different routes have different rows."""
        if isinstance(expected, Tensor):
            got, expected = (got,), (expected,)
        names = [output.name for output in getattr(torch.ops.ep, operator).default._schema.returns]
        returned = dict(zip(names, zip(got, expected, strict=True), strict=True))
        for name in sorted(names, key=lambda name: returned[name][1].is_floating_point()):
            mine, right = returned[name]
            if mine.shape != right.shape or mine.dtype != right.dtype:
                is_, has = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (mine, right))
                return f"{name} is {is_} on rank {self._rank}, the reference has {has}"
            wrong = differ(mine, right)
            if name == "arrivals":
                wrong &= torch.cat([part.flatten() for part in arrivals.defined(right, self._world_size)]) != -1
            elif name == "recv_scales":
                wrong &= ~_undefined(right)
            elif name in BY_ROW and right.numel():
                wrong &= self._owned(returned, a).view(-1, *[1] * (right.dim() - 1)) | ~right.isnan()
            if name == "grad_recv_weights" and slack is not None:
                wrong &= ~(((mine - right).abs() <= slack) | slack.isinf())
            if bool(wrong.any()):
                return self._text(name, mine, right, wrong)
        return ""

    def _owned(self, returned: dict[str, tuple[Tensor, Tensor]], a: Any) -> Tensor:
        """Return which rows of the receive buffer hold a token, bool [R]. Undefined rows of the reference are NaN."""
        lists = returned["arrivals"][1] if "arrivals" in returned else a.arrivals
        return arrivals.recv_from(lists, arrivals.rows_of(lists.numel(), self._world_size)) >= 0

    def _text(self, name: str, mine: Tensor, right: Tensor, wrong: Tensor) -> str:
        flat = wrong.flatten().byte().argmax()  # index of the first difference
        index = [int(i) for i in torch.unravel_index(flat, wrong.shape)]
        here, there = (tensor[tuple(index)].item() for tensor in (mine, right))
        return (
            f"{name}{index} is {here!r} on rank {self._rank}, the reference has {there!r} ({int(wrong.sum())} of"
            f" {wrong.numel()} numbers differ)"
        )


def calling_layer() -> str:
    """Return the kind and number of the layer whose eager code calls an operator, or "" if it is not known."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        layer = frame.f_locals.get("self")
        if isinstance(layer, torch.nn.Module) and (number := getattr(layer, "layer_number", None)) is not None:
            return f"{type(layer).__name__} {number}"
        frame = frame.f_back
    return ""


def _undefined(scales: Tensor) -> Tensor:
    """Return which received scales are undefined in the reference: NaN, or a byte of 255 in packed ones. Scales of NaN
    blocks look the same; the codes of these blocks are compared."""
    if scales.dtype is not torch.int32:
        return scales.isnan()
    return (scales.view(torch.uint8) == 255).view(*scales.shape, 4).any(-1)


def differ(one: Tensor, other: Tensor) -> Tensor:
    """Return where two tensors of the same shape and dtype have different bits. All NaN are equal."""
    ints = _INTS[one.dtype.itemsize]
    wrong = one.view(ints) != other.view(ints)
    return wrong & ~(one.isnan() & other.isnan()) if one.is_floating_point() else wrong


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
