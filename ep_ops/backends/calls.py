"""The calls of one communicator: specifications that were checked, and launches that are bound for sizes and shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # type: ignore[attr-defined]

from ..specs import Spec

MOST_CALLS = 1024
"""The calls that a communicator remembers: at least half of them, those used last."""
MOST_GUARDS = 4
"""The combinations of modes and of tensors that require gradients for which a call remembers that it was checked."""


class Call:
    """A call with given sizes and shapes."""

    __slots__ = ("absent", "accepts", "checked", "others", "run", "seen")

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self.run = run
        """Runs it with its arguments, which have passed their checks."""
        self.seen = False
        """Whether it has run without gradients before."""
        self.accepts: Callable[..., bool] | None = None
        """Returns whether tensors have the types, dtypes, devices, sizes and strides of an earlier call, without
        gradients and in the same modes. The stride of a dimension of size 1 may be any, as for contiguous tensors."""
        self.absent = False
        """Whether one of the tensors is None, which ``accepts`` does not take."""
        self.others: tuple[Any, ...] = ()
        """The arguments behind the tensors."""
        self.checked: list[Callable[..., bool]] = []
        """Guards like ``accepts`` for other modes, and for tensors that require gradients: of tensors that have passed
        the checks of the operator's implementation."""

    def remember(self, given: tuple[Tensor | None, ...], others: tuple[Any, ...]) -> None:
        """Accept tensors like these from the second time on; a call that comes once is not worth its guard."""
        if not self.seen:
            self.seen = True
            return
        tensors = tuple(tensor for tensor in given if tensor is not None)
        self.absent, self.others = len(tensors) < len(given), others
        self.accepts = _guard(tensors)

    def add_checked(self, tensors: list[Tensor]) -> None:
        """Accept tensors like these, which have passed all checks."""
        if len(self.checked) < MOST_GUARDS:
            self.checked.append(_guard(tensors))


def _guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that returns whether tensors are like these: types, dtypes, devices, sizes, strides, whether
    they require gradients, and modes."""
    sizes: list[Any] = [list(tensor.shape) for tensor in tensors]
    strides: list[Any] = [
        [None if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        for tensor in tensors
    ]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


class CallCache(dict[Any, Call]):
    """The calls that were used last, by operator, sizes and specification. Looking up an unknown one returns None."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: set[Spec] = set()
        """The specifications that have passed their checks."""
        self.latest: dict[Any, Call] = {}
        """The latest call of each operator that was accepted without checks."""
        self._older: dict[Any, Call] = {}

    def __missing__(self, key: Any) -> Call | None:
        found = self._older.get(key)
        if found is not None:
            self.add(key, found)
        return found

    def add(self, key: Any, call: Call) -> Call:
        """Keep a call, and forget those that were not used for longest if there are too many."""
        if len(self) >= MOST_CALLS // 2:
            self._older = dict(self)
            self.clear()
        self[key] = call
        return call

    def forget(self) -> None:
        """Forget everything."""
        self.clear()
        self._older.clear()
        self.latest.clear()
        self.specs.clear()
