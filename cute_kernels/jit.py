"""Compilation of kernels. Each kernel is compiled once, kept in memory and on disk, and never compiled during the
capture of a CUDA graph.

On disk a compiled kernel is an object file followed by the SHA-256 digest of its bytes. A file with a wrong digest is
damaged, and its kernel is compiled again. Nothing is loaded from a folder that other users can write to. One thread of
one process compiles a kernel, and all others that need it wait.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import load_module

from .linked import LinkedFunction, digest_of, library_of, object_of

NO_EFFECT_ON_CODE = frozenset(
    f"CUTE_DSL_{name}"
    for name in (
        "CACHE_DIR", "DISABLE_FILE_CACHING", "DUMP_DIR", "ENABLE_OPTIMIZATION_WARNINGS", "FILTER_STACKTRACE",
        "JIT_CACHE_MAX_ELEMS", "JIT_TIME_PROFILING", "KEEP", "KEEP_CUBIN", "KEEP_IR", "KEEP_PTX", "KEEP_SASS",
        "LOG_LEVEL", "LOG_TO_CONSOLE", "LOG_TO_FILE", "NO_CACHE", "PRINT_AFTER_PREPROCESSOR", "PRINT_IR",
        "SHOW_STACKTRACE", "WARNINGS_IGNORE",
    )
)  # fmt: skip
"""Environment variables of the DSL that do not change the code of a kernel. SGLang sets those of the log in its
servers, which must find what `ep-ops compile` has compiled without them."""

LOCK_SECONDS = 120.0  # how long a process waits for another one's compilation before it compiles the kernel itself
LARGE_FRAME = 1 << 16  # in words: the chunk is the next power of two of bytes, so half of it is left
DIGEST_BYTES = hashlib.sha256().digest_size

_compiling = threading.RLock()  # the DSL compiles one kernel at a time; nothing else waits for this lock
_loading = threading.Lock()
_guard = threading.Lock()  # of the dictionary of locks
_locks: dict[Hashable, threading.Lock] = {}  # one for each kernel and arch
_loaded: dict[Hashable, Callable] = {}
_modules: list[Any] = []  # loaded objects own the machine code: they live as long as the process


class CompileDuringCapture(RuntimeError):
    """A kernel was needed for the first time while a CUDA graph was being captured."""


def compile_kernel(kernel: Any, arch: str, *, keep_ptx: bool = False) -> Any:
    """Compiles `kernel` for `arch` ("sm_90a", "sm_100a"); needs no GPU.

    `kernel.on(arch)` is what is compiled; `signature()` gives example arguments. With `keep_ptx` the result has
    `__ptx__` and `__cubin__`.
    """
    kernel = kernel.on(arch)
    ffi = "" if library_of(kernel) else "--enable-tvm-ffi "
    options = f"{ffi}--gpu-arch {arch}"
    # The DSL hands both over in files, whose names it cuts short: in a common folder kernels get each other's.
    with _compiling, tempfile.TemporaryDirectory() if keep_ptx else contextlib.nullcontext("") as folder:
        options += f" --keep-ptx --keep-cubin --dump-dir {folder}" if keep_ptx else ""
        return _above_large_frame(cute.compile, kernel, *kernel.signature(), options=options)


def _above_large_frame(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return what the function returns.

    CPython keeps frames in chunks of 16 KiB. A deep program crosses the end of one again and again, and each time
    memory is mapped and unmapped: 10 000 times for a kernel, which takes longer than anything else where the system is
    slow at this, as in a sandbox. All frames above a large one share its chunk.
    """
    return function(*args, **kwargs)


_above_large_frame.__code__ = _above_large_frame.__code__.replace(co_stacksize=LARGE_FRAME)


def get(
    kernel: Any, arch: str, capturing: Callable[[], bool], register: Callable[[int], None] | None = None
) -> Callable:
    """Return the compiled function of `kernel`: from memory, from disk, or compiled now. Kernels are frozen
    dataclasses, so equal configurations share one compilation. Raises CompileDuringCapture if `capturing()` is true:
    compile before the capture (`Communicator.warmup()`). `register`: needed for a kernel that is linked with a device
    library (linked.py)."""
    key = (kernel, arch)
    found = _loaded.get(key)
    if found is not None:
        return found
    if capturing():
        raise CompileDuringCapture(
            f"{kernel} is not compiled yet and a CUDA graph is being captured. Call Communicator.warmup(), or run the "
            "same operators once, before the capture."
        )
    library = library_of(kernel)
    if library and register is None:
        raise ValueError(f"{type(kernel).__name__} is linked with {library}, which needs its handle: pass `register`")
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _loaded:
            function = _load_or_compile(kernel, arch, partial(_load, tvm_ffi=not library))
            if register is not None and library:
                with _loading:
                    function = LinkedFunction(function, len(kernel.signature()), register)
            _loaded[key] = function
        return _loaded[key]


