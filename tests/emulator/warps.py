"""Matrix instructions of a warp, and asynchronous copies of 16 bytes: part of what kernels import as
`cute_kernels.ptx`."""

from __future__ import annotations

from typing import Any

import numpy

from . import machine
from .numbers import Uint32
from .threads import WARP, collective, me

LANES = range(WARP)


# ---------------------------------------------------------------------- copies


class Copy:
    """An asynchronous copy to shared memory. It is made at once or, drawn, as late as the thread's waits allow."""

    def __init__(self, to: memoryview, address: int, nbytes: int) -> None:
        self.to, self.address, self.nbytes, self.made = to, address, nbytes, False

    def make(self) -> None:
        if not self.made:
            words = machine.memory().load_words(self.address, self.nbytes // 4, 16) if self.nbytes else []
            self.to[:] = memoryview(numpy.array(words + [0] * (4 - len(words)), numpy.uint32))
            self.made = True


def cp_async(smem_ptr: Any, addr: Any) -> None:
    cp_async_some(smem_ptr, addr, 16)


def cp_async_some(smem_ptr: Any, addr: Any, nbytes: Any) -> None:
    copy = Copy(smem_ptr.raw(16).cast("I"), int(addr), int(nbytes))
    if machine.draw.random() < 0.5:
        copy.make()
    me().copies[-1].append(copy)


def cp_async_commit() -> None:
    me().copies.append([])


def cp_async_wait(most: int) -> None:
    groups = me().copies
    ended = max(len(groups) - 1 - most, 0)  # the last group is not committed
    for group in groups[:ended]:
        for copy in group:
            copy.make()
    del groups[:ended]


# ---------------------------------------------------------------------- matrices


def words_of(halves: Any) -> list[Uint32]:
    """Return pairs of 16-bit numbers [..., 2] as words."""
    return [Uint32(int(word)) for word in numpy.ascontiguousarray(halves, numpy.uint16).view(numpy.uint32).ravel()]


def halves_of(words: Any) -> Any:
    """Return words [...] as 16-bit numbers [..., 2]."""
    whole = numpy.array([[int(word) for word in row] for row in words], numpy.uint32)
    return whole.view(numpy.uint16).reshape(*whole.shape, 2)


@collective
def ldmatrix(lanes: list[tuple[Any, ...]]) -> list[Any]:
    rows = numpy.array([numpy.frombuffer(pointer.raw(16), numpy.uint16) for pointer, _ in lanes]).reshape(4, 8, 8)
    if lanes[0][1]:
        rows = rows.transpose(0, 2, 1)
    return [tuple(words_of(rows[:, i // 4, i % 4 * 2 : i % 4 * 2 + 2])) for i in LANES]


@collective
def movmatrix(lanes: list[tuple[Any, ...]]) -> list[Any]:
    whole = halves_of([lane[:1] for lane in lanes]).reshape(8, 8).T
    return words_of(whole.reshape(WARP, 2))


def floats_of(words: Any, dtype: str) -> Any:
    """Return the values of the numbers in words [...], in fp64."""
    halves = halves_of(words)
    if dtype == "fp16":
        return halves.view(numpy.float16).astype(numpy.float64)
    return (halves.astype(numpy.uint32) << 16).view(numpy.float32).astype(numpy.float64)


@collective
def mma(lanes: list[tuple[Any, ...]]) -> list[Any]:
    """m16n8k16: a lane has rows lane // 4 and that plus 8 of a, and column lane // 4 of b."""
    dtype = lanes[0][3]
    a, b, sums = numpy.empty((16, 16)), numpy.empty((16, 8)), numpy.empty((16, 8))
    of_a = floats_of([lane[1] for lane in lanes], dtype)
    of_b = floats_of([lane[2] for lane in lanes], dtype)
    for i in LANES:
        row, column = i // 4, i % 4 * 2
        for part in range(4):
            first = column + part // 2 * 8
            a[row + part % 2 * 8, first : first + 2] = of_a[i, part]
            sums[row + part // 2 * 8, i % 4 * 2 + part % 2] = lanes[i][0][part]
        for part in range(2):
            first = column + part * 8
            b[first : first + 2, row] = of_b[i, part]
    with numpy.errstate(invalid="ignore", over="ignore"):
        whole = (sums + a @ b).astype(numpy.float32)
    return [tuple(whole[i // 4 + part // 2 * 8, i % 4 * 2 + part % 2] for part in range(4)) for i in LANES]
