"""Compiled kernels are kept once, in memory and on disk, and what is damaged or not private is not loaded."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.metadata
import io
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import cutlass
from tiny import Tiny

from cute_kernels import jit
from cute_kernels.launch import Launched
from ep_ops.commands import doctor

PATHS = os.pathsep.join([str(Path(jit.__file__).parents[1]), str(Path(__file__).parent)])
ARCH = "sm_90a"
SMALL, OTHER = Tiny(), Tiny(64)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Return the state of a new process with an empty cache."""
    monkeypatch.setenv("EP_OPS_CACHE_DIR", str(tmp_path / "cache"))
    forget(monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kernels, in the order in which they are compiled."""
    kernels: list[Any] = []
    compile_kernel = jit.compile_kernel

    def counted(kernel: Any, arch: str) -> Any:
        kernels.append(kernel)
        return compile_kernel(kernel, arch)

    monkeypatch.setattr(jit, "compile_kernel", counted)
    return kernels


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the kernels in memory."""
    monkeypatch.setattr(jit, "_loaded", {})
    monkeypatch.setattr(jit, "_locks", {})


def get(kernel: Any = SMALL) -> Callable:
    return jit.get(kernel, ARCH, lambda: False)


def objects(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def fill(folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any]) -> Path:
    """The file of SMALL, on disk and not in memory."""
    get()
    forget(monkeypatch)
    compiled.clear()
    return folder / f"{jit.object_name(SMALL, ARCH)}.o"


# ---------------------------------------------------------------------- memory, disk, compiler


def test_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any]) -> None:
    """A kernel comes from memory the second time, from disk in a new process, and is never compiled during a
    capture."""
    with pytest.raises(jit.CompileDuringCapture, match="warmup"):
        jit.get(SMALL, ARCH, lambda: True)
    first = get()
    assert callable(first)
    assert jit.get(Tiny(), ARCH, lambda: True) is first
    assert objects(folder) == [f"{jit.object_name(SMALL, ARCH)}.o"]
    forget(monkeypatch)
    again = get()
    assert callable(again) and again is not first
    assert compiled == [SMALL]


def test_without_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: list[Any]) -> None:
    monkeypatch.setenv("EP_OPS_CACHE_DIR", "")
    assert callable(get()) and get() is get()
    assert compiled == [SMALL] and list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- what a file is of


def test_versions() -> None:
    """Versions equal what the packages say of themselves."""
    versions = jit.versions()
    assert versions["python"] == ".".join(map(str, sys.version_info[:2])) and versions["machine"] == os.uname().machine
    assert versions["cutlass"] == importlib.metadata.version("nvidia-cutlass-dsl") == cutlass.__version__
    assert versions["tvm-ffi"] == importlib.metadata.version("apache-tvm-ffi")
    assert versions["cuda-bindings"] == importlib.metadata.version("cuda-bindings")
    flavours = [name for name in ("cu12", "cu13") if installed(f"nvidia-cutlass-dsl-libs-{name}")]
    assert f"cu{versions['cuda'].split('.')[0]}" in flavours


