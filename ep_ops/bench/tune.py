"""Find the numbers of blocks with which operations take the least time: `ep-ops bench tune`, on all GPUs of this host
or under torchrun.

ep-ops bench tune --out tuning.json                            # the sizes of DeepSeek-V3
torchrun --nproc-per-node 4 -m ep_ops bench tune --hidden 2048 --experts 128 --tokens 64,1024,4096 --out tuning.json
EP_OPS_TUNING=tuning.json python train.py                      # uses them

The knobs sms, push, spare and send (ep_ops/backends/cute/tuning.py) are varied one after the other, until
no change saves more than --gain. FILE gets a row for each choice that differs from that of the table and the model.
Rows of other GPUs, numbers of ranks and operations that it has already are kept. Times are those of calls in a CUDA
graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from ep_ops import Communicator
from ep_ops.backends.cute.tuning import KNOBS, Row, read, text_of

from .figures import text_table
from .operators import Calls
from .options import add_domain_options, add_sizes, names_of, new_parser, only, positive
from .options import read as read_options
from .presets import FORMATS, SUM_FORMAT, SUMS
from .ranks import Run, on_every_rank
from .workloads import ALIGNMENT, Workload

TOKENS = (16, 64, 128, 512, 1024, 2048, 4096)
Choice = dict[str, Any]
"""Knob -> value, as rows have it."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What is timed (a name of `Calls.call`), and how rows of the table name it."""

    call: str
    operation: str
    rows: str
    format: str = ""


CASES = (
    Tuned("dispatch", "dispatch", "grouped"),
    Tuned("dispatch_token_major", "dispatch", "token_major"),
    *(
        Tuned(name, "dispatch", "token_major" if "token_major" in name else "grouped", text_of(*how))
        for name, how in FORMATS.items()
        if not name.endswith("planned")
    ),
    Tuned("combine", "combine", "grouped"),
    Tuned("combine_token_major", "combine", "token_major"),
    Tuned("combine_fp8", "combine", "grouped", SUM_FORMAT),
    Tuned("combine_token_major_fp8", "combine", "token_major", SUM_FORMAT),
)


@dataclasses.dataclass
class Change:
    """The choice for a number of tokens, next to the one before, and µs with each."""

    tuned: Tuned
    tokens: int
    before: Choice
    choice: Choice
    us_before: float
    us: float


def parser() -> argparse.ArgumentParser:
    options = new_parser(__doc__, "tune", "rows of the tuning table")
    add_sizes(options, TOKENS)
    names = [tuned.call for tuned in CASES]
    options.add_argument(
        "--only", type=names_of(names), default=tuple(names), metavar="NAME,NAME", help=only(names)
    )  # fmt: skip
    options.add_argument("--iterations", type=positive, default=40, help="timed calls of each (default: %(default)s)")
    options.add_argument(
        "--gain",
        type=float,
        default=0.01,
        help="least share of the time that a change must save (default: %(default)s)",
    )
    add_domain_options(options)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = read_options(options, argv)
    if args.device == "cpu" or args.backend == "reference":
        options.error("the reference backend has no blocks to choose; allowed: GPUs, with the cute backend")
    if args.ranks < 2:
        options.error("--ranks is 1; allowed: 2 and more, because one rank sends nothing")
    if args.sharing > 1:
        options.error(f"--ranks is {args.ranks}, of which {args.sharing} share a GPU; allowed: a GPU for each rank")
    args.backend = "cute"
    args.kept = kept(args.out) if args.out else []
    return on_every_rank(Tune.measure, args)


# ---------------------------------------------------------------------- the search


def search(
    start: Choice, candidates: Mapping[str, Sequence[Any]], time: Callable[[Choice], float], gain: float
) -> tuple[Choice, float, float]:
    """Return the choice with the least time, its time, and that of `start`. A value is taken if it saves more than the
    share `gain`; knobs are varied one after the other until a round changes nothing."""
    best, before = dict(start), time(start)
    least = before
    while True:
        last = dict(best)
        for knob, values in candidates.items():
            for value in values:
                if value != best[knob]:
                    took = time({**best, knob: value})
                    if took < least * (1 - gain):
                        best, least = {**best, knob: value}, took
        if best == last:
            return best, least, before


def candidates(operation: str, tuned: Tuned, sms: int, least: int, most: int) -> dict[str, list[Any]]:
    """Return the values of each knob to try, on a GPU with `sms`. `least`, `most`: SMs of the operation."""
    if operation.startswith("latency"):
        return {"send": [Fraction(part, 22) for part in range(2, 13)]}
    if operation == "combine across domains":
        return {"push": [Fraction(part, 32) for part in range(6, 15)]}
    step = max(2, (most - least) // 16 * 2)
    found: dict[str, list[Any]] = {"sms": [None, *(Fraction(n, sms) for n in range(least, most + 1, step))]}
    if operation == "combine":
        found["spare"] = [Fraction(0), *(Fraction(1, part) for part in (32, 16, 8, 4, 2, 1))]
    elif tuned.rows == "token_major" and not tuned.format:
        found["push"] = [6, 8, 10, 12, 14, 16, 20, 24]
    return found


# ---------------------------------------------------------------------- rows


def new_rows(gpu: str, ranks: int, found: Iterable[tuple[str, Change]]) -> list[dict[str, Any]]:
    """Return rows that make these choices: for each operation and kind of rows, from the most tokens to the fewest, as
    the first row that holds counts. Knobs that no number of tokens changes are left out."""
    rows: list[dict[str, Any]] = []
    groups: dict[tuple[str, str, str], list[Change]] = {}
    for operation, one in found:
        groups.setdefault((operation, one.tuned.rows, one.tuned.format), []).append(one)
    for (operation, layout, format), ones in groups.items():
        knobs = [knob for knob in KNOBS[operation] if any(one.choice.get(knob) != one.before.get(knob) for one in ones)]
        if not knobs:
            continue
        name = {"operation": operation, "gpu": gpu, "ranks": ranks, "rows": layout, "format": format}
        last, steps = Choice(), []
        for one in sorted(ones, key=lambda one: one.tokens):
            now = {knob: written(one.choice[knob]) for knob in knobs}
            if now != last:
                steps.append({**name, "tokens": one.tokens, **now})
            last = now
        rows += reversed(steps)
    return rows


def written(value: Any) -> Any:
    """Return a knob's value as a file has it."""
    return str(value) if isinstance(value, Fraction) else value


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]], measured: set[tuple[Any, ...]]) -> list[Any]:
    """Return the rows of a file with those of the measured operations replaced."""
    return [*new, *(row for row in old if name_of(row) not in measured)]


