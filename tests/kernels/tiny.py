"""A kernel that does nothing and is compiled at once; processes of a test import it without torch."""

# No "from __future__ import annotations": the kernel's annotations are read as types.

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream


@dataclass(frozen=True)
class Tiny:
    threads: int = 32

    def on(self, arch):
        return self

    def signature(self):
        return (Int32(0), make_fake_stream())

    @cute.jit
    def __call__(self, blocks: Int32, stream: cuda.CUstream):
        self.kernel().launch(grid=(blocks, 1, 1), block=(self.threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self):
        cute.arch.sync_threads()