def prepare(kernel: Any, arch: str) -> None:
    """Compiles `kernel` into the folder, unless it is there. OSError if the folder cannot keep it."""
    folder = _private_dir()
    if folder is None:
        raise OSError("there is no folder for compiled kernels")
    path = folder / f"{object_name(kernel, arch)}.o"
    if (digest := _digest_in(path)) is None:
        _keep(path, kernel, arch, digest)


def keeps() -> bool:
    """Return whether compiled kernels are kept on disk. A folder that was filled when an image was built may be read
    only."""
    folder = _private_dir()
    return folder is not None and os.access(folder, os.W_OK | os.X_OK)


def prepared(kernel: Any, arch: str) -> bool:
    """Return whether the compiled kernel is on disk."""
    folder = _private_dir()
    return folder is not None and _digest_in(folder / f"{object_name(kernel, arch)}.o") is not None


# ---------------------------------------------------------------------- the folder


def named() -> str:
    """Return the folder of compiled kernels as it is named; "" if nothing is kept on disk."""
    return os.environ.get("EP_OPS_CACHE_DIR", os.path.join("~", ".cache", "ep_ops"))


def cache_dir() -> Path | None:
    """Return the folder of compiled kernels: EP_OPS_CACHE_DIR, by default ~/.cache/ep_ops; None if the variable is
    empty. OSError if it is in the home of a user who has none."""
    folder = os.path.expanduser(named())
    if folder.startswith("~"):
        raise FileNotFoundError(f"{folder}: HOME is not set, and the system knows no home of this user")
    return Path(folder) if folder else None


def rejection(folder: Path) -> str | None:
    """Return why nothing is loaded from `folder`, or None. Its files are executed, so nobody but this user and root may
    write there. A folder of root is read only, such as one that was filled when an image was built."""
    folder = Path(os.path.realpath(folder))
    try:
        facts = folder.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error)
    if facts.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {facts.st_uid}, and this process is of user {os.geteuid()}"
    if facts.st_mode & 0o022:
        return f"other users can write into it (mode {facts.st_mode & 0o777:o}; chmod 700 helps)"
    for parent in folder.parents:  # who can write there can put another folder in its place
        facts = parent.stat()
        if facts.st_uid not in (0, os.geteuid()):
            return f"{parent} belongs to user {facts.st_uid}, and this process is of user {os.geteuid()}"
        if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
            return f"other users can write into {parent} (mode {facts.st_mode & 0o777:o}; chmod go-w helps)"
    return None


def _private_dir() -> Path | None:
    """Return `cache_dir()` without symbolic links, created if necessary; None, with a warning, if it cannot be used.

    Links are resolved once, so what is checked is what is used, whatever a link names afterwards."""
    try:
        found = cache_dir()
        if found is None:
            return None
        folder = Path(os.path.realpath(found))
        for made in (*reversed(folder.parents), folder):
            if not made.is_dir():
                made.mkdir(mode=0o700, exist_ok=True)
        why = rejection(folder)
    except OSError as error:
        why = str(error)
    if why is None:
        return folder
    _warn(
        f"{named()} is not used, so every process compiles all kernels: {why}. EP_OPS_CACHE_DIR names another folder."
    )
    return None


def _warn(text: str) -> None:
    warnings.warn(f"cache of compiled kernels: {text}", RuntimeWarning, stacklevel=2)


# ---------------------------------------------------------------------- what a file is of


def object_name(kernel: Any, arch: str) -> str:
    """Return the name of the file and of its function, which contains a digest of everything that the machine code
    depends on."""
    kernel = kernel.on(arch)
    kind = type(kernel)
    library = library_of(kernel)
    linked = digest_of(library) if library else ""
    whole = f"{kind.__module__}.{kind.__qualname__} {kernel!r} {arch} {versions()} {_sources()} {linked}"
    return f"{kind.__name__}_{hashlib.sha256(whole.encode()).hexdigest()[:24]}"


