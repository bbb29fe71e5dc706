"""Runs the GPU tests on several numbers of ranks, which may share GPUs, and prints a table: `make gpu-test`.

    python tests/gpu/run.py                                        # everything
    python tests/gpu/run.py --ranks "1 2" --out results.json       # all files on 1 and on 2 ranks
    python tests/gpu/run.py --many 72 --deaths                     # what starts many processes
    python tests/gpu/run.py --ranks 2 --seconds 500 test_latency.py test_gather.py
    python tests/gpu/run.py --ranks "1 2 4" --gpus 4 --seconds 540 --out results.json

Ranks that share a GPU run at the same time under MPS, if it is available and there are at most four on a GPU; otherwise
they take turns. Where a GPU has room, several groups of ranks run different files at the same time. Each rank has a GPU
of its own where there are enough; with `--gpus` all ranks of a group share one, and other groups use the other GPUs.
Meanwhile other processes compile kernels (precompile.py). A test that hangs or ends its process counts as failed, with
the place where each rank was; the tests behind it run in new processes. Results and table are written while tests run,
and a run that is interrupted (SIGINT, SIGTERM) ends with those that there are.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import stacks  # noqa: E402
from mps import Mps  # noqa: E402
from result_table import table  # noqa: E402

ALONE = ("test_overlap.py", "test_progress.py")
"""Files that look at what runs at the same time: no other group runs beside them."""
RANKS, PROCESSES = "1 2 4", "8 18 72"
"""Numbers of ranks for all files, and for `MANY` alone."""
MANY = "test_many.py"
OWN_PROCESSES = "test_deaths.py"
FIRST = (
    "test_domains.py", "test_few_rows.py", "test_live_rows.py", "test_latency.py", "test_throughput.py",
    "test_token_major.py", "test_domains_steps.py",
)  # fmt: skip
"""The longest files begin first."""
MOST_UNDER_MPS = 4
"""Processes of a GPU under MPS: each needs 21 multiprocessors of 132."""
QUEUES = 64
"""Hardware queues of all processes of a GPU, where streams of a process are to run at the same time."""
PATIENCE = 150.0
"""Seconds without news from any rank of a group after which it hangs."""
STARTING = 180.0
"""The same before the first test."""
GRACE = 20.0
"""Seconds before the end in which no test begins."""
WRITTEN = 5.0
"""Seconds between writes of the results."""


@dataclasses.dataclass
class Stage:
    """Files on so many ranks. `ranks` is 0 for tests that start their processes themselves."""

    name: str
    ranks: int
    files: list[str]
    groups: int = 1
    percentage: int = 0
    """Share of a GPU's multiprocessors for each process under MPS; 0: without MPS."""
    queues: int = 0
    """Hardware queues of each process under MPS; 0: the default."""
    begun: float = 0.0
    seconds: float = 0.0
    tests: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    collected: list[str] = dataclasses.field(default_factory=list)

    def record(self) -> dict[str, Any]:
        tests = [{"test": test, **self.tests.get(test, {"outcome": "not run"})} for test in self.collected]
        shown = ("name", "ranks", "groups", "percentage")
        return {**{key: getattr(self, key) for key in shown}, "seconds": round(self.seconds, 1), "tests": tests}


