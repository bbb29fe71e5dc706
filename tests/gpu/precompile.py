"""Compiles kernels of the tests beside it into the disk cache, in other processes, while the tests run.

`serve` keeps all cores busy with requests: files in a folder, each a pickled list of kernels. Their names say what
comes first: what a communicator may need, then what later tests need, which
`precompile.py FOLDER RANKS FILE...` lists. A list holds more than the tests launch, and may lack something: a kernel
that is not there is compiled by the process that needs it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import heapq
import importlib
import itertools
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

SOON, LATER, LAST = "1", "2", "3"
"""First letters of the names of files: what comes first."""


class Wanted:
    """Kernels by the configurations of communicators, each once."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.kernels: dict[Any, None] = {}

    def add(
        self, config: dict[str, Any], bound: int = 0, only: tuple[str, ...] = (), split: bool = True,
        formats: Sequence[tuple[str, str]] = (),
    ) -> None:  # fmt: skip
        """The kernels of a communicator with these values: all that its warmup compiles, or those of the named classes;
        latency kernels for at most `bound` tokens, whole or split; and those of rows in `formats`."""
        from ep_ops.backends.cute.backend import all_kernels
        from ep_ops.config import Config, default_experts

        given: dict[str, Any] = config | {"latency_max_tokens": bound, "world_size": self.world_size}
        given["experts_per_rank"] = tuple(
            config.get("experts_per_rank") or default_experts(config["num_experts"], self.world_size)
        )
        for kernel in all_kernels(Config(**given), formats):
            named = not only or type(kernel).__name__ in only
            if named and (split or getattr(kernel, "send", True) == getattr(kernel, "receive", True)):
                self.kernels[kernel] = None


Find = Callable[[int, int], list[Any]]
"""Kernels of a file of tests, by the number of ranks and the seed."""


def of_throughput(world_size: int, seed: int) -> list[Any]:
    import cases
    import test_throughput
    from operators import CASES, case_config, size_config

    want = Wanted(world_size)
    routes = cases.route_cases(world_size, seed)
    for name, dtype in CASES:
        want.add(case_config(routes[name], dtype))
    for config in (*map(size_config, test_throughput.SIZES), test_throughput.WIDEST):
        want.add(config)
    return list(want.kernels)


def of_latency(world_size: int, seed: int) -> list[Any]:
    import cases
    import test_latency
    from operators import CASES, case_config, size_config

    from ep_ops.backends.cute.sizing import DEFAULT_TOKENS

    want = Wanted(world_size)
    routes = cases.route_cases(world_size, seed)
    for name, dtype in CASES:
        want.add(case_config(routes[name], dtype), DEFAULT_TOKENS, split=False)
    for hidden in (*test_latency.SIZES, 1024):
        want.add(size_config(hidden), DEFAULT_TOKENS)
    return list(want.kernels)


def of_gather(world_size: int, seed: int) -> list[Any]:
    import cases
    import test_gather
    from operators import CASES, case_config

    want = Wanted(world_size)
    routes = cases.route_cases(world_size, seed)
    for name, dtype in CASES:
        want.add(case_config(routes[name], dtype), only=("Gather", "Combine", "Publish"))
    for tokens in test_gather.TOKENS:
        want.add(test_gather.by_rank_config(world_size, tokens), only=("Gather", "Combine", "Publish"))
    want.add(test_gather.steps_config(world_size))
    return list(want.kernels)


def of_steps(world_size: int, seed: int) -> list[Any]:
    import test_steps

    want = Wanted(world_size)
    want.add(test_steps.CONFIG)
    return list(want.kernels)


def of_failures(world_size: int, seed: int) -> list[Any]:
    import test_failures

    want = Wanted(world_size)
    for bound in (64, 32):
        want.add(test_failures.CONFIG, bound)
    return list(want.kernels)


def of_progress(world_size: int, seed: int) -> list[Any]:
    import test_progress

    want = Wanted(world_size)
    for few in (0, test_progress.FEW, test_progress.TOKENS):
        want.add(test_progress.config(world_size), few)
    return [*want.kernels, *test_progress.experts_kernels(world_size)]


def of_checking(world_size: int, seed: int) -> list[Any]:
    import test_checking

    from ep_ops.backends.cute.sizing import DEFAULT_TOKENS

    want = Wanted(world_size)
    want.add(test_checking.config(world_size), DEFAULT_TOKENS)
    return list(want.kernels)


