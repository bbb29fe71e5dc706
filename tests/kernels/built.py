"""Compilation of kernels for tests without a GPU: their PTX, and the sizes of the machine code.

`built(kernel, arch)` compiles a kernel once in a test run. All files and processes of the run share the result through
a folder (tests/conftest.py).
"""

from __future__ import annotations

import collections
import fcntl
import functools
import os
import pickle
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cute_kernels import jit

ARCHS = ("sm_90a", "sm_100a")
DRAWN_ARCHS = ("sm_90a", pytest.param("sm_100a", marks=pytest.mark.drawn))
"""For kernels whose instructions the architecture does not change."""


class Built(NamedTuple):
    """A compiled kernel."""

    ptx: str
    code_bytes: int
    registers: int  # of a thread
    stack_bytes: int  # of a thread: branch bookkeeping and spilled registers
    shared_bytes: int  # of a block, as a launch asks for them


@functools.cache
def built(kernel: Any, arch: str) -> Built:
    """Return `kernel` compiled for `arch`, from the folder of the run if it is there."""
    if "EP_OPS_TEST_KERNELS" not in os.environ:
        return _compile(kernel, arch)
    path = Path(os.environ["EP_OPS_TEST_KERNELS"]) / jit.object_name(kernel, arch)
    with open(path.with_suffix(".lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_suffix(".part")
            part.write_bytes(pickle.dumps(tuple(_compile(kernel, arch))))
            part.rename(path)
    return Built(*pickle.loads(path.read_bytes()))


def _compile(kernel: Any, arch: str) -> Built:
    compiled = jit.compile_kernel(kernel, arch, keep_ptx=True)
    found = sections(bytes(compiled.__cubin__))
    code = [section.nbytes for name, section in found.items() if name.startswith(".text.") and section.nbytes]
    info = found[".nv.info"].content
    shared = launched_with(str(compiled.ir_module))
    return Built(compiled.__ptx__, sum(code), attribute(info, REGISTERS), attribute(info, FRAME), shared)


# ---------------------------------------------------------------------- PTX


def compiled_ptx(kernel: Any, arch: str) -> str:
    ptx = built(kernel, arch).ptx
    assert not unused_acquires(ptx), "the result of an acquire must be used: see ptx.ld_acquire_sys"
    assert not lines_apart(ptx), "the lanes of a line must be together: see latency/packets.py"
    return ptx


def unused_acquires(ptx: str) -> list[str]:
    """Return the load-acquires of a kernel whose results are not used."""
    body = ptx[ptx.index(".visible .entry") :]
    body = body[: body.index("\n}\n")]
    named = collections.Counter(re.findall(r"%\w+", body))
    return [load for load, to in re.findall(r"(ld\.acquire\S+ (%\w+), .*)", body) if named[to] == 1]


def lines_apart(ptx: str) -> list[str]:
    """Return the stores of lines that no barrier of the warp precedes in their block of instructions, and the groups of
    loads that no vote precedes."""
    words = r"bar\.warp\.sync|(?:st|ld)\.volatile\.global\.v4\.b32 .*|^\$L\w+:|vote\.sync"
    found = re.findall(words, ptx, re.MULTILINE)
    apart = []
    for i, word in enumerate(found):
        if word.startswith("st.") and not found[i - 1].startswith("bar"):
            apart.append(word)
        if word.startswith("ld."):
            before = next((w for w in reversed(found[:i]) if not w.startswith(("$L", "ld."))), "")
            if not before.startswith("vote"):
                apart.append(word)
    return apart


def count(ptx: str, instruction: str) -> int:
    return len(re.findall(rf"^\s*(?:@!?%p\d+ )?{re.escape(instruction)}", ptx, re.MULTILINE))


# ---------------------------------------------------------------------- machine code

BOOKKEEPING = 16
"""Bytes of stack that a thread may have, for branches."""


def assert_in_registers(kernel: Any, arch: str) -> None:
    """Fail if a thread keeps values in local memory, because it indexes them or has no registers left."""
    made = built(kernel, arch)
    assert ".local" not in made.ptx, f"{kernel} uses local memory"
    assert made.stack_bytes <= BOOKKEEPING, f"{kernel} spills registers: {made.stack_bytes} bytes of stack"


class Section(NamedTuple):
    nbytes: int
    content: bytes


def sections(elf: bytes) -> dict[str, Section]:
    """The sections of a 64-bit ELF file by name; those without content in the file (SHT_NOBITS) have none here."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    count, names_at = struct.unpack_from("<HH", elf, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + 64 * i) for i in range(count)]
    names = elf[headers[names_at][4] :]
    found = {}
    for name, kind, _, _, at, nbytes in headers:
        content = b"" if kind == 8 else elf[at : at + nbytes]
        found[names[name : names.index(b"\0", name)].decode()] = Section(nbytes, content)
    return found


REGISTERS, FRAME = 0x2F, 0x11
"""Attributes in `.nv.info`, each of a symbol and a number: EIATTR_REGCOUNT, EIATTR_FRAME_SIZE."""


def attribute(info: bytes, wanted: int) -> int:
    """The largest number that `.nv.info` gives for an attribute; 0 if it has none."""
    largest, at = 0, 0
    while at + 4 <= len(info):
        form, kind, size = struct.unpack_from("<BBH", info, at)
        if form == 4:
            if kind == wanted:
                largest = max(largest, struct.unpack_from("<I", info, at + 8)[0])
            at += size
        at += 4
    return largest


def launched_with(host_code: str) -> int:
    """Bytes of shared memory in the launch configuration (`cudaLaunchConfig_t`: grid, block, bytes, stream, ...) that
    the compiled function fills: the constant that it stores into the third field."""
    config = re.escape("!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>")
    field = rf"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, {config}"
    stores = list(re.finditer(rf"{field}\n\s*llvm\.store (%\w+), \1 : i64", host_code))
    assert len(stores) == 1, "one launch"
    # Names of values are those of a function: the last one before it is meant.
    values = re.findall(rf"{stores[0][2]} = llvm\.mlir\.constant\((\d+) : i64\)", host_code[: stores[0].start()])
    return int(values[-1])
