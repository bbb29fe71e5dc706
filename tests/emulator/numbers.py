"""Integers and floats of the DSL: fixed width, wrapping around, of the type that the DSL would give the result."""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from typing import Any

import numpy

_int = int.__new__


class Fixed(int):
    """An integer of so many bits. Comparisons are those of Python."""

    bits = width = 32
    signed = True
    ones, least, most = 2**32 - 1, -(2**31), 2**31 - 1

    def __init_subclass__(cls) -> None:
        cls.width = cls.bits
        cls.ones = 2**cls.bits - 1
        cls.most = cls.ones >> 1 if cls.signed else cls.ones
        cls.least = cls.most - cls.ones

    def __new__(cls, value: Any = 0) -> Fixed:
        number = int(value)
        if not cls.least <= number <= cls.most:
            number &= cls.ones
            if number > cls.most:
                number -= cls.ones + 1
        return _int(cls, number)

    def __neg__(self) -> Fixed:
        return type(self)(-int(self))

    def __invert__(self) -> Fixed:
        return type(self)(~int(self))


def result_type(left: Fixed, right: Any) -> type[Fixed]:
    """The wider type; of two that are equally wide, the unsigned one. Python's integers take the other's type."""
    one, other = type(left), type(right)
    if one is other or not issubclass(other, Fixed):
        return one
    if one.bits != other.bits:
        return one if one.bits > other.bits else other
    return other if one.signed else one


def _shifted(shift: Callable[[int, int], int]) -> Callable[[Fixed, Any], Fixed]:
    def run(left: Fixed, right: Any) -> Fixed:
        kind = result_type(left, right)
        assert 0 <= right < kind.bits, f"shift of {kind.__name__} by {int(right)}"
        return kind(shift(int(left), int(right)))

    return run


def _define(name: str) -> None:
    function = getattr(int, f"__{name}__")

    def forward(left: Fixed, right: Any) -> Any:
        kind, other = type(left), type(right)
        if other is not kind and other is not int:
            if not isinstance(right, int):
                return NotImplemented
            kind = result_type(left, right)
        return kind(function(left, right))

    def reflected(right: Fixed, left: Any) -> Any:
        if not isinstance(left, int):
            return NotImplemented
        return type(right)(function(left, right))

    setattr(Fixed, f"__{name}__", forward)
    setattr(Fixed, f"__r{name}__", reflected)


for _name in ("add", "sub", "mul", "floordiv", "mod", "xor", "and", "or"):
    _define(_name)
for _name in ("lshift", "rshift"):
    setattr(Fixed, f"__{_name}__", _shifted(getattr(operator, _name)))
    setattr(Fixed, f"__r{_name}__", lambda right, left, name=_name: getattr(type(right)(left), f"__{name}__")(right))


class Int8(Fixed):
    bits = 8


class Uint8(Fixed):
    bits = 8
    signed = False


class Uint16(Fixed):
    bits = 16
    signed = False


class Int32(Fixed):
    pass


class Uint32(Fixed):
    signed = False


class Int64(Fixed):
    bits = 64


class Uint64(Fixed):
    bits = 64
    signed = False


class Boolean(int):
    def __new__(cls, value: Any = False) -> Boolean:
        return int.__new__(cls, bool(value))


class Float32(numpy.float32):
    pass


def float_of(word: Any) -> Any:
    """The float whose bits a word holds."""
    return numpy.frombuffer(struct.pack("I", int(word) & 0xFFFFFFFF), numpy.float32)[0]


def word_of(value: Any) -> Uint32:
    """The bits of a float."""
    return Uint32(struct.unpack("I", numpy.float32(value).tobytes())[0])


def _chosen(choose: Callable[[int, int], int]) -> Callable[[Any, Any], Any]:
    def run(left: Any, right: Any) -> Any:
        kind = type(left) if isinstance(left, Fixed) else type(right)
        return kind(choose(int(left), int(right)))

    return run


smaller, larger = _chosen(min), _chosen(max)