def installed(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


def test_every_version_and_the_sources_have_a_part_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = jit.versions()
    names = [jit.object_name(SMALL, ARCH), jit.object_name(SMALL, "sm_100a"), jit.object_name(OTHER, ARCH)]
    for what in versions:
        monkeypatch.setattr(jit, "versions", lambda what=what: versions | {what: "99.9"})
        names.append(jit.object_name(SMALL, ARCH))
    monkeypatch.setattr(jit, "versions", lambda: versions)
    assert jit.object_name(SMALL, ARCH) == names[0]
    monkeypatch.undo()
    monkeypatch.setenv("CUTE_DSL_COMPILER_OPT", "-lineinfo")
    names.append(jit.object_name(SMALL, ARCH))
    monkeypatch.setattr(jit, "_sources", lambda: "changed")
    names.append(jit.object_name(SMALL, ARCH))
    assert len(set(names)) == len(names) == 5 + len(versions)


def test_a_cpu_with_other_instructions_has_files_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host code is compiled for the CPU, whatever the order in which the system lists its features."""
    lines = (
        "processor : 0\nflags : sse2 avx512f\n",
        "processor : 0\nflags : avx512f sse2\n",
        "flags : sse2\n",
        "Features : fp\n",
    )
    names = []
    for text in lines:
        monkeypatch.setattr(jit, "open", lambda path, text=text: io.StringIO(text), raising=False)
        jit._cpu_features.cache_clear()
        names.append(jit.object_name(SMALL, ARCH))
    monkeypatch.undo()
    jit._cpu_features.cache_clear()
    assert names[0] == names[1] and len(set(names)) == 3
    assert jit._cpu_features(), "this CPU has features"


def test_the_dsl_s_options_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of SGLang sets the two of the log, and must find the kernels that were compiled without them. Of other
    variables, the DSL's own table says whether its code depends on them."""
    name = jit.object_name(SMALL, ARCH)
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "30")
    monkeypatch.setenv("CUTE_DSL_LOG_TO_CONSOLE", "1")
    assert jit.object_name(SMALL, ARCH) == name
    options = importlib.import_module("cutlass.base_dsl.env_manager").EnvironmentVarManager._ENV_VAR_SPEC
    affects = {f"CUTE_DSL_{one.source}": one.affects_compile for one in options if isinstance(one.source, str)}
    assert len(affects) > 20 and not affects["CUTE_DSL_LOG_LEVEL"]
    tokens = {f"CUTE_DSL_{keep}": False for keep in ("KEEP", "KEEP_CUBIN", "KEEP_IR", "KEEP_PTX", "KEEP_SASS")}
    for variable, changes_code in {**affects, **tokens}.items():
        monkeypatch.setenv(variable, "12")
        assert (jit.object_name(SMALL, ARCH) != name) == changes_code, variable
        monkeypatch.delenv(variable)


def test_kernels_of_one_name_in_two_modules_are_two() -> None:
    def kernel(module: str) -> Any:
        @dataclass(frozen=True)
        class Combine(Launched):
            rows: int

        Combine.__module__, Combine.__qualname__ = module, "Combine"
        return Combine(1)

    first, second = kernel("cute_kernels.throughput.combine"), kernel("cute_kernels.latency.combine")
    assert repr(first) == repr(second).replace("latency", "throughput")
    assert jit.object_name(first, ARCH) != jit.object_name(second, ARCH)


# ---------------------------------------------------------------------- damage

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "nothing but a digest": lambda whole: hashlib.sha256(b"").digest(),
    "first half": lambda whole: whole[: len(whole) // 2],
    "last byte lost": lambda whole: whole[:-1],
    "no digest": lambda whole: whole[: -jit.DIGEST_BYTES],
    "one bit in the middle": lambda whole: whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
    "one bit of the digest": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "a byte more": lambda whole: whole + b"\0",
    "zeros": lambda whole: bytes(len(whole)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_compiled_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any], damage: Callable[[bytes], bytes]
) -> None:
    path = fill(folder, monkeypatch, compiled)
    whole = path.read_bytes()
    assert damage(whole) != whole
    path.write_bytes(damage(whole))
    assert callable(get()) and compiled == [SMALL]
    assert len(path.read_bytes()) == len(whole) and objects(folder) == [path.name]
    forget(monkeypatch)
    assert callable(get()) and compiled == [SMALL]


