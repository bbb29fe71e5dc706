"""Common code of all kernels' launches. The arguments of a kernel are written once, as a named tuple: what it is
compiled with, how the host passes them, and what the device functions see all follow from its annotations.

The host passes them flat, which costs no more than a call with as many integers; the compiled function puts the tuple
together again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from .barriers import traced_block
from .heap import Problem
from .views import View


class RankArgs(NamedTuple):
    """The first arguments of every operator's kernel."""

    peers: Int64  # address of a table of the addresses of all ranks' heaps, by rank
    own: Int64  # address of this rank's heap
    rank: Int32  # this one
    report: Int64  # address of the records that the host sees
    timeout_ns: Int64  # deadline of each wait
    terms: Int32  # of the operation (`marks.pack`)


@dataclass(frozen=True)
class Launched:
    """A kernel as it is compiled; the fields of subclasses say what for.

    The fields of `Args` are `ranks` (if the kernel is one of several ranks), then tensors, of which the host passes the
    addresses (0: none), then numbers (Int32). Tensors are views (views.py), or addresses (Int64) of rows that are moved
    as they are. One of the numbers is `blocks`, the size of the grid.
    """

    NAME: ClassVar[str]
    Args: ClassVar[Any]
    kernel: ClassVar[Any]  # the device code (`cute.kernel`); takes `Args`

    @property
    def name(self) -> str:
        """The beginning of its name in a profile, where the rest is cut short."""
        return self.NAME

    @property
    def options(self) -> dict[str, Any]:
        """Options of the launch: `block`, and others if needed."""
        raise NotImplementedError

    def on(self, arch: str) -> "Launched":
        """Return the kernel to compile for an architecture ("sm_90a", "sm_100a"): this one, or one that takes the same
        arguments and uses instructions which others do not have."""
        return self

    def signature(self) -> tuple[Any, ...]:
        """Return example values of the arguments of the compiled function."""
        return (*_examples(self.Args), make_fake_stream())

    @cute.jit
    def __call__(self, *values: Any) -> None:
        """Launch the kernel. `values`: the arguments in order, those of `RankArgs` first if there are any, and the
        stream."""
        stream: cuda.CUstream = values[-1]
        args = gather(self.Args, values[:-1])
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True)
        with traced_block(self.options["block"][0]):
            self.kernel(args).launch(grid=(args.blocks, 1, 1), stream=stream, **self.options)


@dataclass(frozen=True)
class Kernel(Launched):
    """A kernel of several ranks, compiled for a problem. Its arguments begin with `RankArgs`."""

    problem: Problem

    def __new__(cls, problem: Problem | None = None, *_: Any, **__: Any) -> "Kernel":
        """Create a kernel, of the subclass for several NVLink domains if the problem has several."""
        if problem is not None and problem.num_domains > 1:
            # By name, because the subclasses' files import this one.
            cls = import_module(".internode.kernels", __package__).ACROSS.get(cls, cls)
        return object.__new__(cls)

    @property
    def one_block(self) -> dict[str, Any]:
        """Launch options of a kernel of which one block on a multiprocessor will do. Without them the assembler may
        spill rather than take more than half of the registers, as it did with several NVLink domains and from 32 ranks
        on."""
        return {"min_blocks_per_mp": 1} if self.problem.domains or self.problem.world_size > 16 else {}

    @property
    def linked(self) -> str:
        """Path of the device library that its wire calls (linked.py); "": none."""
        return getattr(getattr(self, "wire", self.problem.wire), "library", "")


def names(args: type[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the fields of a kernel's arguments after `ranks`: those that are addresses of tensors, and the others."""
    kinds = args.__annotations__
    addresses = tuple(name for name in args._fields if is_address(kinds[name]))
    return addresses, tuple(name for name in args._fields[1:] if name not in addresses)


def gather(args: type[Any], values: Sequence[Any]) -> Any:
    """Return the named tuple of consecutive values."""
    kinds = list(args.__annotations__.values())
    if kinds[0] is not RankArgs:
        return args(*map(_given_as, kinds, values))
    first = len(RankArgs._fields)
    return args(RankArgs(*values[:first]), *map(_given_as, kinds[1:], values[first:]))


def is_address(kind: type[Any]) -> bool:
    """Return whether an argument of this kind is passed as the address of a tensor."""
    return kind is Int64 or issubclass(kind, View)


def _given_as(kind: type[Any], value: Any) -> Any:
    return kind(value) if issubclass(kind, View) else value


def _examples(args: type[Any]) -> Iterator[Any]:
    for kind in args.__annotations__.values():
        if kind is RankArgs:
            yield from _examples(RankArgs)
        else:
            yield Int64(0) if is_address(kind) else kind(0)