def versions() -> dict[str, str]:
    """Return what determines the result of a compilation, besides our sources.

    The driver is not part of it. A file contains machine code for one architecture, which a driver loads as it is, or
    rejects if the driver is older than the CUDA toolkit that produced it. The toolkit is part of the result.
    """

    def installed(distribution: str) -> str:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    return {
        "machine": platform.machine(),  # of the host code; a home may be shared by hosts of several kinds
        "cpu": _cpu_features(),
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "cutlass": cutlass.__version__,
        "cuda": f"{cutlass.CUDA_VERSION.major}.{cutlass.CUDA_VERSION.minor}",  # of the compiler inside the DSL
        "cuda-bindings": installed("cuda-bindings"),
        "tvm-ffi": installed("apache-tvm-ffi"),
        **{  # options of the DSL
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("CUTE_DSL_") and name not in NO_EFFECT_ON_CODE
        },
    }


@lru_cache(maxsize=1)
def _cpu_features() -> str:
    """Return the CPU's instruction set extensions. The DSL compiles the host code for the CPU that it runs on, so
    another CPU may not have the instructions."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            name, _, features = line.partition(":")
            if name.strip() in ("flags", "Features"):  # x86, Arm
                return " ".join(sorted(features.split()))
    return platform.processor()


@lru_cache(maxsize=1)
def _sources() -> str:
    """Return a digest of all device code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------- files


def _load_or_compile(kernel: Any, arch: str, load: Callable[[Path], Any]) -> Any:
    """Return the result of `load` for the file, which is compiled if it is missing, damaged, or cannot be loaded."""
    name = object_name(kernel, arch)
    folder = _private_dir()
    if folder is not None:
        path = folder / f"{name}.o"
        try:
            digest = _digest_in(path)
            if digest is not None:
                try:
                    return load(path)
                except Exception as error:  # its type depends on what is wrong with the file
                    _warn(f"{path} cannot be loaded, so {kernel} is compiled again: {error}")
            _keep(path, kernel, arch, digest)
            return load(path)
        except OSError as error:
            _warn(f"{kernel} cannot be kept in {folder}, so every process compiles it: {error}")
    try:
        with tempfile.TemporaryDirectory(prefix="ep_ops_") as apart:
            path = Path(apart) / f"{name}.o"
            _compile_to(path, kernel, arch)
            return load(path)
    except OSError as error:
        where = f" in {tempfile.tempdir}" if tempfile.tempdir else ""
        raise OSError(
            error.errno, f"{kernel} cannot be compiled{where}: {error.strerror or error}; TMPDIR names another folder"
        ) from error


def _keep(path: Path, kernel: Any, arch: str, digest: bytes | None) -> None:
    """Compile `kernel` to `path`, unless another process does it meanwhile: then the file has another digest."""
    with _alone(path.with_suffix(".lock")) as alone:
        for part in path.parent.glob(f"{path.stem}.*.o") if alone else ():  # of processes that were killed
            part.unlink()
        if _digest_in(path) == digest:
            _compile_to(path, kernel, arch)


def _compile_to(path: Path, kernel: Any, arch: str) -> None:
    """Writes object file and digest, under another name first: `path` is never half written."""
    descriptor, part = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".o", dir=path.parent)
    os.close(descriptor)
    try:
        with _compiling:
            compiled = compile_kernel(kernel, arch)
            if library_of(kernel):
                Path(part).write_bytes(object_of(compiled, path.stem))
            else:
                compiled.export_to_c(object_file_path=part, function_name=path.stem)
        with open(part, "r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _digest_in(path: Path) -> bytes | None:
    """Return the digest at the end of `path`; None if the file is missing or damaged. (ELF loaders ignore these
    bytes.)"""
    try:
        held = path.read_bytes()
    except OSError:
        return None
    code, digest = held[:-DIGEST_BYTES], held[-DIGEST_BYTES:]
    return digest if code and hashlib.sha256(code).digest() == digest else None


def _load(path: Path, *, tvm_ffi: bool) -> Callable:
    """Load the function in the file, which is not needed afterwards."""
    with _loading:
        module = load_module(str(path), enable_tvm_ffi=tvm_ffi)
        function = getattr(module, path.stem)
        _modules.append(module)
        return function


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Hold the lock of the file `path`, which the system releases if the process dies; yield whether it is held.
    Continue without it after LOCK_SECONDS, or if the file system has no locks: a kernel is then compiled twice, which
    only costs time, because files are replaced atomically."""
    try:
        # Private: whoever can open the file can hold its lock.
        file = open(path, "wb", opener=partial(os.open, mode=0o600))
    except OSError:
        yield False
        return
    with file:
        held = False
        end = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        try:
            yield held
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough where a forked child holds the file too
