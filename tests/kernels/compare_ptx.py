"""Compares the PTX of all kernels of two checkouts, and prints only what differs.

    python tests/kernels/compare_ptx.py BEFORE [AFTER] [--only NAME ...] [--keep FOLDER] [--processes 2]

BEFORE and AFTER are folders of checkouts; AFTER is this one by default. Kernels are compiled for sm_90a: those of 2 and
8 ranks, of 8 ranks in two NVLink domains, with rows and sums in formats, and those of a single rank. PTX is compared
without comments and line numbers, with registers and labels numbered in the order in which they appear. For a kernel
that differs, this prints the instructions of which there are more or fewer, and the registers, the stack (spills) and
the bytes of machine code before and after. `--only`: kernels whose description contains one of these texts. `--keep`: a
folder for compiled kernels, which are found there again as long as the sources do not change.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
FORMATS = [("e4m3/128/pow2", "columns"), ("e4m3/32/mx", "packed"), ("wire:e4m3/32/mx", "")]
SIZES = dict(num_experts=64, hidden_size=7168, top_k=8, max_tokens_per_rank=4096, latency_max_tokens=128)


def kernels() -> list[Any]:
    """Return the kernels of this process's checkout."""
    from ep_ops.backends.cute.backend import all_kernels
    from ep_ops.config import Config
    from ep_ops.memory import planned

    def of(ranks: int, formats: Any = (), **more: Any) -> list[Any]:
        return all_kernels(planned(Config(**{**SIZES, **more}), ranks), formats)

    found = [
        *of(2), *of(8, FORMATS), *of(2, FORMATS[2:]), *of(8, FORMATS[2:], domain_size=4, wire="nvlink"),
        *of(8, hidden_size=256, num_experts=36, experts_per_rank=(4, 0, 8, 4, 4, 4, 8, 4), top_k=2),
        *local_kernels(),
    ]  # fmt: skip
    return list(dict.fromkeys(found))


def local_kernels() -> Iterator[Any]:
    """Yield the kernels of a single rank. Checkouts name their classes differently, and not all have every kernel."""
    from cute_kernels.local import expert_lists, places_route, sum_rows, swiglu

    def first(module: Any, *names: str) -> Any:
        return next(getattr(module, name) for name in names if hasattr(module, name))

    yield first(expert_lists, "MakeExpertLists", "ExpertLists")(8)
    yield places_route.PlacesRoute()
    for which in ((False, False), (True, False), (False, True)):
        yield sum_rows.SumRows(7168, "bf16", *which)
    for how in ((), (True,), (False, *FORMATS[0]), (False, *FORMATS[1])):
        yield first(swiglu, "SwiGLURows", "SwiGLU")(2048, "bf16", *how)
    with contextlib.suppress(ImportError):
        from cute_kernels.gemm.few_rows import FewRows, tile_of

        yield FewRows(128, 2048, 768, "bf16", tile_of(768, True, False, 32, 64), True, False)
        yield FewRows(128, 768, 2048, "bf16", tile_of(2048, False, True, 16, 64), False, True)


def described(kernel: Any) -> str:
    """Return a description that is the same in both checkouts: the kernel's name and its fields."""
    problem = r"(problem=)?Problem\((.*?route_tokens=\d+(, counts_waits=\w+)?)\)"
    return re.sub(r"^\w+", kernel.name, re.sub(problem, problem_of(kernel), repr(kernel)))


def problem_of(kernel: Any) -> str:
    problem = getattr(kernel, "problem", None)
    if problem is None:
        return ""
    domains = f" in {problem.num_domains} domains" if problem.domains else ""
    return f"{problem.world_size} ranks{domains}, {problem.num_experts} experts"


def normalized(ptx: str) -> list[str]:
    """Return the instructions of a kernel."""
    body = ptx[ptx.index(".visible .entry") :]
    body = re.sub(r"^\.visible \.entry \w+", ".entry kernel", body)
    body = re.sub(r"\w+_param_(\d+)", r"param_\1", body)
    numbers: dict[str, str] = {}

    def renamed(found: re.Match[str]) -> str:
        prefix = re.match(r"\D*", found[0])
        assert prefix is not None
        return numbers.setdefault(found[0], f"{prefix[0]}{len(numbers)}_")

    lines = []
    for raw in body.splitlines():
        line = raw.split("//")[0].strip()
        if line and not line.startswith((".loc", ".file", ".reg", ".section")):
            lines.append(re.sub(r"%[a-z]+\d+|\$L_\w+\d+|\b[A-Z]+_?\d+\b(?=:(?!:)|;)", renamed, line))
    return lines


