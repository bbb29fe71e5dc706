"""The machine code of each kernel is as large as recorded: a change that adds instructions is seen where it is made.

`code_sizes.json` holds, for each kernel and arch, the bytes of its code section, its registers, its stack (spills) and
its shared memory, as the assembler inside the CuTe DSL makes them, and that assembler's version. For a change that is
meant to alter them, `PYTHONPATH=.:tests python tests/kernels/test_code_size.py` writes the file anew.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

from test_many_ranks import launched_with
from test_ptx import LARGE, compiled_kernel

from cute_kernels import jit
from cute_kernels.latency.combine import LatencyCombine
from cute_kernels.latency.dispatch import LatencyDispatch
from cute_kernels.throughput.combine import Combine
from cute_kernels.throughput.gather import Gather
from cute_kernels.throughput.publish import Publish
from cute_kernels.throughput.publish_tokens import PublishTokens
from cute_kernels.throughput.pull import Pull
from cute_kernels.throughput.pull_scaled import PullScaled

RECORDED = Path(__file__).with_name("code_sizes.json")
TOLERANCE = 0.03
"""By which share code may differ in size. Registers and shared memory may not grow, nor may the stack."""
ARCHS = ("sm_90a", "sm_100a")
KERNELS: dict[str, Any] = {
    "publish": Publish(LARGE, True, True, True, False),
    "publish token-major": PublishTokens(LARGE, True, True, True, False),
    "pull": Pull(LARGE, True, False, True),
    "combine": Combine(LARGE, True, True, False),
    "combine backward": PullScaled(LARGE, False),
    "gather": Gather(LARGE),
    "latency dispatch": LatencyDispatch(LARGE, 256, True),
    "latency dispatch token-major": LatencyDispatch(LARGE, 256, True, token_major=True),
    "latency combine": LatencyCombine(LARGE, 256, True),
}


class Size(NamedTuple):
    """Of one kernel's machine code."""

    code_bytes: int
    registers: int  # of a thread
    stack_bytes: int  # of a thread: what registers did not hold
    shared_bytes: int  # of a block, as a launch asks for them


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


def size_of(compiled: Any) -> Size:
    found = sections(bytes(compiled.__cubin__))
    code = [name for name in found if name.startswith(".text.")]
    assert len(code) == 1, code
    info = found[".nv.info"].content
    shared = launched_with(str(compiled.ir_module))
    return Size(found[code[0]].nbytes, attribute(info, REGISTERS), attribute(info, FRAME), shared)


def assembler() -> str:
    return f"CUDA {jit.versions()['cuda']}, nvidia-cutlass-dsl {jit.versions()['cutlass']}"


def measured(name: str, arch: str) -> Size:
    return size_of(compiled_kernel(KERNELS[name], arch))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", KERNELS)
def test_size(name: str, arch: str) -> None:
    recorded = json.loads(RECORDED.read_text())
    if recorded["assembler"] != assembler():
        pytest.skip(f"sizes were recorded with {recorded['assembler']}, and {assembler()} is installed")
    assert set(recorded["sizes"]) == set(KERNELS)
    before, now = Size(**recorded["sizes"][name][arch]), measured(name, arch)
    change = now.code_bytes / before.code_bytes - 1
    assert abs(change) <= TOLERANCE, f"{name}, {arch}: {change:+.1%} code, {before} -> {now}; meant so? see above"
    assert all(new <= old for new, old in zip(now[1:], before[1:], strict=True)), f"{name}, {arch}: {before} -> {now}"


def test_more_code_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = json.loads(RECORDED.read_text())
    of_gather = recorded["sizes"]["gather"]["sm_90a"]
    of_gather["code_bytes"] = round(of_gather["code_bytes"] / 1.05)
    other = tmp_path / RECORDED.name
    other.write_text(json.dumps(recorded))
    monkeypatch.setitem(globals(), "RECORDED", other)
    with pytest.raises(AssertionError, match=r"gather, sm_90a: \+5\.\d% code"):
        test_size("gather", "sm_90a")


if __name__ == "__main__":
    made = {name: {arch: measured(name, arch)._asdict() for arch in ARCHS} for name in KERNELS}
    RECORDED.write_text(json.dumps({"assembler": assembler(), "sizes": made}, indent=1) + "\n")