@pytest.mark.parametrize("kind", ["no object file", "the object file of another kernel"])
def test_a_file_that_cannot_be_loaded_is_compiled_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any], kind: str
) -> None:
    """A file with a right digest is replaced by one process, and another that found the same file loads the new one."""
    path = fill(folder, monkeypatch, compiled)
    if kind == "no object file":
        code = b"no object file" * 100
        bad = code + hashlib.sha256(code).digest()
    else:
        get(OTHER)
        bad = (folder / f"{jit.object_name(OTHER, ARCH)}.o").read_bytes()
        forget(monkeypatch)
        compiled.clear()
    good = path.read_bytes()
    path.write_bytes(bad)
    with pytest.warns(RuntimeWarning, match=rf"{path} cannot be loaded, so Tiny\(threads=32\) is compiled again"):
        assert callable(get())
    assert compiled == [SMALL] and path.read_bytes() != bad
    forget(monkeypatch)
    assert callable(get()) and compiled == [SMALL]

    path.write_bytes(bad)
    load, path_is_replaced = jit._load, []

    def replaced_meanwhile(given: Path, **options: Any) -> Any:
        try:
            return load(given, **options)
        finally:
            path_is_replaced.append(path.write_bytes(good))

    monkeypatch.setattr(jit, "_load", replaced_meanwhile)
    forget(monkeypatch)
    with pytest.warns(RuntimeWarning, match="cannot be loaded"):
        assert callable(get())
    assert compiled == [SMALL] and len(path_is_replaced) == 2


def test_a_new_file_that_cannot_be_loaded_raises(monkeypatch: pytest.MonkeyPatch, compiled: list[Any]) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("cannot load")

    monkeypatch.setattr(jit, "load_module", broken)
    with pytest.raises(RuntimeError, match="cannot load"):
        get()
    assert compiled == [SMALL]


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any]) -> None:
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda part, path: full() if folder in path.parents else replace(part, path))
    with pytest.warns(RuntimeWarning, match=rf"Tiny\(threads=32\) cannot be kept in {folder}, .*No space left"):
        assert callable(get())
    assert compiled == [SMALL, SMALL] and objects(folder) == []


def test_two_full_disks(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder for temporary files is full too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "replace", full)
    with (
        pytest.warns(RuntimeWarning, match=rf"cannot be kept in {folder}"),
        pytest.raises(OSError, match=rf"Tiny\(threads=32\) cannot be compiled in {tmp_path}: No space left") as error,
    ):
        get()
    assert error.value.errno == errno.ENOSPC and [path.name for path in tmp_path.iterdir()] == ["cache"]


# ---------------------------------------------------------------------- whose folder


def test_the_folder_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nested = tmp_path / "home" / "cache"
    monkeypatch.setenv("EP_OPS_CACHE_DIR", str(nested))
    mask = os.umask(0)
    try:
        get()
    finally:
        os.umask(mask)
    assert nested.stat().st_mode & 0o777 == 0o700 and jit.rejection(nested) is None


def test_a_folder_that_others_can_replace(tmp_path: Path) -> None:
    """Who can write into a folder above it can put another one in its place, unless that is as /tmp is."""
    folder = tmp_path / "shared" / "own"
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    for mode, said in ((0o755, None), (0o1777, None), (0o777, "shared"), (0o775, "shared")):
        folder.parent.chmod(mode)
        why = jit.rejection(folder)
        assert (
            why is None if said is None else f"other users can write into {folder.parent} (mode {mode:o};" in str(why)
        )
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert "can write into" in str(jit.rejection(link)), "what a link names counts"


def test_links_are_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any]) -> None:
    """A link that names another folder after the check does not change which folder is used."""
    checked, other, link = tmp_path / "checked", tmp_path / "other", tmp_path / "link"
    other.mkdir(mode=0o777)
    link.symlink_to(checked)
    monkeypatch.setenv("EP_OPS_CACHE_DIR", str(link))
    rejection = jit.rejection

    def replaced_behind_the_check(folder: Path) -> str | None:
        why = rejection(folder)
        link.unlink()
        link.symlink_to(other)
        return why

    monkeypatch.setattr(jit, "rejection", replaced_behind_the_check)
    assert callable(get()) and compiled == [SMALL]
    assert objects(checked) == [f"{jit.object_name(SMALL, ARCH)}.o"] and objects(other) == []


