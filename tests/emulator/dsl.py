"""Puts the fakes in the places of the modules that kernels import. Only for a process of its own: what stands there
before must not have been imported."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

from . import arch, machine, network, numbers, ptx
from .memory import Registers, SharedArray
from .threads import me


class Allocator:
    """An allocator of shared memory: the n-th allocation of every thread of a block is the same array."""

    def __init__(self) -> None:
        me().allocated = 0

    def allocate_tensor(self, kind: type, count: Any, alignment: int = 16) -> SharedArray:
        """Its address is a multiple of `alignment`, and of nothing larger."""
        thread = me()
        arrays, index = thread.block.shared, thread.allocated
        if index == len(arrays):
            behind = arrays[-1].address + arrays[-1].view.nbytes if arrays else 0
            address = (-(-behind // alignment) | 1) * alignment
            arrays.append(SharedArray.new(kind, count, machine.draw, address))
        thread.allocated += 1
        return arrays[index]

    def allocate_array(self, kind: type, count: Any, byte_alignment: int = 16) -> SharedArray:
        return self.allocate_tensor(kind, count, byte_alignment)


class Constexpr:
    def __class_getitem__(cls, kind: Any) -> Any:
        return kind


def as_it_is(value: Any) -> Any:
    return value


def counted(*bounds: int) -> Iterator[numbers.Fixed]:
    """Return the values of the variable of a run-time loop."""
    return map(numbers.Int32, range(*bounds))


def registers(shape: tuple[int, ...], kind: Any) -> Registers:
    """They hold whatever they held before."""
    number = machine.draw.getrandbits(31)
    return Registers(kind, [kind(number)] * shape[0])


def _module(name: str, **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module
    return module


KINDS = ("Int8", "Uint8", "Uint16", "Int32", "Uint32", "Int64", "Uint64", "Boolean", "Float32")


def install() -> None:
    """From here on, `cute_kernels` is for the emulator. Makes its kernels' blocks small, too."""
    assert "cutlass" not in sys.modules and "cute_kernels" not in sys.modules
    sys.modules["cutlass.cute.arch"] = arch
    cute = _module(
        "cutlass.cute", jit=as_it_is, kernel=as_it_is, arch=arch, make_rmem_tensor=registers, make_layout=as_it_is,
        make_tensor=lambda iterator, layout: iterator, BitCode=as_it_is, extern=network.extern,
    )  # fmt: skip
    kinds = {name: getattr(numbers, name) for name in KINDS}
    _module(
        "cutlass", cute=cute, const_expr=as_it_is, range_constexpr=range, range=counted, Constexpr=Constexpr,
        min=numbers.smaller, max=numbers.larger, memory=types.SimpleNamespace(SmemAllocator=Allocator), **kinds,
    )  # fmt: skip
    _module("cutlass.cute.runtime", make_fake_stream=lambda: None, load_module=None)
    driver = _module("cuda.bindings.driver", CUstream=object)
    _module("cuda.bindings", driver=driver)
    _module("cuda")
    sys.modules["cute_kernels.ptx"] = ptx
    make_small()


TILES = 2
"""Into which every rank cuts its tokens here."""


def make_small() -> None:
    """Fewer warps than on a GPU, and less shared memory, so that rings and tables wrap around. Modules copy some of
    these numbers when they are imported, so each is set before that. Blocks that place the route keep their 32 warps,
    which the announcing of chunks takes for granted."""
    import cute_kernels
    import cute_kernels.heap as heap
    import cute_kernels.latency.sizes as latency

    cute_kernels.ptx = ptx
    heap.COUNTING_BYTES = 1 << 14
    heap.RING_BYTES = 6 * (128 + 200)
    heap.Problem.tiles = property(lambda problem: TILES)
    latency.WARPS = 4
    import cute_kernels.local.row_slices as row_slices

    row_slices.WARPS = 2
    import cute_kernels.local.expert_lists as expert_lists
    import cute_kernels.local.places_route as places_route
    import cute_kernels.throughput.combine as combine
    import cute_kernels.throughput.gather as gather
    import cute_kernels.throughput.pull_scaled as pull_scaled
    import cute_kernels.throughput.stage as stage

    combine.Combine.WARPS = pull_scaled.PullScaled.WARPS = gather.Gather.WARPS = 2
    expert_lists.WARPS = places_route.WARPS = 2
    stage.MOST_WARPS = 3
