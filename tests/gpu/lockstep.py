"""pytest plugin of ranks that run.py has started: it hands out parts of files, stops in time and writes results.

All ranks of a group run the same tests in the same order. Rank 0 of the group decides what comes next and tells the
others through the group's store. Several groups share the parts: rank 0 claims the next one by creating a file. Every
rank appends one JSON line before and one after each test, so that a test that ends its process is known.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import stacks
import torch
import torch.distributed as dist

FOLDER = Path(os.environ["EP_OPS_GPU_RUN"])
"""The folder of the run: parts that are claimed, results, and kernels to compile first."""
GROUP = os.environ["EP_OPS_GPU_GROUP"]
STAGE = os.environ["EP_OPS_GPU_STAGE"]
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
END = float(os.environ["EP_OPS_GPU_END"])
"""Unix time after which no test begins."""
COMPILED = os.environ["EP_OPS_GPU_COMPILERS"] != "0"
"""Whether other processes compile kernels."""
PART = 12
"""Tests of a part. Files whose fixtures serve all of their tests are one part."""
WHOLE = ("test_overlap.py", "test_progress.py")
TEXT = 3000
"""Characters of a failure's text that are kept, from its end."""


class Spent:
    """Seconds by what they went into, without those of what is measured inside."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self._open: list[list[Any]] = []

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        self._open.append([name, 0.0])
        try:
            yield
        finally:
            took = time.perf_counter() - begun
            _, inside = self._open.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + took - inside
            self.counts[name] = self.counts.get(name, 0) + 1
            if self._open:
                self._open[-1][1] += took

    def wrap(self, holder: Any, name: str, label: str) -> None:
        """Measure calls of an attribute of a class or module."""
        inner = getattr(holder, name)

        @functools.wraps(inner)
        def measured(*args: Any, **values: Any) -> Any:
            with self.on(label):
                return inner(*args, **values)

        setattr(holder, name, measured)

    def take(self) -> dict[str, list[float]]:
        """Seconds and calls since the last time."""
        taken = {name: [round(took, 3), self.counts[name]] for name, took in self.seconds.items()}
        self.seconds.clear(), self.counts.clear()
        return taken


def ask_for_kernels() -> None:
    """Have the kernels of warmups and of every new communicator compiled by the processes that run.py has started. Rank
    0 asks for them, and no rank starts processes of its own. What a communicator may launch comes last where the
    file's kernels are listed: its test launches few of them."""
    import precompile

    from ep_ops.backends.cute import backend, launcher

    usual, asked = backend.CuteBackend.__init__, set[Any]()

    def ask(wanted: Sequence[Any], *_: Any, urgency: str = precompile.SOON) -> None:
        kernels = [kernel for kernel in wanted if (kernel, urgency) not in asked]
        if kernels and RANK == 0:
            precompile.ask(FOLDER, urgency, f"{time.time():.6f}-{GROUP}", kernels)
            asked.update((kernel, urgency) for kernel in kernels)

    def made(self: Any, member: Any) -> None:
        usual(self, member)
        file = Path(os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]).name
        listed = file in precompile.FINDS
        ask(backend.all_kernels(member.config), urgency=precompile.LAST if listed else precompile.SOON)

    backend.CuteBackend.__init__ = made  # type: ignore[method-assign]
    launcher.prepare_all = ask


def measure(spent: Spent) -> None:
    """Record what takes time besides the tests' own calls."""
    import torch._dynamo.convert_frame

    import ep_ops
    from cute_kernels import jit
    from ep_ops.backends.reference.backend import ReferenceBackend

    spent.wrap(jit, "_compile_to", "compile")
    spent.wrap(jit, "_load", "load")
    spent.wrap(jit, "_load_or_compile", "wait for a kernel")
    spent.wrap(ep_ops.Communicator, "__init__", "create")
    spent.wrap(ep_ops.Communicator, "destroy", "destroy")
    spent.wrap(ep_ops.Communicator, "warmup", "warmup")
    spent.wrap(torch.cuda, "synchronize", "synchronize")
    spent.wrap(torch._dynamo.convert_frame, "_compile", "torch.compile")
    for name in ("all_gather_object", "broadcast_object_list", "barrier", "all_reduce", "all_to_all_single"):
        spent.wrap(dist, name, "collectives")
    operators = ("plan", "dispatch", "dispatch_planned", "combine", "combine_gathered")
    for name in (*operators, "dispatch_backward", "combine_backward"):
        spent.wrap(ReferenceBackend, f"_{name}", "reference")