def name_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("operation", "gpu", "ranks", "rows", "format"))


def kept(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that may be empty. Ends the program with a line if it has something else."""
    if not path.read_text().strip():
        return []
    try:
        read(path, "--out")
    except ValueError as error:
        raise SystemExit(f"ep-ops bench: {error}") from None
    return json.loads(path.read_text())


def text_of_rows(rows: Sequence[dict[str, Any]]) -> str:
    """Return the text of a file: a line for each row."""
    return "[\n " + ",\n ".join(json.dumps(row) for row in rows) + "\n]\n" if rows else "[]\n"


# ---------------------------------------------------------------------- on GPUs


class Tune(Run):
    """Searches for all cases and numbers of tokens."""

    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        super().__init__(device, args, table, results=[])
        self.tuned: list[tuple[str, Change]] = []

    def everything(self) -> None:
        args = self.args
        largest = Workload(max(args.tokens), args.hidden, args.experts, args.top_k)
        cases = [tuned for tuned in CASES if tuned.call in args.only and not (tuned.format and args.hidden % 128)]
        named = FORMATS | dict.fromkeys(SUMS, (SUM_FORMAT, ""))
        formats = list(dict.fromkeys(named[tuned.call] for tuned in cases if tuned.format))
        with self.communicator(largest, alignment=ALIGNMENT) as comm:
            comm.warmup(formats)
            self.steps = len(args.tokens) * len(cases)
            for tokens in args.tokens:
                calls = Calls(comm, dataclasses.replace(largest, tokens=tokens))
                for tuned in cases:
                    self.one(comm, calls, tuned, tokens)
                    self.done += 1
            comm.check_errors()

    def one(self, comm: Communicator, calls: Calls, tuned: Tuned, tokens: int) -> None:
        """Search for the choice of one case and number of tokens."""
        backend: Any = comm.backend
        operation = tuned.operation
        if tokens <= backend.latency.tokens:
            operation = f"latency {operation}"
        elif operation == "combine" and len(comm.config.domains) > 1:
            operation = "combine across domains"
        call, budget = calls.call(tuned.call), backend.budget
        least, most = (budget.beyond, budget.most_dispatch) if operation == "dispatch" else (32, budget.most_combine)
        tried = candidates(operation, tuned, comm.multiprocessors, least, most)
        knobs = backend.tuning.knobs(operation, tuned.rows, tuned.format, tokens)
        start = {knob: getattr(knobs, knob) for knob in tried}

        def time(choice: Choice) -> float:
            backend.tune(Row(operation, choice, rows=tuned.rows, format=tuned.format))
            comm.calls.forget()
            return self.timer.graph(call, self.args.iterations)[0].median

        choice, us, before = search(start, tried, time, self.args.gain)
        backend.tune()
        comm.calls.forget()
        self.add(operation, Change(tuned, tokens, start, choice, before, us))

    def add(self, operation: str, one: Change) -> None:
        self.tuned.append((operation, one))
        self.found["results"].append(
            {
                "operation": operation, "rows": one.tuned.rows, "format": one.tuned.format, "tokens": one.tokens,
                "us_before": one.us_before, "us": one.us,
                "choice": {knob: written(v) for knob, v in one.choice.items() if v != one.before[knob]},
            }
        )  # fmt: skip
        self.say(" ".join(map(str, self.found["results"][-1].values())))
        self.save()

    def save(self) -> None:
        if self.rank != 0 or self.args.out is None:
            return
        gpu = self.found["machine"]["device"]
        rows = new_rows(gpu, self.world_size, self.tuned)
        measured = {
            (operation, gpu, self.world_size, one.tuned.rows, one.tuned.format) for operation, one in self.tuned
        }  # fmt: skip
        self.args.out.write_text(text_of_rows(merged(self.args.kept, rows, measured)))


def table(found: Mapping[str, Any]) -> list[str]:
    rows = [["operation", "rows", "format", "tokens", "µs", "tuned", "choice"]]
    for result in found["results"]:
        choice = ", ".join(f"{knob} {value}" for knob, value in result["choice"].items())
        rows.append(
            [
                result["operation"], result["rows"], result["format"], str(result["tokens"]),
                f"{result['us_before']:.1f}", f"{result['us']:.1f}", choice,
            ]
        )  # fmt: skip
    return text_table(rows)


if __name__ == "__main__":
    sys.exit(main())
