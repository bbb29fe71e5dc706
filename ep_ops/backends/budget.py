"""The number of multiprocessors (SMs) that the kernels of a communicator may use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..config import is_int

ANY = 2**31
"""The limit where there is none: more multiprocessors than any GPU has."""


class Budget:
    """SMs that each kind of operation may use. Operators read it when they run.

    It is host state: ranks may differ, and a captured graph keeps the values of its capture.

    Args:
        dispatch, combine: SMs of a dispatch and of a combine.
        gather: SMs of a gathering combine. None: as ``combine``.
        scaled: SMs of the backward of a weighted combine, which is a dispatch. None: as ``combine``.
        most_dispatch, most_combine: upper limits.
        beyond: SMs that a rank with more rows than others may use in a dispatch. 0 after a budget was set, which is a
            limit for these ranks as well.
        modelled: whether ``dispatch`` and ``combine`` are defaults. A model is then evaluated again for a dispatch with
            fewer rows, and for a combine concurrent with computation.
    """

    def __init__(
        self,
        dispatch: int,
        combine: int,
        gather: int | None = None,
        scaled: int | None = None,
        most_dispatch: int = ANY,
        most_combine: int = ANY,
        beyond: int = 0,
        modelled: tuple[bool, bool] = (False, False),
    ) -> None:
        self.most_dispatch, self.most_combine = max(1, most_dispatch), max(2, most_combine)
        self.dispatch = max(1, min(dispatch, self.most_dispatch))
        self.combine = max(2, min(combine, self.most_combine))
        self.gather = max(1, min(gather or self.combine, self.most_combine))
        self.scaled = max(1, min(scaled or self.combine, self.most_dispatch))
        self.beyond, self.modelled = beyond, modelled
        self.asked: tuple[int | None, int | None] = (None, None)
        """What :meth:`changed` was last given for dispatch and combine, and has not been left yet."""
        self._blocks: list[list[int | None]] = []
        self._usual: dict[str, object] = {}

    @contextlib.contextmanager
    def changed(self, dispatch: int | None, combine: int | None) -> Iterator[None]:
        """Change the budget within a ``with`` block. None keeps a value."""
        if torch.compiler.is_compiling():
            # A tracer would ignore the change. Without fullgraph, this block runs eagerly.
            raise RuntimeError(
                "sm_budget cannot be used inside a compiled function; put the with block around its call"
            )
        _check("dispatch", dispatch, 1, self.most_dispatch)
        _check("combine", combine, 2, self.most_combine)
        if not self._blocks:
            self._usual = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        block = [dispatch, combine]
        self._set([*self._blocks, block])
        try:
            yield
        finally:  # blocks of generators can end in any order
            self._set([other for other in self._blocks if other is not block])

    def _set(self, blocks: list[list[int | None]]) -> None:
        """Apply the changes of the blocks that have not ended, in the order of their begins."""
        vars(self).update(self._usual)
        self._blocks = blocks
        for dispatch, combine in blocks:
            if dispatch is not None:
                self.dispatch = dispatch
                self.beyond, self.modelled = 0, (False, self.modelled[1])
            if combine is not None:
                self.combine = self.gather = combine
                self.scaled = min(combine, self.most_dispatch)
                self.modelled = self.modelled[0], False
            self.asked = self.asked[0] if dispatch is None else dispatch, self.asked[1] if combine is None else combine


def _check(name: str, value: int | None, least: int, most: int) -> None:
    if value is None:
        return
    if not is_int(value) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}; allowed: None or an int of {least}..{most} multiprocessors")
