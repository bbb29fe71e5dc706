"""Views of global memory: arrays whose elements are named by indices.

A view says once what an element is and how many there are of each dimension but the first. Whoever reads or writes an
element gives its indices. For a section of a rank's heap both are stated where the heap is laid out (heap.py), and
`Ranks.view` returns the view; a tensor among a kernel's arguments is a view by its annotation.

    kept = ranks.view("kept")  # pairs [tiles, ranks] in this rank's heap
    kept[tile, source] = entries, copies
    n, m = kept[tile, source]

Elements are loaded and stored by the instructions of ptx.py, which the compiler neither merges nor reorders. Words,
with which ranks synchronize, have no operators: `at` returns the address, and the instruction that is applied to it
says the memory order. Indices are combined in 32 bits, unless the first one is an Int64.
"""

import copy
import math
from typing import Any, ClassVar

from cutlass import Int32, Int64

from . import ptx
from .carried import Carried
from .heap import ELEMENT_BYTES, Section


class View(Carried):
    """Elements from the address `base` on. `extents`: those of all dimensions but the first. `step`: bytes from one
    element to the next, if there is something between them."""

    carried = ("base",)
    ELEMENT: ClassVar[str]

    def __init__(self, base: Any, *extents: int, step: int = 0) -> None:
        self.base, self.extents, self.step = base, extents, step or ELEMENT_BYTES[self.ELEMENT]

    def __repr__(self) -> str:
        return type(self).__name__  # becomes a part of kernels' names

    def at(self, *index: Any) -> Int64:
        """Return the address of an element."""
        number = index[0]
        for extent, i in zip(self.extents, index[1:], strict=True):
            number = number * extent + i
        return self.base + Int64(number) * self.step

    @property
    def flat(self) -> Any:
        """The same elements in one dimension."""
        new = copy.copy(self)
        new.extents = ()
        return new

    def part(self, index: Any) -> Any:
        """Return the view of all elements with this first index, without that dimension."""
        new = copy.copy(self)
        new.base, new.extents = self.base + Int64(index) * (math.prod(self.extents) * self.step), self.extents[1:]
        return new


class Words(View):
    """8 bytes each, with which blocks or ranks synchronize."""

    ELEMENT = "word"


class Records(View):
    """Rows or other records of `nbytes` each, which are moved as they are."""

    ELEMENT = "record"

    def __init__(self, base: Any, nbytes: Any, *extents: int) -> None:
        super().__init__(base, *extents)
        self.step = nbytes


class Elements(View):
    """Elements that can be loaded and stored: `load(address)`, `store(address, value)`."""

    load: ClassVar[Any]
    store: ClassVar[Any]

    def __getitem__(self, index: Any) -> Any:
        return self.load(self.at(*index) if isinstance(index, tuple) else self.at(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.store(self.at(*index) if isinstance(index, tuple) else self.at(index), value)


class Ints(Elements):
    """Numbers of type int32."""

    ELEMENT = "int"

    load, store = staticmethod(ptx.ld_i32), staticmethod(ptx.st_i32)


class Floats(Elements):
    """Numbers of type fp32."""

    ELEMENT = "float"

    load, store = staticmethod(ptx.ld_f32), staticmethod(ptx.st_f32)

    @property
    def bits(self) -> Ints:
        """The same memory as int32, for numbers that are only moved."""
        return Ints(self.base, *self.extents, step=self.step)


class Uint8s(Elements):
    """Numbers of type uint8."""

    ELEMENT = "byte"

    load, store = staticmethod(ptx.ld_u8), staticmethod(ptx.st_u8)


class Pairs(Elements):
    """Two numbers of type int32 each."""

    ELEMENT = "pair"

    load, store = staticmethod(ptx.ld_pair), staticmethod(ptx.st_pair)

    @property
    def first(self) -> Ints:
        """The first number of each pair."""
        return Ints(self.base, *self.extents, step=self.step)

    @property
    def second(self) -> Ints:
        """The second number of each pair."""
        return Ints(self.base + ELEMENT_BYTES["int"], *self.extents, step=self.step)

    def with_next(self, index: Int32) -> tuple[Int32, Int32, Int32]:
        """Return a pair, and the first number of the next one."""
        at = self.at(index)
        return *ptx.ld_pair(at), ptx.ld_i32(at + self.step)


class Vectors(Elements):
    """16 bytes each, which are loaded and stored once."""

    ELEMENT = "vector"

    load, store = staticmethod(ptx.ld_v4), staticmethod(ptx.st_v4)


KINDS: dict[str, type[View]] = {kind.ELEMENT: kind for kind in (Words, Ints, Floats, Uint8s, Pairs, Vectors)}


def view_of(section: Section, base: Int64, nbytes: int = 0) -> Any:
    """Return the view of a section of a heap that lies at `base`. `nbytes`: size of a record, if not the section's."""
    if section.element == "record":
        return Records(base, nbytes or section.element_bytes, *section.shape[1:])
    return KINDS[section.element](base, *section.shape[1:])
