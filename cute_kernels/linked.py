"""Kernels that are linked with a device library, such as NVSHMEM's, which keeps its state in every module that it is a
part of: the library's host side must be given each loaded module before its kernel is launched.

TVM FFI hides the CUDA library that it loads. So these kernels are compiled without it, and are called through the C
function that is made of them: it takes the addresses of the arguments' values, the stream's among them, and of the
place for its result.
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
    """Path of the device library that a kernel is linked with; "": it calls none."""
    return getattr(kernel, "linked", "")


@functools.lru_cache
def digest_of(library: str) -> str:
    """Of the file's bytes."""
    return hashlib.sha256(Path(library).read_bytes()).hexdigest()


def object_of(compiled: Any, name: str) -> bytes:
    """The object file of a compiled kernel, which is loaded by that name."""
    _host_calls()
    return bytes(compiled.dump_to_object(name))


@functools.lru_cache(maxsize=1)
def _host_calls() -> list[ctypes.CDLL]:
    """What compiled host code calls; the DSL looks for it in the process."""
    return [ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL) for path in find_runtime_libraries(enable_tvm_ffi=False)]


_registered: list[Any] = []
"""Compiled kernels that are registered with a library: it goes on writing to their modules, which are unloaded with
them, so they live as long as the process."""


class LinkedFunction:
    """Launches a loaded kernel: takes integers, the stream's handle last."""

    def __init__(self, compiled: Any, count: int, register: Callable[[int], None]) -> None:
        """`count`: of arguments. `register` is given the handle of the CUDA library, which is loaded here, for the
        device that is current."""
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
