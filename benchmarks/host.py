"""Test and measure all GPUs of this host within a time limit, and write one JSON file: `make host`.

    python benchmarks/host.py --out host.json                    # all GPUs, 530 seconds
    python benchmarks/host.py --ranks 2 --seconds 300            # two of them
    python benchmarks/host.py --compile --ranks 8 --arch sm_90a      # fill EP_OPS_CACHE_DIR before; needs no GPU
    python benchmarks/host.py --device cpu                       # the program itself, with small sizes

Steps run one after the other, each in processes of its own and with a limit of its own: `ep-ops doctor`; compiling what
the benchmarks launch, with all cores; `ep-ops bench latency`, `throughput` and `decode` on all ranks, with NCCL's
all-to-all; parts of them on 2, 4, 8 ... ranks; tests/gpu on all ranks in the time that is left. A step that fails or
exceeds its limit is recorded, and the next one runs. With `--groups 4` four groups of ranks run different test files at
the same time, under MPS. The file holds versions and hardware, the commit (EP_OPS_COMMIT
where there is no git), and for each step its command, outcome, seconds and results. Printed at the end is how times
grow with the number of ranks. Exit code 1: a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ep_ops.bench import against, decode, presets, ranks
from ep_ops.bench.figures import text_table
from ep_ops.bench.latency import FP8
from ep_ops.bench.machine import describe
from ep_ops.bench.options import a_file, names_of, only, positive
from ep_ops.bench.workloads import ALIGNMENT
from ep_ops.commands.arguments import add_device_options, choose_device

ROOT = Path(__file__).resolve().parents[1]
TOKENS = (1, 8, 32, 64, 128)
SECONDS = 530.0
LEAST = 15.0
"""Seconds below which no step starts."""
GRACE = 10.0
"""Seconds between asking the processes of a step to end and killing them."""
PAIRS = ("pair", "pair_tokens", "pair_nccl")
ROWS = ("dispatch", "dispatch_planned", "combine", "dispatch_token_major", "combine_token_major", "nccl")
EAGER = ("link", *(name for name in presets.MEASURABLE if name != "pair"))
"""Everything but what torch compiles."""
ALL_RANKS = (1, 2, 4)
"""Numbers of ranks on which `make gpu-test` runs all files; on others it runs test_many.py."""
KINDS = ("doctor", "compile", "latency", "throughput", "decode", "tests")
TEXT = 6000
"""Characters of a step's output that the file holds."""
SMALL = "--hidden 64 --experts 8 --top-k 2"


class Step(NamedTuple):
    """A command with `{out}` for the file of its results, and `{seconds}` for its limit."""

    name: str
    ranks: int
    command: str
    seconds: float = SECONDS


def sizes(most: int) -> list[int]:
    """Return 2, 4, 8 ... below `most`, and `most`."""
    return [*(2**i for i in range(1, most.bit_length()) if 2**i < most), most]


def plan(device: str, most: int, groups: int = 1) -> list[Step]:
    """Return the steps on `most` ranks, tests last: `groups` of ranks run different files at the same time."""
    bench = f"-m ep_ops bench {{}} --device {device} --ranks {{}} --out {{{{out}}}} ".format
    if device == "cpu":
        decoded = f"{SMALL} --tokens 1,2 --width 32 --replays 2 --calls 2"
        return [
            Step("doctor", 0, "-m ep_ops doctor"),
            Step(
                "latency", most, bench("latency", most) + f"{SMALL} --tokens 1,2 --replays 2 --only {','.join(PAIRS)}"
            ),
            Step("throughput", most, bench("throughput", most) + "--preset tiny --iterations 1 --only dispatch,nccl"),
            Step("decode", most, bench("decode", most) + decoded),
        ]
    tokens = ",".join(map(str, TOKENS))
    found = [
        Step("doctor", 0, "-m ep_ops doctor", 60),
        Step("compile", 0, f"{shlex.quote(__file__)} --compile --ranks {most}", 150),
    ]
    for count in reversed(sizes(most)):
        part = f"--only {','.join(PAIRS)}" if count < most else ""
        rows = f"--only {','.join(ROWS if count < most else EAGER)}"
        found += [
            Step("latency", count, bench("latency", count) + f"--tokens {tokens} --replays 500 {part}", 90),
            Step("throughput", count, bench("throughput", count) + f"--preset quick {rows}", 90),
        ]
        for model in decode.MODELS if count == most else ("qwen3-30b",):
            only = f"--model {model} --tokens {tokens} --only memory,pair"
            found.append(Step(f"decode {model}", count, bench("decode", count) + only, 60))
    tests = "tests/gpu/run.py --seconds {seconds} --out {out} "
    if most not in ALL_RANKS:
        found.append(Step("tests of many ranks", most, tests + f"--many {most}", 120))
    return [*found, Step("tests", most, tests + f"--ranks {most} --groups {groups}")]


def kernels(count: int) -> list[Any]:
    """Return what the benchmarks of `plan` launch on so many ranks."""
    from ep_ops.backends.cute.backend import all_kernels
    from ep_ops.commands.compile import checked_config
    from ep_ops.config import Config

    sums, most = (presets.SUM_FORMAT, ""), presets.WORKLOAD_A
    large = {"alignment": ALIGNMENT, "latency_max_tokens": 0, "symmetric_rows": count * most.tokens + 2}
    found: dict[Any, None] = {}
    v3 = decode.MODELS["deepseek-v3"]
    asked: list[tuple[decode.LayerSizes, int, dict[str, Any], list[tuple[str, str]]]] = [
        (v3, most.tokens, large, [*presets.FORMATS.values(), sums]),
        *((v3, TOKENS[-1], options, [FP8, sums]) for options in ({"latency_max_tokens": 0}, {})),
        *((model, TOKENS[-1], {}, []) for model in decode.MODELS.values()),
    ]
    for model, tokens, options, formats in asked:
        config = Config(
            num_experts=model.experts, hidden_size=model.hidden, top_k=model.top_k, max_tokens_per_rank=tokens,
            dtype=torch.bfloat16, backend="cute", **options,
        )  # fmt: skip
        agreed = checked_config(config, count)
        found.update(dict.fromkeys(all_kernels(agreed, formats)))
        local = agreed.num_experts // count
        found.update(dict.fromkeys(decode.gemm_kernels(model, local, count, TOKENS)))
    return [*found]