@dataclasses.dataclass
class Place:
    """The GPUs that a group uses: all, or the one with this id. `mps` is their daemon; None: without MPS."""

    gpu: str = ""
    mps: Any = None

    def env(self, percentage: int = 0, queues: int = 0) -> dict[str, str]:
        """Variables of a process that uses them; `percentage` and `queues` as in :class:`Stage`."""
        shared = self.mps.env(percentage, queues) if percentage else {}
        return shared | ({"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu else {})


class Group:
    """The processes of the ranks that run tests in lockstep."""

    def __init__(self, run: Run, stage: Stage, number: int) -> None:
        self.run, self.stage, self.number = run, stage, number
        self.name = f"{stage.name.replace(' ', '-')}.{number}"
        self.parts: list[int] = []
        self.begun: dict[str, dict[str, Any]] = {}
        self.heard: dict[str, set[int]] = {}
        """Ranks that have reported the result of a test."""
        self.starts, self.ended = 0, False
        self.start()

    def start(self) -> None:
        """Start a process for each rank."""
        from torch.distributed import TCPStore

        self.starts += 1
        run, stage = self.run, self.stage
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.label = f"{self.name}.{self.starts}"
        self.current: dict[int, str] = {}
        self.finished, self.at_work = set[int](), False
        self.missed = 0.0
        """When a process was found to have ended too soon; 0: none has."""
        self.read = [0] * max(1, stage.ranks)
        self.news = time.time()
        run.begun_file(stage).write_text(json.dumps(sorted(run.begun(stage))))
        place = run.places[self.number % len(run.places)]
        env = os.environ | run.env | place.env(stage.percentage, stage.queues)
        env |= {
            "EP_OPS_GPU_GROUP": self.label, "EP_OPS_GPU_STAGE": stage.name.replace(" ", "-"),
            "EP_OPS_GPU_END": str(run.end - GRACE), "EP_OPS_GPU_PARTS": " ".join(map(str, self.parts)),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": f"{run.folder.name}_{self.label}",
        }  # fmt: skip
        self.processes, self.logs = [], []
        for rank in range(max(1, stage.ranks)):
            own = env if not stage.ranks else env | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(stage.ranks),
                "LOCAL_WORLD_SIZE": str(stage.ranks),
            }  # fmt: skip
            log = run.folder / f"{self.label}.{rank}.log"
            command = [
                *shlex.split(run.args.under),
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "lockstep",
                "-p",
                "no:cacheprovider",
                "-q",
                "--no-header",
            ]
            command += ["--tb=short", *run.args.pytest, *run.targets(stage.files)]
            with open(log, "wb") as file:
                process = subprocess.Popen(command, env=own, stdout=file, stderr=file, start_new_session=True)
            self.processes.append(process)
            self.logs.append(log)

    def poll(self) -> None:
        """Read the news; start others in place of processes that ended too soon, or hang."""
        if self.ended:
            return
        for rank in range(len(self.processes)):
            self.listen(rank)
        quiet = time.time() - self.news
        if len(self.finished) == len(self.processes):
            reporting = self.run.args.under and any(process.poll() is None for process in self.processes)
            self.ended = not reporting or quiet > self.run.args.patience  # such a program reports when its process ends
            if self.ended and not self.heard:
                self.explain()
            return
        codes = {rank: process.poll() for rank, process in enumerate(self.processes) if rank not in self.finished}
        died = [rank for rank, code in codes.items() if code is not None]
        self.missed = self.missed or (time.time() if died else 0.0)
        if died and time.time() - self.missed > 3:  # until then others may have more to say of the same test
            self.replace(f"rank {died[0]} ended with {codes[died[0]]}", died)
        elif quiet > (patience := self.run.args.patience if self.at_work else max(STARTING, self.run.args.patience)):
            self.replace(f"no news for {patience:.0f} s", list(codes))

    def listen(self, rank: int) -> None:
        path = self.run.folder / f"{self.label}-{rank}.jsonl"
        if not path.exists():
            return
        with open(path) as file:
            file.seek(self.read[rank])
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self.read[rank] += len(whole.encode())
        for line in whole.splitlines():
            self.news = time.time()
            self.take(rank, json.loads(line))

    def take(self, rank: int, said: dict[str, Any]) -> None:
        tests = self.stage.tests
        if "finished" in said:
            self.finished.add(rank)
        elif "collected" in said:
            self.stage.collected = self.stage.collected or said["collected"]
        elif "part" in said:
            if rank == 0 and said["part"] not in self.parts:
                self.parts.append(said["part"])
        elif "begin" in said:
            self.at_work = True
            self.current[rank] = said["begin"]
            self.begun[said["begin"]] = said
        elif "test" in said:
            self.current.pop(rank, None)
            name = said.pop("test")
            self.heard.setdefault(name, set()).add(rank)
            known = tests.get(name)
            if known is None:
                tests[name] = said | {"group": self.number}
            elif said["outcome"] == "failed":
                known["text"] = (known.get("text", "") + f"\n-- rank {rank}: " + said.get("text", ""))[:6000]
                known["outcome"] = "failed"
            if rank == 0 and said["outcome"] == "failed":
                self.run.say(f"{self.stage.name}: FAILED {name}")

    def replace(self, why: str, ranks: Sequence[int]) -> None:
        """End all processes, note the tests of these ranks, and start others for those behind."""
        running = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
        for sent, seconds in ((stacks.SIGNAL, 1.0), (signal.SIGKILL, 0.0)):
            for rank in running:  # a rank that another program runs is in its group
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.processes[rank].pid, sent)
            time.sleep(seconds)
        self.kill()
        tests = sorted({self.current[rank] for rank in ranks if rank in self.current})
        for test in [*self.begun]:
            if test not in tests and len(self.heard.get(test, ())) < len(self.processes):
                for known in (self.begun, self.heard, self.stage.tests):
                    known.pop(test, None)  # once more: another test has ended the process
        tail = "\n".join(f"-- rank {rank}\n{log.read_text(errors='replace')[-1500:]}" for rank, log in
                         [*enumerate(self.logs)][:4])  # fmt: skip
        for rank in running[:4]:
            tail += f"\n-- rank {rank} was in {stacks.place(self.run.folder / f'{self.label}-{rank}.stacks')}"
        for test in tests:
            known = self.stage.tests.setdefault(test, {"group": self.number})
            known |= {"outcome": "failed", "text": known.get("text", "") + f"\n{why}\n{tail}"}
        self.run.say(f"{self.stage.name}: {why} in {', '.join(tests) or 'no test'}; others are started")
        if not tests and self.starts > 2:
            self.run.say(f"{self.stage.name}: given up\n{tail}")
            self.ended = True
            self.run.begun_file(self.stage).write_text(json.dumps(sorted(self.run.begun(self.stage))))
            for part in self.parts:  # other groups run the rest of them
                self.run.claim_of(self.stage, part).unlink(missing_ok=True)
        else:
            self.start()

    def explain(self) -> None:
        """Say what processes have written that ended without a test because of an error."""
        for rank, process in enumerate(self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(60.0) != 0:
                    written = self.logs[rank].read_text(errors="replace")[-1500:]
                    self.run.say(f"{self.stage.name}: rank {rank} ended with {process.returncode}\n{written}")

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()


class Run:
    """All stages, one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begun_at = args, time.time()
        self.end = self.begun_at + args.seconds
        self.folder = Path(tempfile.mkdtemp(prefix="ep_ops_gpu_"))
        self.seed = int(os.environ.get("EP_OPS_TEST_SEED", secrets.randbits(31)))
        path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        self.env = {
            "PYTHONPATH": path, "EP_OPS_GPU_RUN": str(self.folder), "EP_OPS_TEST_SEED": str(self.seed),
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1", "EP_OPS_GPU_COMPILERS": str(args.compilers),
        }  # fmt: skip
        found, self.arch, machine = gpus()
        if args.gpus > len(found):
            raise SystemExit(f"--gpus is {args.gpus}; allowed: at most {len(found)}, the GPUs that are visible")
        self.gpus = args.gpus or len(found)
        self.groups: list[Group] = []
        self.written = 0.0
        few = args.turns or self.gpus == 0
        self.places = [Place(gpu) for gpu in found[: args.gpus]] or [Place()]
        if not few:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                daemons = pool.map(lambda i: Mps(self.folder / f"mps{i}", self.places[i].gpu), range(len(self.places)))
                for place, daemon in zip(self.places, daemons, strict=True):
                    place.mps = daemon
        problems = ["not requested"] if few else [place.mps.problem for place in self.places if place.mps.problem]
        self.side_by_side = not problems
        why = "" if self.side_by_side else f" ({problems[0]})"
        self.facts = {
            "machine": machine, "commit": commit(), "seed": self.seed, "cores": os.cpu_count(),
            "mps": self.side_by_side, "cache": os.environ.get("EP_OPS_CACHE_DIR", ""),
        }  # fmt: skip
        self.say(f"{machine}; seed {self.seed}; MPS: {self.side_by_side}{why}; {self.folder}")
        self.stages = self.planned()

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.begun_at:6.1f} s] {text}", flush=True)

    # ------------------------------------------------------------------ what runs

    def planned(self) -> list[Stage]:
        found = sorted(path.name for path in self.args.folder.glob("test_*.py"))
        asked = list(dict.fromkeys(file for file, _ in map(split, self.args.files)))
        if missing := [name for name in asked if name not in found]:
            raise SystemExit(f"tests/gpu has no {', '.join(missing)}")
        files = [name for name in (*FIRST, *found) if name in (asked or found) and name in found]
        files = [name for name in dict.fromkeys(files) if name != OWN_PROCESSES]
        stages = []
        args = self.args
        some = args.ranks or args.many or args.deaths
        for ranks in map(int, (args.ranks if some else RANKS).split()):
            each = ranks if args.gpus else -(-ranks // max(1, self.gpus))
            together = self.side_by_side and each <= MOST_UNDER_MPS
            together = together and (ranks == 1 or each > 1 or args.groups > 1)  # whole GPUs where there are enough
            groups = (self.args.groups or MOST_UNDER_MPS // each) if together else 1
            places = len(self.places)
            alone = [name for name in files if name in ALONE]
            rest = [name for name in files if name not in ALONE]
            if rest:
                share = share_of(each * groups) if together else 0
                stages.append(Stage(f"{ranks}", ranks, rest, groups * places, share))
            if alone:
                share = share_of(each) if together and each > 1 else 0
                queues = QUEUES // each if share else 0
                stages.append(Stage(f"{ranks} alone", ranks, alone, min(places, len(alone)), share, queues))
        if MANY in (asked or found):
            many = args.many if some else PROCESSES
            stages += [Stage(f"{ranks} many", ranks, [MANY]) for ranks in map(int, many.split())]
        if OWN_PROCESSES in found and (args.deaths or OWN_PROCESSES in asked or not some and not asked):
            stages.append(Stage("deaths", 0, [OWN_PROCESSES]))
        return stages

    def targets(self, files: Sequence[str]) -> list[str]:
        """Arguments of pytest: files, or the requested tests of them."""
        asked = [(file, test) for file, test in map(split, self.args.files) if file in files]
        return [f"{self.args.folder / file}{test}" for file, test in asked or [(file, "") for file in files]]

    def begun(self, stage: Stage) -> set[str]:
        return {test for group in self.groups if group.stage is stage for test in group.begun}

    def claim_of(self, stage: Stage, part: int) -> Path:
        return self.folder / f"claimed-{stage.name.replace(' ', '-')}-{part}"

    def begun_file(self, stage: Stage) -> Path:
        return self.folder / f"begun-{stage.name.replace(' ', '-')}.json"

    def go(self) -> int:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with self.compiling():
            try:
                for stage in self.stages:
                    self.list_kernels(stage)
                for stage, following in zip(self.stages, [*self.stages[1:], None], strict=True):
                    if time.time() < self.end - GRACE:
                        self.start(stage)
                        if following is not None and max(stage.ranks, following.ranks) <= MOST_UNDER_MPS:
                            self.start(following)  # starting takes time, and little else
                        self.run(stage)
            except KeyboardInterrupt:
                self.end = 0.0
                self.say("interrupted")
            finally:
                for group in self.groups:
                    group.kill()
                    for rank in range(len(group.processes)):
                        group.listen(rank)  # what it has written since
                for place in self.places:
                    if place.mps is not None and not place.mps.problem:
                        place.mps.stop()
                self.write()
        print(*table(self.record()), sep="\n", flush=True)
        if self.args.logs:
            shutil.make_archive(self.args.logs, "gztar", self.folder)
        outcomes = [test["outcome"] for stage in self.record()["stages"] for test in stage["tests"]]
        shutil.rmtree(self.folder, ignore_errors=True)
        return int("failed" in outcomes or "not run" in outcomes or not outcomes)

    def start(self, stage: Stage) -> None:
        """Start the processes of a stage, which wait, unless they have been started."""
        if any(group.stage is stage for group in self.groups):
            return
        for number in range(stage.groups):
            self.groups.append(Group(self, stage, number))

    def run(self, stage: Stage) -> None:
        stage.begun = time.time()
        how = f"{stage.groups} groups, {stage.percentage} % of a GPU each" if stage.percentage else "taking turns"
        self.say(f"stage {stage.name}: {len(stage.files)} files on {stage.ranks} ranks, {how}")
        mine = [group for group in self.groups if group.stage is stage]
        for group in mine:
            group.news = time.time()
        (self.folder / f"go-{stage.name.replace(' ', '-')}").touch()
        while not all(group.ended for group in mine):
            for group in mine:
                group.poll()
            stage.seconds = time.time() - stage.begun
            if time.time() > self.end:
                for group in mine:
                    group.kill()
                    for test in set(group.current.values()):
                        stage.tests.setdefault(test, {"outcome": "not run", "text": "the time was over"})
                    group.ended = True
            if time.time() - self.written > WRITTEN:
                self.write()
            time.sleep(0.1)
        for group in mine:
            group.kill()
        counts = collections.Counter(test["outcome"] for test in stage.record()["tests"])
        self.say(f"stage {stage.name}: {dict(counts)} in {stage.seconds:.1f} s")
        self.write()

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Processes that compile kernels, while the tests run."""
        if self.arch is None or self.args.compilers == 0:
            yield
            return
        given = f"pathlib.Path({str(self.folder)!r}), {self.arch!r}, {self.args.compilers}"
        code = f"import precompile, pathlib; precompile.serve({given})"
        with open(self.folder / "compiling.log", "wb") as log:
            server = subprocess.Popen(
                ["nice", sys.executable, "-c", code], env=os.environ | self.env, stdout=log, stderr=log
            )
        try:
            yield
        finally:
            (self.folder / "end").touch()
            try:
                server.wait(30 if self.end else 3)
            except subprocess.TimeoutExpired:
                server.kill()
            self.say((self.folder / "compiling.log").read_text()[-500:].strip())

    def list_kernels(self, stage: Stage) -> None:
        """Another process lists the kernels of the stage's files, but those of which single tests are requested."""
        parts = {file for file, test in map(split, self.args.files) if test}
        files = [file for file in stage.files if file not in parts]
        if self.arch is None or self.args.compilers == 0 or not stage.ranks or not files:
            return
        command = [sys.executable, str(HERE / "precompile.py"), str(self.folder), str(stage.ranks), *files]
        with open(self.folder / f"listing-{stage.name.replace(' ', '-')}.log", "wb") as log:
            subprocess.Popen(command, env=os.environ | self.env | {"CUDA_VISIBLE_DEVICES": ""}, stdout=log, stderr=log)

    # ------------------------------------------------------------------ what came out

    def record(self) -> dict[str, Any]:
        seconds = round(time.time() - self.begun_at, 1)
        stages = [stage.record() for stage in self.stages if stage.begun]
        return {**self.facts, "seconds": seconds, "stages": stages}

    def write(self) -> None:
        self.written = time.time()
        if self.args.out is not None:
            found = self.record()
            texts = {self.args.out: json.dumps(found, indent=0)}
            texts[self.args.out.with_suffix(".txt")] = "\n".join(table(found))
            for path, text in texts.items():
                part = path.with_suffix(".part")
                part.write_text(text + "\n")
                part.replace(path)


def share_of(processes: int) -> int:
    """Return the share of a GPU's multiprocessors for each of so many processes under MPS, in percent. Shares of three
    and more leave a fifth of them, because shares limit processes and reserve nothing: of four processes with 32 of 132
    multiprocessors each, one ran 20 blocks at once while the others ran 32 (H100, driver 580)."""
    return (100 if processes < 3 else 80) // processes


def split(asked: str) -> tuple[str, str]:
    """The file, and the rest of the name of a test, of test_sums, test_sums.py or test_sums.py::test_x."""
    file, colons, test = asked.partition("::")
    return (file if file.endswith(".py") else f"{file}.py"), colons + test


def gpus() -> tuple[list[str], str | None, str]:
    """Ids of the GPUs that are visible, architecture for the compiler, and their number and name, without a CUDA
    context in this process."""
    asked = ["nvidia-smi", "--query-gpu=index,uuid,name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        lines = []
    rows = [[part.strip() for part in line.split(",")] for line in lines]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        wanted = [name.strip() for name in visible.split(",") if name.strip()]
        rows = [row for name in wanted for row in rows if row[0] == name or row[1].startswith(name)]
    if not rows:
        return [], None, "no GPU"
    _, _, name, capability, driver = rows[0]
    arch = f"sm_{capability.replace('.', '')}a"
    return [row[1] for row in rows], arch, f"{len(rows)} × {name}, driver {driver}"


def commit() -> str:
    """The commit that is tested: EP_OPS_COMMIT where there is no git."""
    asked = subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return os.environ.get("EP_OPS_COMMIT", asked.stdout.strip() or "unknown")


def read(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files of tests/gpu, or FILE::TEST (default: all)")
    parser.add_argument("--ranks", default="", help=f"numbers of ranks that run the files (default: {RANKS})")
    parser.add_argument("--many", default="", help=f"numbers of processes that run {MANY} (default: {PROCESSES})")
    parser.add_argument("--deaths", action="store_true", help=f"run {OWN_PROCESSES}, which starts its processes itself")
    parser.add_argument("--folder", type=Path, default=HERE, help="folder of the tests (default: tests/gpu)")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        help="seconds without output after which a group counts as hanging (default: %(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=86400.0, help="end after this time with the results so far")
    parser.add_argument("--gpus", type=int, default=0, help="number of GPUs; all ranks of a group share one of them")
    parser.add_argument(
        "--out",
        type=Path,
        help="write the results as JSON after each test, and the table to a file that ends with .txt",
    )
    parser.add_argument("--logs", help="archive for the output of all processes, without the file extension")
    parser.add_argument(
        "--groups",
        type=int,
        default=0,
        help="groups that run at the same time, with --gpus on each GPU (default: as many as fit)",
    )
    parser.add_argument(
        "--compilers",
        type=int,
        default=max(2, (os.cpu_count() or 4) - 2),
        help="processes that compile kernels ahead of the tests; 0: the ranks compile them (default: %(default)s)",
    )
    parser.add_argument("--turns", action="store_true", help="do not start MPS; ranks that share a GPU take turns")
    parser.add_argument("--under", default="", help="program that runs each rank, such as 'compute-sanitizer'")
    parser.add_argument("--pytest", action="append", default=[], metavar="ARG", help="argument for pytest (repeatable)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(Run(read(None)).go())