def of_formats(world_size: int, seed: int) -> list[Any]:
    import test_formats

    want = Wanted(world_size)
    for config, how in test_formats.wanted(world_size):
        want.add(config, test_formats.TOKENS, formats=[how])
    return list(want.kernels)


def of_moe(world_size: int, seed: int) -> list[Any]:
    import test_moe_communicator

    want = Wanted(world_size)
    config, bound, formats = test_moe_communicator.wanted(world_size)
    want.add(config, bound, formats=formats)
    return list(want.kernels)


def of_tokens(world_size: int, seed: int) -> list[Any]:
    import test_token_major

    want = Wanted(world_size)
    for config, formats in test_token_major.wanted(world_size):
        want.add(config, test_token_major.FEW, formats=formats)
    return list(want.kernels)


def of_sums(world_size: int, seed: int) -> list[Any]:
    import test_combine_format

    want = Wanted(world_size)
    for config, how in test_combine_format.wanted(world_size):
        want.add(config, test_combine_format.TOKENS, formats=[how])
    return [k for k in want.kernels if "Combine" in type(k).__name__ or not getattr(k, "format", "")]


def of_clients(world_size: int, seed: int) -> list[Any]:
    import test_deep_ep

    want = Wanted(world_size)
    if world_size == test_deep_ep.RANKS:
        for config, bound, formats in test_deep_ep.wanted():
            want.add(config, bound, split=False, formats=formats)
    return list(want.kernels)


def of_many(world_size: int, seed: int) -> list[Any]:
    import test_many

    found: dict[Any, None] = {}
    for count in [count for count in test_many.COUNTS if count <= world_size]:
        want = Wanted(count)
        for config in test_many.configs(count, seed):
            want.add(config, test_many.FEW)
        found |= want.kernels
    return list(found)


def of_rejections(world_size: int, seed: int) -> list[Any]:
    import test_rejections

    from ep_ops.backends.cute.sizing import DEFAULT_TOKENS

    want = Wanted(world_size)
    if world_size > 1:
        want.add(test_rejections.SIZES, DEFAULT_TOKENS)
    return list(want.kernels)


def of_layers(world_size: int, seed: int) -> list[Any]:
    import test_late_gradients

    want = Wanted(world_size)
    want.add(test_late_gradients.sizes(world_size))
    return list(want.kernels)


def of_token_major_layers(world_size: int, seed: int) -> list[Any]:
    return [*of_layers(world_size, seed), *of_one_rank("test_token_major_experts")(world_size, seed)]


def of_one_rank(module: str) -> Find:
    """Kernels that need no communicator, of tests that run on one rank."""
    return lambda world_size, seed: importlib.import_module(module).kernels() if world_size == 1 else []


def of_few_rows(world_size: int, seed: int) -> list[Any]:
    import test_few_rows

    from ep_ops.backends.cute.sizing import DEFAULT_TOKENS

    want = Wanted(world_size)
    formats = ((test_few_rows.E4M3_FORMAT, "rows"),)
    want.add(test_few_rows.config(world_size), DEFAULT_TOKENS, split=False, formats=formats)
    return [*test_few_rows.kernels(world_size), *want.kernels]


def of_domains(world_size: int, seed: int) -> list[Any]:
    """Return the kernels that test_domains*.py launch on so many ranks; the longest to compile first."""
    import adversary
    import domains

    from cute_kernels.alarm import RaiseAlarm
    from cute_kernels.rejection import Reject
    from ep_ops.backends import no_device_library
    from ep_ops.config import Config
    from ep_ops.memory import planned
    from ep_ops.symmetric import nvshmem

    adversary.install(setattr)
    lacking = nvshmem.problem() or no_device_library()
    given = Config(**domains.config(world_size) | {"latency_max_tokens": 0})
    few: dict[str, Any] = {"latency_max_tokens": domains.TOKENS}
    around = Reject, RaiseAlarm, adversary.Courier, adversary.Gate  # launched with rows in any format
    found: list[Any] = []

    def add(formats: Any = (), **more: Any) -> None:
        kernels = adversary.kernels_of(planned(dataclasses.replace(given, **more), world_size), formats)
        found.extend(k for k in kernels if not formats or getattr(k, "format", "") or isinstance(k, around))

    for size, wire in domains.overs(world_size):
        if wire != "nvshmem" or lacking is None:
            over: dict[str, Any] = {"domain_size": size, "wire": wire}
            half = {"staging_bytes": domains.half_of_the_memory(world_size, size)}
            short = {"hidden_size": domains.FORMAT_HIDDEN}
            add(**over, **few)
            add(**over, **few, bundle="1")
            add(**over, **half)
            for more in (few, {**few, "bundle": "1"}, half, {}):
                add(domains.FORMATS, **over, **short, **more)
    add(staging_bytes=domains.half_of_the_memory(world_size, None))
    return sorted(found, key=lambda kernel: not kernel.linked)