def run(step: Step, end: float, folder: Path) -> dict[str, Any]:
    """Run a step, not beyond `end` (of time.monotonic), and return its record."""
    limit = min(step.seconds, end - time.monotonic())
    out, log = folder / f"{len(os.listdir(folder))}.json", folder / "log"
    given = step.command.format(out=out, seconds=max(1, int(limit - 2 * GRACE)))
    found: dict[str, Any] = {"name": step.name, "ranks": step.ranks, "command": f"python {given}", "seconds": 0.0}
    if limit < LEAST:
        return found | {"outcome": "not run: the time is over"}
    begun = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *shlex.split(given)], cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(limit - GRACE)
            outcome = "passed" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            outcome = f"did not end in {limit - GRACE:.0f} s"
        finally:
            stop(process)
    text = log.read_text(errors="replace")
    print(text, flush=True)
    found |= {"outcome": outcome, "seconds": time.monotonic() - begun, "text": text[-TEXT:]}
    with contextlib.suppress(OSError, ValueError):
        found["found"] = json.loads(out.read_text())
        if not all(result.get("correct", True) for result in found["found"].get("results", ())):
            found["outcome"] = "wrong results"
    return found


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a step's processes, which may be waiting for each other."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # tests/gpu/run.py ends its processes and MPS
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def growth(steps: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return a table: µs of what was measured on several numbers of ranks, or on the only one."""
    by_ranks: dict[tuple[str, str, int], dict[int, float]] = {}
    for step in steps:
        for result in step.get("found", {}).get("results", ()):
            if "op" in result:
                times = {result["op"]: against.time_of(result)}
            else:
                times = {decode.NAMES[name]: result[name] for name in ("memory", "pair") if name in result}
            for what, us in times.items():
                by_ranks.setdefault((step["name"], what, result["tokens"]), {})[step["ranks"]] = us
    counts = sorted({count for times in by_ranks.values() for count in times})
    rows = [["µs on so many ranks", "", "T", *map(str, counts)]]
    for (name, what, tokens), times in by_ranks.items():
        if len(times) > 1 or len(counts) == 1:
            cells = (f"{times[count]:.1f}" if count in times else "" for count in counts)
            rows.append([name, what, str(tokens), *cells])
    return rows


def commit() -> str:
    given = os.environ.get("EP_OPS_COMMIT") or ""
    if not given and shutil.which("git"):
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        given = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return given or "unknown"


def read(argv: Sequence[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device_options(options)
    options.add_argument(
        "--seconds", type=float, default=SECONDS, help="limit for all steps together (default: %(default)s)"
    )
    options.add_argument("--only", type=names_of(KINDS), default=KINDS, metavar="NAME,NAME", help=only(KINDS))
    options.add_argument(
        "--groups", type=positive, default=1, help="groups of ranks that run tests at the same time, under MPS"
    )
    options.add_argument("--out", type=a_file, metavar="FILE", help="write the results as JSON, after each step")
    options.add_argument("--compile", action="store_true", help="compile the benchmarks' kernels, and stop")
    options.add_argument("--arch", help="for --compile, such as sm_90a (default: that of this host's GPU)")
    args = options.parse_args(argv)
    if not args.compile:
        choose_device(options, args)
    elif args.ranks is None:
        options.error("--compile needs --ranks")
    return args


def compile_kernels(most: int, arch: str | None) -> int:
    from ep_ops.commands.compile import arch_here, compile_all, folder

    arch = arch or arch_here()
    if arch is None:
        raise SystemExit("--compile: torch sees no GPU on this host; pass --arch")
    wanted = list(dict.fromkeys(kernel for count in sizes(most) for kernel in kernels(count)))
    into = folder()
    compile_all(wanted, arch)
    print(f"{len(wanted)} kernels for {arch} are in {into}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = read(argv)
    if args.compile:
        return compile_kernels(args.ranks, args.arch)
    steps = [step for step in plan(args.device, args.ranks, args.groups) if step.name.split()[0] in args.only]
    # Not ignored, as a shell's background jobs have it: steps are ended by this signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begun = time.monotonic()
    machine = describe(torch.device(args.device))
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ep_ops_host_") as folder:
        for step in steps:
            print(f"== [{time.monotonic() - begun:.0f} s] {step.name} on {step.ranks} ranks", flush=True)
            done.append(run(step, begun + args.seconds, Path(folder)))
            if args.out is not None:
                ranks.write({"version": 1, "machine": machine, "commit": commit(), "steps": done}, args.out)
    print(*text_table(growth(done)), "", sep="\n")
    rows = [[step["name"], str(step["ranks"]), f"{step['seconds']:.0f}", step["outcome"]] for step in done]
    print(*text_table([["step", "ranks", "s", "outcome"], *rows]), sep="\n", flush=True)
    return int(any(step["outcome"] != "passed" for step in done))


if __name__ == "__main__":
    sys.exit(main())
