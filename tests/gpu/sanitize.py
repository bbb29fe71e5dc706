"""Runs small tests of every family of kernels under compute-sanitizer: `make sanitize`.

    python tests/gpu/sanitize.py                                    # all tools, 1 and 2 ranks
    python tests/gpu/sanitize.py --tools racecheck --ranks 1
    python tests/gpu/sanitize.py --jobs 4 --seconds 500             # tools at the same time, as far as the time goes

A plain run comes first, which compiles the kernels. Processes take turns on one GPU. Fresh tensors are filled
(conftest.py), so initcheck reports memory that no kernel has written. Reports that are not in `EXPECTED` fail.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SLOWER = 10
"""How many times as long kernels are assumed to take under a tool."""

EITHER = (
    "test_throughput.py::test_every_operator[random-dtype0]",
    "test_latency.py::test_every_route[random-dtype0]",
    "test_gather.py::test_same_bits_as_combine[random-dtype0]",
    "test_token_major.py::test_captured[throughput]",
    "test_token_major.py::test_captured[latency]",
    "test_formats.py::test_every_format[dtype2-e4m3/128/pow2-packed-throughput]",
    "test_formats.py::test_every_format[dtype2-e4m3/128/pow2-packed-latency]",
    "test_formats.py::test_every_format[dtype7-e4m3/32/mx-swizzled/torch-throughput]",
    "test_combine_format.py::test_every_combine[dtype1-128-wire:e4m3/128/pow2-throughput]",
    "test_combine_format.py::test_every_combine[dtype1-128-wire:e4m3/128/pow2-latency]",
)
TESTS = {
    1: (
        *EITHER,
        "test_many.py::test_ranks[1-even]",
        "test_live_rows.py::test_values_and_gradients[dtype0-264-flat]",
        "test_live_rows.py::test_quantized[dtype2-e4m3/128/pow2-packed-0]",
        "test_sums.py::test_captured",
        "test_lists.py::test_lists[6-40-16]",
    ),
    2: (
        *EITHER,
        "test_many.py::test_ranks[2-even]",
        "test_domains.py::test_every_operator[1-nvlink-throughput-random]",
        "test_domains.py::test_every_operator[1-nvlink-latency-random]",
        "test_domains.py::test_every_operator[1-nvlink-bundled-random]",
    ),
}
"""Small tests by the number of ranks."""

EXPECTED = {
    "Pull": {"Write, Read": 4, "Read, Write": 2},
    "PullScaled": {"Write, Read": 1},
    "Combine": {"Write, Read": 4, "Read, Write": 4},
    "CombineAcross": {"Write, Read": 5, "Read, Write": 10},
    "Publish": {"Write, Read": 1},
    "PublishTokens": {"Write, Read": 3, "Read, Write": 2},
}
"""Hazards in shared memory that racecheck reports although accesses are ordered, or store equal values: for each class
of kernels and pair of accesses, how many instructions begin such a pair at most in kernels of one name. The DSL cuts
names short, and as many as six kernels of these tests have the same.

They are at three places, which say why:

- `begin_walk` (cute_kernels/arrivals.py): its store comes before loads of other warps, in all but publish kernels.
- `Pull.take_part` (cute_kernels/throughput/pull.py): `found` is loaded before it is stored again. It is reported at
  times, since it needs a surplus block that takes part.
- The outbox (cute_kernels/throughput/outbox.py): all other pairs, in combines and in publish kernels that push rows.
  A test whose warps post more flags may show more of its instructions."""

RACE = re.compile(
    r"^========= \w+: Race reported between (?P<one>\w+) access at (?P<kernel>\S+)\+(?P<at>0x[0-9a-f]+).*\n"
    r"(?P<others>(?:=+ +and \w+ access .*\n)+)",
    re.M,
)
CLASS = re.compile(r"_kernel_kernel_(\w+?)problem")
"""The class of a kernel in the name that the DSL gives it."""
HEAD = re.compile(r"^========= (?! |COMPUTE-SANITIZER|[A-Z]+ SUMMARY)(.+)$", re.M)
"""First line of a report."""
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")


def unexpected(log: str) -> Iterator[str]:
    """Lines for what a tool reports and `EXPECTED` does not have."""
    starts: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    for race in RACE.finditer(log):
        for other in re.findall(r"and (\w+) access", race["others"]):
            starts[race["kernel"], f"{race['one']}, {other}"].add(race["at"])
    for (kernel, accesses), at in starts.items():
        kind = CLASS.search(kernel)
        if len(at) > EXPECTED.get(kind[1] if kind else "", {}).get(accesses, 0):
            yield f"race of {accesses} in {kernel} at {', '.join(sorted(at))}"
    yield from dict.fromkeys(HEAD.findall(RACE.sub("", log)))
    if not SUMMARY.search(log):
        yield "the tool has not ended"


def command(tool: str, ranks: int, folder: Path, seconds: float) -> list[str]:
    """Return the command of the runner; `tool` is "" for the plain run."""
    made = [sys.executable, str(HERE / "run.py"), "--turns", "--ranks", str(ranks), "--seconds", f"{seconds:.0f}"]
    made += TESTS[ranks]
    if tool:
        # initcheck must see what PyTorch's kernels write.
        more = "" if tool == "initcheck" else " --kernel-name kns=ep_"
        more += " --racecheck-report analysis" if tool == "racecheck" else ""
        log = folder / f"{tool}-{ranks}-%p.txt"
        made += ["--patience", "900", "--under",
                 f"compute-sanitizer --tool {tool}{more} --report-api-errors no"
                 f" --print-limit 1000 --log-file {log}"]  # fmt: skip
    return made


def problems(tool: str, ranks: int, folder: Path, end: float) -> list[str]:
    """Run the tests under a tool, or plainly if it is "", until `end`; return what is wrong."""
    env = os.environ | {"EP_OPS_GPU_SLOWER": str(SLOWER)}
    left = max(0.0, end - time.monotonic())
    ended = subprocess.run(command(tool, ranks, folder, left), env=env, capture_output=True, text=True)
    found = [f"the tests fail:\n{ended.stdout[-3000:]}{ended.stderr[-1000:]}"] if ended.returncode else []
    logs = sorted(folder.glob(f"{tool}-{ranks}-*.txt")) if tool else []
    if tool and not logs:
        found.append("the tool has written nothing")
    return found + [*dict.fromkeys(line for log in logs for line in unexpected(log.read_text(errors="replace")))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--ranks", nargs="+", type=int, choices=TESTS, default=sorted(TESTS))
    parser.add_argument("--jobs", type=int, default=1, help="tools that run at the same time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=86400.0, help="end after this time; tests left out fail")
    args = parser.parse_args(argv)
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not in PATH; it is part of the CUDA toolkit")
    end = time.monotonic() + args.seconds
    folder = Path(tempfile.mkdtemp(prefix="ep_ops_sanitize_"))
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for ranks in args.ranks:
            running = {}
            for tool in ("", *args.tools):
                running[pool.submit(problems, tool, ranks, folder, end)] = tool
                if not tool:
                    concurrent.futures.wait(running)
            for future in concurrent.futures.as_completed(running):
                tool, found = running[future], future.result()
                bad += bool(found)
                print(
                    f"{tool or 'plain run'}, {ranks} ranks: {'FAILED' if found else 'nothing unexpected'}", flush=True
                )
                print(*(f"  {line}" for line in found), sep="\n", end="\n" if found else "", flush=True)
    print(f"logs: {folder}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