class Lockstep:
    """The plugin, on one rank."""

    def __init__(self) -> None:
        if RANKS > 1:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            wait = datetime.timedelta(days=1)  # for the stage before; run.py notices ranks that hang
            self.store = dist.PrefixStore("lockstep", dist.TCPStore(host, port, is_master=False, timeout=wait))
        self.turn = 0
        self.spent = Spent()
        self.lines = open(FOLDER / f"{GROUP}-{RANK}.jsonl", "a", buffering=1)
        self.result: dict[str, Any] = {}

    def say(self, **line: Any) -> None:
        self.lines.write(json.dumps(line) + "\n")

    def agreed(self, decide: Callable[[], str]) -> str:
        """Return what rank 0 decides."""
        self.turn += 1
        key = str(self.turn)
        if RANK == 0:
            decided = decide()
            if RANKS > 1:
                self.store.set(key, decided)
            return decided
        self.store.wait([key])
        return self.store.get(key).decode()

    # ------------------------------------------------------------------ what runs

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.say(collected=[item.nodeid for item in session.items])
        stacks.write_at_signal(FOLDER / f"{GROUP}-{RANK}.stacks")
        if torch.cuda.is_available():
            measure(self.spent)
            if COMPILED:
                ask_for_kernels()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.config.option.collectonly:
            return True
        while RANK == 0 and not (FOLDER / f"go-{STAGE}").exists():  # the stage before it runs
            time.sleep(0.05)
        coming = self.items(session)
        item = next(coming, None)
        while item is not None:
            if self.agreed(lambda: "stop" if time.time() > END else "go") == "stop":
                self.say(stopped=True)
                break
            following = next(coming, None)  # claimed before this one ends: fixtures of the session stay
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        return True

    def items(self, session: pytest.Session) -> Iterator[pytest.Item]:
        """Tests of the parts that this group claims, but those that an earlier process of the group has begun."""
        parts = parts_of(session.items)
        mine = [int(number) for number in os.environ.get("EP_OPS_GPU_PARTS", "").split()]  # sanitizers drop empty ones
        while True:
            number = mine.pop(0) if mine else int(self.agreed(lambda: str(claimed(len(parts)))))
            if number < 0:
                return
            self.say(part=number)
            begun = set(json.loads((FOLDER / f"begun-{STAGE}.json").read_text()))
            yield from (item for item in parts[number] if item.nodeid not in begun)

    def pytest_sessionfinish(self) -> None:
        self.say(finished=True)

    # ------------------------------------------------------------------ what came out

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.spent.take()
        self.result = {"test": nodeid, "outcome": "passed", "at": time.time()}
        self.say(begin=nodeid, at=time.time())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self.result
        result[report.when] = round(report.duration, 3)
        if report.skipped:
            result["outcome"] = "skipped"
            result["reason"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            result["reason"] = result["reason"].removeprefix("Skipped: ")
        elif report.failed:
            result["outcome"] = "failed"
            shown = "\n".join([str(report.longrepr)[-TEXT:], report.capstdout[-500:]])
            result["text"] = result.get("text", "") + f"[{report.when}] " + shown

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.result["outcome"] == "failed" and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except Exception as error:  # nothing runs in this process any more: run.py starts others
                self.result["text"] += f"\nthe process ends: {error}"
                self.say(**self.result)
                os._exit(1)
        self.say(**self.result, spent=self.spent.take())


def parts_of(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Tests that one group runs, one after the other."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path.name, []).append(item)
    parts = []
    for name, tests in by_file.items():
        each = len(tests) if name in WHOLE else PART
        parts += [tests[i : i + each] for i in range(0, len(tests), each)]
    return parts


def claimed(count: int) -> int:
    """The number of a part that no group has claimed yet, or -1."""
    for number in range(count):
        try:
            open(FOLDER / f"claimed-{STAGE}-{number}", "x").close()
        except FileExistsError:
            continue
        return number
    return -1


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Lockstep(), "ranks in lockstep")
