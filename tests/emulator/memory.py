"""Memory that rejects whatever lies outside of what was taken from it, and accesses that are not aligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from .numbers import Fixed, Int64

POISON = 0x5A5A5A5A
"""What words of outputs hold before anything is written."""
GAP = 64
"""Bytes behind everything that was taken, which nobody may touch."""


class GlobalMemory:
    """One address space for the tensors and heaps of all ranks. Address 0 and what follows it is nobody's."""

    def __init__(self, nbytes: int) -> None:
        nbytes = -(-nbytes // 256) * 256
        self.bytes = bytearray(nbytes)
        self.words = memoryview(self.bytes).cast("I")
        self.owned = bytearray(nbytes // 4)
        self.end = 256
        self.names: list[tuple[int, int, str]] = []

    def take(self, nbytes: int, name: str, fill: int = POISON) -> int:
        """The address of so many bytes, at a multiple of 256, whose words hold `fill`."""
        start, words = -(-self.end // 256) * 256, -(-nbytes // 4)
        self.end = start + 4 * words + GAP
        assert self.end <= len(self.bytes), "the emulator was given too little memory"
        self.owned[start // 4 : start // 4 + words] = b"\1" * words
        if fill:
            self.bytes[start : start + 4 * words] = fill.to_bytes(4, "little") * words
        self.names.append((start, start + 4 * words, name))
        return start

    def put(self, tensor: Tensor, name: str) -> int:
        """The address of a copy of a tensor of 32-bit elements."""
        address = self.take(max(4 * tensor.numel(), 16), name)
        self.tensor(address, tensor.shape, tensor.dtype)[:] = tensor
        return address

    def tensor(self, address: int, shape: Any, dtype: torch.dtype) -> Tensor:
        """A view of what lies at an address."""
        count = int(numpy.prod(shape))
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self.bytes, dtype=dtype, count=count, offset=address).view(tuple(shape))

    def index(self, address: Any, align: int, what: str) -> int:
        """Return the index of the word at an address, which may be accessed."""
        at = int(address)
        assert at % align == 0, f"{what} at {at}, which is no multiple of {align}"
        if at <= 0 or at // 4 >= len(self.owned) or not self.owned[at >> 2]:
            near = [name for start, end, name in self.names if start - 4096 <= at < end + 4096]
            raise IndexError(f"{what} at {at}, which nobody owns; near {near[:3]}")
        return at >> 2

    def load(self, address: Any, align: int = 4) -> int:
        return self.words[self.index(address, align, "load")]

    def store(self, address: Any, value: Any, align: int = 4) -> None:
        self.words[self.index(address, align, "store")] = int(value) & 0xFFFFFFFF

    def load_words(self, address: Any, count: int, align: int) -> list[int]:
        self.index(address, align, "load")
        return [self.load(address + 4 * i) for i in range(count)]

    def store_words(self, address: Any, values: Any, align: int) -> None:
        self.index(address, align, "store")
        for i, value in enumerate(values):
            self.store(address + 4 * i, value)

    def load_long(self, address: Any) -> Int64:
        low, high = self.load_words(address, 2, 8)
        return Int64(low | high << 32)

    def store_long(self, address: Any, value: Any) -> None:
        self.store_words(address, (int(value), int(value) >> 32), 8)


FORMATS = {"Int8": "b", "Uint8": "B", "Uint16": "H", "Int32": "i", "Uint32": "I", "Int64": "q", "Float32": "f"}


class SharedArray:
    """An array in the shared memory of a block, or a pointer into one. It holds random bytes at first."""

    layout = None
    pause: Callable[[], None]  # before an access (threads.py, which imports this)

    def __init__(self, kind: type, view: memoryview, first: int = 0, address: int = 0) -> None:
        self.kind, self.view, self.first = kind, view, first
        self.address = address  # of the array

    @staticmethod
    def new(kind: type, count: Any, draw: Any, address: int) -> SharedArray:
        code = FORMATS[kind.__name__]
        nbytes = int(count) * memoryview(b"").cast(code).itemsize
        return SharedArray(kind, memoryview(bytearray(draw.randbytes(nbytes))).cast(code), 0, address)

    def at(self, index: Any, count: int = 1) -> int:
        where = self.first + int(index)
        assert 0 <= where and where + count <= len(self.view), f"shared memory: {where} of {len(self.view)}"
        return where

    def __getitem__(self, index: Any) -> Any:
        SharedArray.pause()
        value = self.view[self.at(index)]
        return self.kind(value) if issubclass(self.kind, Fixed) else numpy.float32(value)

    def __setitem__(self, index: Any, value: Any) -> None:
        SharedArray.pause()
        self.view[self.at(index)] = self.kind(value) if issubclass(self.kind, Fixed) else float(value)

    def __add__(self, offset: Any) -> SharedArray:
        return SharedArray(self.kind, self.view, self.first + int(offset), self.address)

    def load(self) -> Any:
        return self[0]

    def store(self, value: Any) -> None:
        self[0] = value

    def raw(self, nbytes: int) -> memoryview:
        """The bytes from here on, for copies at multiples of 16."""
        start = self.first * self.view.itemsize
        assert start % 16 == 0 and nbytes % 16 == 0, "a bulk copy at no multiple of 16"
        assert 0 <= start and start + nbytes <= self.view.nbytes, "a bulk copy beyond its array in shared memory"
        return self.view.cast("B")[start : start + nbytes]

    @property
    def iterator(self) -> SharedArray:
        return self

    def toint(self) -> SharedArray:
        return self


class Registers(list):
    """An array in registers."""

    def __init__(self, kind: type, values: list[Any]) -> None:
        super().__init__(values)
        self.kind = kind

    def __getitem__(self, index: Any) -> Any:
        assert 0 <= index < len(self), f"register {int(index)} of {len(self)}"
        return list.__getitem__(self, int(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        assert 0 <= index < len(self), f"register {int(index)} of {len(self)}"
        list.__setitem__(self, int(index), self.kind(value) if issubclass(self.kind, Fixed) else value)