def test_a_loop_of_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any]) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    monkeypatch.setenv("EP_OPS_CACHE_DIR", str(loop))
    with pytest.warns(RuntimeWarning, match=f"{loop} is not used"):
        assert callable(get())
    assert compiled == [SMALL]


def load_only_from_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_module = jit.load_module

    def checked(path: str, **options: Any) -> Any:
        assert folder not in Path(path).parents
        return load_module(path, **options)

    monkeypatch.setattr(jit, "load_module", checked)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_nothing_is_loaded_from_a_folder_that_others_can_write_into(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any], mode: int
) -> None:
    fill(folder, monkeypatch, compiled)
    load_only_from_elsewhere(folder, monkeypatch)
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match=rf"{folder} is not used.*others? users? can write.*mode {mode & 0o777:o}"):
        assert callable(get())
    assert compiled == [SMALL] and len(objects(folder)) == 1
    assert "(not used: other users can write" in "\n".join(doctor.caches())


def test_nothing_is_loaded_from_another_users_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any]
) -> None:
    fill(folder, monkeypatch, compiled)
    me = os.geteuid()
    if me == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    load_only_from_elsewhere(folder, monkeypatch)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        assert callable(get())
    assert compiled == [SMALL]


def test_others_may_read(folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any]) -> None:
    fill(folder, monkeypatch, compiled)
    folder.chmod(0o755)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert callable(get())
    assert compiled == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a folder of root")
def test_a_folder_of_root_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any]) -> None:
    """Read the cache of an image, which root has filled, as another user."""
    fill(folder, monkeypatch, compiled)
    folder.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert callable(get())
    assert compiled == []
    folder.chmod(0o775)
    assert "other users can write into it" in str(jit.rejection(folder))


def test_the_home_of_a_user_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("EP_OPS_CACHE_DIR", "~/kernels")
    assert jit.cache_dir() == tmp_path / "kernels"


def test_locks_are_private(folder: Path) -> None:
    mask = os.umask(0)
    try:
        get()
    finally:
        os.umask(mask)
    (lock,) = folder.glob("*.lock")
    assert lock.stat().st_mode & 0o777 == 0o600, "whoever opens it could hold it"


def test_a_folder_that_cannot_be_made(folder: Path, compiled: list[Any]) -> None:
    folder.write_text("a file")
    with pytest.warns(RuntimeWarning, match="is not used, so every process compiles all kernels: .*File exists"):
        assert callable(get())
    assert compiled == [SMALL]


# ---------------------------------------------------------------------- threads


class Thread(threading.Thread):
    """Ends with a result."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call, self.result = call, None
        self.start()

    def run(self) -> None:
        self.result = self.call()

    def value(self) -> Any:
        self.join(250)
        assert not self.is_alive()
        return self.result


def test_threads_that_want_one_kernel_share_a_compilation(compiled: list[Any]) -> None:
    functions = [thread.value() for thread in [Thread(get) for _ in range(4)]]
    assert compiled == [SMALL] and len(set(map(id, functions))) == 1


def test_nobody_waits_for_the_compilation_of_another_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any]
) -> None:
    """A hit in memory and a load from disk do not wait for the compilation of another kernel; another compilation
    does."""
    fill(folder, monkeypatch, compiled)
    begun, go_on = threading.Event(), threading.Event()
    compile_kernel = jit.compile_kernel

    def slow(kernel: Any, arch: str) -> Any:
        begun.set()
        assert go_on.wait(250)
        return compile_kernel(kernel, arch)

    monkeypatch.setattr(jit, "compile_kernel", slow)
    compilation = Thread(lambda: get(OTHER))
    assert begun.wait(250)
    begun.clear()
    from_disk = Thread(get)
    loaded = from_disk.value()
    assert callable(loaded) and Thread(get).value() is loaded
    third = Thread(lambda: get(Tiny(96)))
    assert not begun.wait(0.3) and compilation.is_alive()
    go_on.set()
    assert callable(compilation.value()) and callable(third.value())
    assert compiled == [OTHER, Tiny(96)]


# ---------------------------------------------------------------------- processes

COMPILES = """
import os, sys, time
import cutlass.cutlass_dsl.tvm_ffi_provider  # seconds, which the first compilation would take
from cute_kernels import jit
from tiny import Tiny

