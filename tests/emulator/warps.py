"""Matrix instructions of a warp, and asynchronous copies of 16 bytes: part of what kernels import as
`cute_kernels.ptx`."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from . import machine
from .numbers import Int32, Uint32
from .threads import WARP, collective, me

LANES = range(WARP)


def shared_address(pointer: Any) -> Int32:
    """The address of a place in shared memory."""
    return Int32(pointer.address + pointer.first * pointer.view.itemsize)


# ---------------------------------------------------------------------- copies


class Copy:
    """An asynchronous copy to shared memory. It is made at once or, drawn, as late as the thread's waits allow."""

    def __init__(self, to: Any, address: int, nbytes: int) -> None:
        self.to, self.address, self.nbytes, self.made = to.raw(16).cast("I"), address, nbytes, False
        self.thread, self.chunk = me(), shared_address(to) // 16

    def make(self) -> None:
        if not self.made:
            words = machine.memory().load_words(self.address, self.nbytes // 4, 16) if self.nbytes else []
            self.to[:] = memoryview(numpy.array(words + [0] * (4 - len(words)), numpy.uint32))
            self.made = True
            self.thread.block.unfenced[self.chunk] = self.thread


def cp_async(smem_ptr: Any, addr: Any) -> None:
    cp_async_some(smem_ptr, addr, 16)


def cp_async_some(smem_ptr: Any, addr: Any, nbytes: Any) -> None:
    copy = Copy(smem_ptr, int(addr), int(nbytes))
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


# ---------------------------------------------------------------------- matrices in shared memory

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
"""The value of each code."""
LINE, SWIZZLED = 128, 1
"""Bytes of a line of a swizzled matrix, and what its descriptor says about it."""


def fence_async_shared() -> None:
    """Copies that the thread has waited for may be read by matrix instructions."""
    block = me().block
    for chunk in [chunk for chunk, writer in block.unfenced.items() if writer is me()]:
        del block.unfenced[chunk]


def lines_at(block: Any, described: int, first: int, count: int) -> Any:
    """Return lines of 32 bytes that a descriptor of a matrix with K as the inner dimension names."""
    start, groups = (described & 0x3FFF) << 4, (described >> 32 & 0x3FFF) << 4
    known = described >> 62 & 3 == SWIZZLED and described >> 49 & 7 == start >> 7 & 7
    assert known, f"descriptor {described:x}, which is not swizzled or says the wrong offset of its first line"
    found = numpy.empty((count, 2, 16), numpy.uint8)
    for i in range(count):
        row = first + i
        for half in range(2):
            at = start + row // 8 * groups + row % 8 * LINE + 16 * half
            at ^= (at >> 7 & 7) << 4
            array = next(a for a in block.shared if a.address <= at < a.address + a.view.nbytes)
            assert at // 16 not in block.unfenced, f"wgmma reads {at} in shared memory, which no fence orders before it"
            found[i, half] = memoryview(array.view).cast("B")[at - array.address :][:16]
    return found.reshape(count, 32)


class Product:
    """A warp's part of a product of four warps. It reads its operands at once or, drawn, as late as the waits of the
    warp allow."""

    def __init__(self, block: Any, warp: int, a: int, b: int, rows: int) -> None:
        self.block, self.warp, self.a, self.b, self.rows, self.sums = block, warp, a, b, rows, None
        if machine.draw.random() < 0.5:
            self.make()

    def make(self) -> None:
        if self.sums is None:
            self.sums = numpy.zeros((16, self.rows), numpy.float32)
            for k in range(4):
                a = E4M3[lines_at(self.block, self.a + 2 * k, self.warp % 4 * 16, 16)]
                b = E4M3[lines_at(self.block, self.b + 2 * k, 0, self.rows)]
                with numpy.errstate(invalid="ignore"):
                    self.sums = (self.sums + a @ b.T).astype(numpy.float32)

    def of_lane(self, lane: int) -> list[Any]:
        """Its sums in the layout of `mma` for each 8 columns."""
        return [
            self.sums[lane // 4 + part // 2 * 8, group * 8 + lane % 4 * 2 + part % 2]
            for group in range(self.rows // 8)
            for part in range(4)
        ]


class InFlight:
    """A register that a product writes some time before its wait ends: it is no number."""

    def __init__(self, product: Product) -> None:
        self.product = product


@collective
def started(lanes: list[tuple[Any, ...]]) -> list[Any]:
    assert len({lane[:3] for lane in lanes}) == 1, "lanes name different matrices"
    a, b, rows, block, thread = lanes[0]
    return [Product(block, thread // WARP, int(a), int(b), rows)] * WARP


def wgmma_e4m3(a: Any, b: Any, rows: int) -> list[InFlight]:
    thread = me()
    thread.started += 1
    given = thread.block.started.setdefault((thread.index // (4 * WARP), thread.started), (a, b, rows))
    assert given == (a, b, rows), "four warps name different matrices"
    product = started(a, b, rows, thread.block, thread.index)
    thread.products.append(product)
    return [InFlight(product)] * (rows // 2)


def wgmma_wait(most: int, sums: list[InFlight]) -> list[Any]:
    products = me().products
    ended = max(len(products) - most, 0)
    for product in products[:ended]:
        product.make()
    del products[:ended]
    product = sums[0].product
    assert product not in products, "sums that may not be there yet"
    return product.of_lane(me().index % WARP)
