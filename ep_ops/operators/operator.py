"""The description of one operator."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meta_kernels.arguments import CombineBackwardWaitArgs, DispatchBackwardWaitArgs, schema_of

from ..backends.split import parts_of
from ..config import Member
from .eager import RememberedOp


class Gradient(NamedTuple):
    """The gradient of operators with equal results."""

    operators: tuple[str, ...]  # what backward runs
    save: Callable[[Any, Any, Any, Any], None]
    """(ctx, arguments, which of them need a gradient, outputs): keeps what backward needs. Both middle ones are records
    with the names of the operator's arguments."""
    backward: Callable[..., dict[str, Tensor | None]]
    """(ctx, which arguments need a gradient, gradient of each output) -> gradients by the name of the argument."""


@dataclass(eq=False)
class Operator:
    """One operator, ``torch.ops.ep.<name>``. The function of its name in ``meta_kernels.fakes`` is its fake."""

    name: str
    arguments: type[Any]  # the record of its arguments, from which the schema is derived
    results: Any  # the record of its results; for one result a str, its name
    does: str  # a sentence for the documentation
    check: Callable[[Member, Any], None]  # raises TypeError or ValueError; ``flight`` has been checked
    gradient: Gradient | None = None
    exact: bool = False  # sizes of outputs depend on data: waits for the device
    registered: RememberedOp = field(init=False, repr=False)  # set by registration, as are the next
    repeat: Callable[[Any], Any] = field(init=False, repr=False)  # `RememberedOp.repeat`
    call: Callable[[Any], Any] = field(init=False, repr=False)  # runs it with a record of its arguments

    @functools.cached_property
    def schema(self) -> str:
        """Return the arguments and results of the schema."""
        record = self.arguments
        arguments = schema_of(typing.get_type_hints(record, include_extras=True), record._field_defaults)
        if isinstance(self.results, str):
            return f"{arguments} -> Tensor {self.results}"
        return f"{arguments} -> ({', '.join(f'Tensor {name}' for name in self.results._fields)})"

    @functools.cached_property
    def split(self) -> bool:
        """Whether it is the start or the wait of a split operation."""
        return "flight" in self.arguments._fields

    @functools.cached_property
    def starts(self) -> str | None:
        """Return the operator that this one ends, if it is the wait of a split operation."""
        whole, part = parts_of(self.name)
        return f"{whole}_start" if part == "wait" else None

    @property
    def overload(self) -> torch._ops.OpOverload:
        """Return ``torch.ops.ep.<name>.default``, which must be registered."""
        return getattr(torch.ops.ep, self.name).default


def nothing(comm: Member, a: DispatchBackwardWaitArgs | CombineBackwardWaitArgs) -> None:
    """Check nothing: the wait of a gradient takes sizes that its start has determined."""
