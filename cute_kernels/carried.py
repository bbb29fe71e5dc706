"""Objects of launch arguments and pointers that kernels pass around."""

import copy
from collections.abc import Sequence
from typing import Any

import cutlass


class Carried:
    """The DSL carries an object through run-time control flow by taking its values apart and putting them together.

    `carried` names the attributes that hold such values, one or a tuple of them; all others stay as they are.
    """

    carried: tuple[str, ...] = ()

    def __extract_mlir_values__(self) -> list[Any]:
        return [
            v
            for name in self.carried
            for item in _items(getattr(self, name))
            for v in cutlass.extract_mlir_values(item)
        ]

    def __new_from_mlir_values__(self, values: Sequence[Any]) -> "Carried":
        new, left = copy.copy(self), iter(values)
        for name in self.carried:
            old = getattr(self, name)
            built = [cutlass.new_from_mlir_values(item, [next(left)]) for item in _items(old)]
            setattr(new, name, tuple(built) if isinstance(old, tuple) else built[0])
        return new


def _items(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
