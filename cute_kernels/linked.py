"""Kernels that are linked with a device library, such as NVSHMEM's. The library keeps state in every module that it is
part of, so its host side must be given each loaded module before the kernel is launched.

TVM FFI hides the CUDA library that it loads. These kernels are therefore compiled without it and called through the C
function that the compiler generates. It takes the addresses of the arguments' values, including the stream, and of its
result.
"""

import ctypes
import functools
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda.bindings import runtime
from cutlass.cute.runtime import find_runtime_libraries


def library_of(kernel: Any) -> str:
    """Return the path of the device library that a kernel is linked with, or ""."""
    return getattr(kernel, "linked", "")


@functools.lru_cache
def digest_of(library: str) -> str:
    """Return a digest of the file's contents."""
    return hashlib.sha256(Path(library).read_bytes()).hexdigest()


def object_of(compiled: Any, name: str) -> bytes:
    """Return the object file of a compiled kernel, which is loaded by that name."""
    _host_calls()
    return bytes(compiled.dump_to_object(name))


@functools.lru_cache(maxsize=1)
def _host_calls() -> list[ctypes.CDLL]:
    """Load the libraries that compiled host code calls; the DSL looks for them in the process."""
    return [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in find_runtime_libraries(enable_tvm_ffi=False)]


_registered: list[Any] = []
"""Compiled kernels whose modules are registered with a device library. The library writes to the modules as long as the
process lives, so they are never unloaded."""


class LinkedFunction:
    """A loaded kernel. Calling it launches it; it takes integers, the stream's handle last."""

    def __init__(self, compiled: Any, count: int, register: Callable[[int], None]) -> None:
        """Load the kernel on the current device.

        `count` is the number of arguments. `register` is called with the handle of the CUDA library.
        """
        _registered.append(compiled)
        register(int(compiled.library))
        self._call = compiled.capi_func
        self._lock = threading.Lock()
        # 8 bytes for each value: where 4 are read these are the lower ones.
        self._values = (ctypes.c_int64 * count)()
        self._error = ctypes.c_int32()
        first = ctypes.addressof(self._values)
        places = [*range(first, first + 8 * count, 8), ctypes.addressof(self._error)]
        self._places = (ctypes.c_void_p * len(places))(*places)

    def __call__(self, *values: int) -> None:
        with self._lock:
            self._values[:] = values  # type: ignore[call-overload]
            self._call(self._places)
            error = self._error.value
        if error:
            raise RuntimeError(f"a kernel could not be launched: {runtime.cudaError_t(error).name}")