compile_kernel = jit.compile_kernel

def slow(kernel, arch):
    print("compiles", flush=True)
    time.sleep(float(sys.argv[1]))
    return compile_kernel(kernel, arch)

jit.compile_kernel = slow
print("ready", flush=True)
sys.stdin.readline()
assert callable(jit.get(Tiny(), "sm_90a", lambda: False))
print("done", flush=True)
os._exit(0)
"""


@pytest.fixture
def start() -> Iterator[Callable[[float], subprocess.Popen[str]]]:
    """Starts a process whose compiler takes so many seconds longer, up to the moment before it asks for the kernel."""
    processes = []

    def started(seconds: float) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", COMPILES, str(seconds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": PATHS},
        )  # fmt: skip
        processes.append(process)
        return process

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_processes_share_a_compilation(
    start: Callable[[float], subprocess.Popen[str]], folder: Path, compiled: list[Any]
) -> None:
    """A process that needs a kernel while another one compiles it waits, and loads what the other one has compiled."""
    process = start(0.5)
    assert said(process) == "ready"
    go(process)
    assert said(process) == "compiles"
    assert callable(get()) and compiled == []
    assert process.communicate(timeout=250)[0].split() == ["done"]
    assert len(objects(folder)) == 1


def test_a_process_that_dies_lets_the_next_one_compile(
    start: Callable[[float], subprocess.Popen[str]], folder: Path, compiled: list[Any]
) -> None:
    process = start(600)
    assert said(process) == "ready"
    go(process)
    assert said(process) == "compiles"
    waiting = Thread(get)
    waiting.join(0.5)
    assert waiting.is_alive() and compiled == []
    assert [name for name in objects(folder) if name.startswith("Tiny_")] != [], "the process has begun a file"
    process.kill()
    assert callable(waiting.value()) and compiled == [SMALL]
    assert objects(folder) == [f"{jit.object_name(SMALL, ARCH)}.o"], "partial files are removed"


def test_a_stopped_process_holds_nobody_up_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any]
) -> None:
    monkeypatch.setattr(jit, "LOCK_SECONDS", 0.3)
    folder.mkdir(mode=0o700)
    with open(folder / f"{jit.object_name(SMALL, ARCH)}.lock", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        part = folder / f"{jit.object_name(SMALL, ARCH)}.other.o"
        part.touch()  # of the process that holds the lock
        assert callable(get()) and time.monotonic() - began >= 0.3
    assert compiled == [SMALL] and len(objects(folder)) == 2 and part.exists()


def test_the_lock_is_released(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is released whether the compilation succeeds or not."""

    def broken(*_: Any) -> None:
        raise ValueError("broken")

    with monkeypatch.context() as patched:
        patched.setattr(jit, "compile_kernel", broken)
        with pytest.raises(ValueError, match="broken"):
            get()
    for _ in range(2):
        with open(folder / f"{jit.object_name(SMALL, ARCH)}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert callable(get())


def test_a_file_system_without_locks(folder: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Any]) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(jit, "fcntl", types.SimpleNamespace(flock=flock, LOCK_EX=2, LOCK_NB=4, LOCK_UN=8))
    assert callable(get()) and compiled == [SMALL] and len(objects(folder)) == 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames of Python 3.10 are not in chunks")
def test_frames_of_the_compiler_share_a_chunk() -> None:
    """Each end of a chunk that frames cross maps memory, which is then touched for the first time."""

    def deep(frames: int) -> int:
        return frames and deep(frames - 1)

    def crossing() -> None:
        for frames in range(300):
            for _ in range(50):
                deep(frames)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    jit._above_large_frame(crossing)
    within = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    crossing()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    assert within - before < 1000 < after - within
