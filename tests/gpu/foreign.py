"""A kernel of somebody else's: blocks that take shared memory, and keep it until the host says so.

No "from __future__ import annotations": the kernel's annotations are read as types.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, Uint8, const_expr
from cutlass.cute import arch
from operators import of_kernels

import ep_ops
from cute_kernels import ptx
from cute_kernels.launch import Kernel, RankArgs

LONGEST_NS = 30_000_000_000
"""Blocks end after so long whatever the host says."""


class SpinArgs(NamedTuple):
    ranks: RankArgs
    end: Int64  # address of the word that ends it
    blocks: Int32


@dataclass(frozen=True)
class Spin(Kernel):
    """`shared`: bytes of each block. `dependent`: launched ahead of its turn; its blocks then wait for the kernel in
    front, not for the host."""

    NAME, Args = "foreign_spin", SpinArgs

    shared: int
    dependent: bool

    @property
    def options(self) -> dict[str, Any]:
        return {"block": (32, 1, 1), "use_pdl": self.dependent}

    @cute.kernel
    def kernel(self, args: SpinArgs) -> None:
        taken = cutlass.memory.SmemAllocator().allocate_array(Uint8, self.shared)
        taken.store(Uint8(1))
        if const_expr(self.dependent):
            arch.griddepcontrol_wait()
        else:
            start = arch.globaltimer()
            while ptx.ld_acquire_sys(args.end) == 0 and arch.globaltimer() - start < LONGEST_NS:
                pass


class Foreign:
    """`with Foreign(comm) as foreign: foreign.take(blocks, shared)` on the current stream; they end with the block."""

    def __init__(self, comm: ep_ops.Communicator) -> None:
        self.launcher = of_kernels(comm)._launcher
        self.end = torch.zeros(1, dtype=torch.int64, pin_memory=True)

    def take(self, blocks: int, shared: int, dependent: bool = False) -> None:
        self.launcher.get(Spin, shared=shared, dependent=dependent)(0, blocks=blocks)(self.end)

    def __enter__(self) -> "Foreign":
        return self

    def __exit__(self, *_: Any) -> None:
        self.end.fill_(1)
        torch.cuda.synchronize()
