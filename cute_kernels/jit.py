"""Compile once: in memory by key, on disk by key and source, never while a CUDA graph is being captured."""

import hashlib
import os
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import load_module

_lock = threading.RLock()  # the DSL is not thread-safe
_loaded: dict[tuple, Callable] = {}
_modules: list = []  # loaded objects own the machine code: they live as long as the process


class CompileDuringCapture(RuntimeError):
    """A kernel was needed for the first time while a CUDA graph was being captured."""


def cache_dir() -> Path | None:
    """Folder of compiled kernels: EP_OPS_CACHE_DIR, by default ~/.cache/ep_ops; None when that variable is empty."""
    folder = os.environ.get("EP_OPS_CACHE_DIR", os.path.join(os.path.expanduser("~"), ".cache", "ep_ops"))
    return Path(folder) if folder else None


@lru_cache(maxsize=1)
def _sources() -> str:
    """Digest of all device code and of the compiler's version: what a cached object depends on besides its key."""
    digest = hashlib.sha256(cutlass.__version__.encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def compile_kernel(kernel, arch: str, *, keep_ptx: bool = False):
    """Compiles `kernel` for `arch` ("sm_90a", "sm_100a"); needs no GPU.

    `kernel.signature()` gives example arguments. With `keep_ptx` the result has `__ptx__` and `__cubin__`.
    """
    options = f"--enable-tvm-ffi --gpu-arch {arch}" + (" --keep-ptx --keep-cubin" if keep_ptx else "")
    with _lock:
        return cute.compile(kernel, *kernel.signature(), options=options)


def get(kernel, arch: str, capturing: Callable[[], bool]) -> Callable:
    """The compiled function of `kernel`: from memory, from disk, or compiled now.

    Kernels are frozen dataclasses, so equal configurations share one compilation. Raises CompileDuringCapture where
    `capturing()` says that a graph is being captured: compile (`Communicator.warmup()`) before.
    """
    key = (kernel, arch)
    found = _loaded.get(key)
    if found is not None:
        return found
    if capturing():
        raise CompileDuringCapture(
            f"{kernel} is not compiled yet and a CUDA graph is being captured. Call Communicator.warmup(), or run the "
            "same operators once, before the capture."
        )
    with _lock:
        if key not in _loaded:
            _loaded[key] = _load_or_compile(kernel, arch)
        return _loaded[key]


def _load_or_compile(kernel, arch: str) -> Callable:
    folder = cache_dir()
    name = f"{type(kernel).__name__}_" + hashlib.sha256(f"{kernel!r} {arch} {_sources()}".encode()).hexdigest()[:24]
    if folder is not None:
        path = folder / f"{name}.o"
        if path.exists():
            return _load(path, name)
    compiled = compile_kernel(kernel, arch)
    if folder is None:
        return compiled.__tvm_ffi_object__()
    folder.mkdir(parents=True, exist_ok=True)
    # Several processes compile the same kernel at once: each writes its own file, the rename is atomic.
    part = folder / f"{name}.{os.getpid()}.o"
    compiled.export_to_c(object_file_path=str(part), function_name=name)
    os.replace(part, path)
    return _load(path, name)


def _load(path: Path, name: str) -> Callable:
    module = load_module(str(path), enable_tvm_ffi=True)
    _modules.append(module)
    return getattr(module, name)