def compile_one(kernel: Any) -> tuple[str, dict[str, Any]]:
    from built import FRAME, REGISTERS, attribute, sections

    from cute_kernels import jit

    try:
        compiled = jit.compile_kernel(kernel, "sm_90a", keep_ptx=True)
    except Exception as error:  # of any kind that the DSL raises: the others are compared
        return described(kernel), dict(lines=[f"fails: {str(error)[:400]}"], registers=0, stack=0, code=0)
    found = sections(bytes(compiled.__cubin__))
    info = found[".nv.info"].content
    code = sum(section.nbytes for name, section in found.items() if name.startswith(".text."))
    sizes = dict(registers=attribute(info, REGISTERS), stack=attribute(info, FRAME), code=code)
    return described(kernel), dict(lines=normalized(compiled.__ptx__), **sizes)


def write(path: Path, only: list[str], processes: int) -> None:
    """In a process of a checkout: compile its kernels into a file."""
    import multiprocessing

    wanted = [kernel for kernel in kernels() if not only or any(text in described(kernel) for text in only)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        made = dict(pool.imap_unordered(compile_one, wanted))
    path.write_text(json.dumps(made))


def compiled(checkout: Path, keep: Path, only: list[str], processes: int) -> dict[str, Any]:
    digest = hashlib.sha256(" ".join(only).encode())
    for part in (kernels, local_kernels, described, normalized, compile_one):
        digest.update(inspect.getsource(part).encode())
    for path in sorted((checkout / "cute_kernels").rglob("*.py")):
        digest.update(path.read_bytes())
    made = keep / f"{digest.hexdigest()[:24]}.json"
    if not made.exists():
        own = os.pathsep.join([str(checkout), str(HERE.parent)])
        command = [sys.executable, str(HERE), "--write", str(made), "--processes", str(processes)]
        command += ["--only", *only] if only else []
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": own}, cwd=checkout)
    return json.loads(made.read_text())


def instructions(lines: list[str]) -> collections.Counter[str]:
    """Return how often each instruction occurs."""
    each = (part.strip(" {}\t") for line in lines for part in line.split(";"))
    words = (re.sub(r"^(\w+: )?(@!?%?\w+ )?", "", part).split(" ")[0] for part in each)
    return collections.Counter(word for word in words if re.match(r"[a-z]", word))


def difference(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return what differs, or None."""
    if before["lines"] == after["lines"]:
        return None
    if after["lines"][0].startswith("fails"):
        return after["lines"][0]
    was, now = instructions(before["lines"]), instructions(after["lines"])
    changed = {name: now[name] - was[name] for name in sorted({*was, *now}) if now[name] != was[name]}
    parts = [f"{sum(was.values())} -> {sum(now.values())} instructions"]
    parts += [
        f"{what} {before[what]} -> {after[what]}"
        for what in ("registers", "stack", "code")
        if before[what] != after[what]
    ]
    parts += [f"{count:+} {name}" for name, count in changed.items()] or ["the same ones in another order"]
    return ", ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write(given.write, given.only, given.processes)
        return 0
    before, after = (path.resolve() for path in [*given.checkouts, HERE.parents[2]][:2])
    with tempfile.TemporaryDirectory() as folder:
        keep = given.keep or Path(folder)
        was, now = (compiled(path, keep, given.only, given.processes) for path in (before, after))
    for name in sorted({*was, *now}):
        if name not in was or name not in now:
            print(f"only {'before' if name in was else 'after'}: {name}")
    both = [name for name in was if name in now]
    found = {name: text for name in both if (text := difference(was[name], now[name]))}
    for name, text in found.items():
        print(f"{name}\n    {text}")
    print(f"{len(both)} kernels, {len(found)} differ")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