FINDS: dict[str, Find] = {
    "test_checking.py": of_checking, "test_combine_format.py": of_sums, "test_deep_ep.py": of_clients,
    "test_domains.py": of_domains, "test_failures.py": of_failures, "test_few_rows.py": of_few_rows,
    "test_formats.py": of_formats, "test_gather.py": of_gather, "test_late_gradients.py": of_layers,
    "test_latency.py": of_latency, "test_lists.py": of_one_rank("test_lists"),
    "test_live_rows.py": of_one_rank("test_live_rows"), "test_many.py": of_many,
    "test_moe_communicator.py": of_moe, "test_overlap.py": of_latency, "test_progress.py": of_progress,
    "test_rejections.py": of_rejections, "test_steps.py": of_steps, "test_sums.py": of_one_rank("test_sums"),
    "test_throughput.py": of_throughput, "test_token_major.py": of_tokens,
    "test_token_major_experts.py": of_token_major_layers,
}  # fmt: skip


def ask(folder: Path, urgency: str, name: str, kernels: Sequence[Any]) -> None:
    """Have kernels compiled by the process that serves the folder."""
    part = folder / f"{name}.part"
    part.write_bytes(pickle.dumps(list(kernels)))
    part.rename(folder / f"{urgency}-{name}.kernels")


def without_torch() -> None:
    """In a new process: keep tvm_ffi from importing PyTorch, which no kernel needs."""
    sys.modules["torch"] = None  # type: ignore[assignment]


def build(kernel: Any, arch: str) -> None:
    from cute_kernels import jit

    jit.prepare(kernel, arch)


def serve(folder: Path, arch: str, processes: int) -> None:
    """Compile the requested kernels that are not on disk, until there is a file `end`; print how many were
    requested."""
    from cute_kernels import jit

    waiting: list[tuple[str, int, Any]] = []  # a heap
    count, known = itertools.count(), set[Any]()
    running = set[concurrent.futures.Future[None]]()
    failed = 0
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context, without_torch) as pool:
        while not (folder / "end").exists():
            for path in sorted(folder.glob("*.kernels")):
                for kernel in pickle.loads(path.read_bytes()):
                    if kernel not in known or path.name.startswith(SOON):
                        heapq.heappush(waiting, (path.name, next(count), kernel))
                    known.add(kernel)
                path.unlink()
            done = {future for future in running if future.done()}
            failed += sum(future.exception() is not None for future in done)
            running -= done
            while waiting and len(running) < processes + 2:
                kernel = heapq.heappop(waiting)[2]
                if not jit.prepared(kernel, arch):  # no process is started for a kernel that is there
                    running.add(pool.submit(build, kernel, arch))
            time.sleep(0.02)
        print(f"{len(known)} kernels were requested; {len(waiting)} were left, {failed} failed", flush=True)
        for worker in [*pool._processes.values()]:
            worker.terminate()
        pool.shutdown(wait=False, cancel_futures=True)


def listed(world_size: int, files: Sequence[str], seed: int) -> Iterator[tuple[str, list[Any]]]:
    """(file, its kernels without those of files before it)."""
    seen = set[Any]()
    for file in files:
        find = FINDS.get(file)
        found = [kernel for kernel in find(world_size, seed) if kernel not in seen] if find else []
        seen.update(found)
        yield file, list(dict.fromkeys(found))


def main() -> None:
    folder, world_size, *files = sys.argv[1:]
    for number, (file, found) in enumerate(listed(int(world_size), files, int(os.environ["EP_OPS_TEST_SEED"]))):
        ask(Path(folder), LATER, f"{int(world_size):02d}-{number:02d}-{file}", found)


if __name__ == "__main__":
    main()
