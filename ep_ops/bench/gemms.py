"""Find the configurations with which quack's GEMMs of experts on token-major rows take the least time, on one GPU:
`ep-ops bench gemms`.

ep-ops bench gemms --experts 32 --tokens 16384 --out tuning.json       # DeepSeek-V3's sizes, one of 8 ranks
ep-ops bench gemms --hidden 2048 --width 768 --experts 128 --tokens 8192 --out tuning.json
EP_OPS_TUNING=tuning.json python train.py                              # uses them

The experts are those of one rank, and the tokens those that reach it. All configurations of a GEMM take turns. FILE
gets a row (ep_ops/backends/cute/tuning.py) for each GEMM that another configuration than the table's makes faster by
more than --gain; rows for other operations, GPUs, sizes and numbers of tokens that it has already are kept. Needs
quack-kernels 0.6.5.

Steps of an expert MLP: up (x w_in), down (a w_out), and in backward the gradients of the rows and of the matrices of
both. Steps whose names begin with `gated` have SwiGLU or its gradient in their epilogue, and `pairs` are those that go
with them: for matrices w_in that are the transpose of contiguous ones. `swiglu` are the kernels that they replace, and
`torch` PyTorch's GEMM for comparison.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_ops.backends.cute.tuning import KNOBS, TILE, Row
from ep_ops.nn import expert_lists, grouped_mm, quack_mm
from ep_ops.nn.live_rows import SWIGLU, SWIGLU_WEIGHTED_BACKWARD
from ep_ops.nn.sums import copy_rows
from ep_ops.records import GROUPED, TOKEN_MAJOR

from .figures import text_table
from .options import add_sizes, names_of, new_parser, only, positive
from .options import read as read_options
from .ranks import Run, on_every_rank
from .tune import kept, text_of_rows
from .workloads import Workload, draw_route

TILES = ("", "128x256 2x1", "256x128 2x1", "128x192 1x2 pingpong", "256x192 2x1")
STEPS = {
    "up": "gemm", "down": "gemm", "down rows": "gemm", "up rows": "gemm", "up weights": "gemm weights",
    "down weights": "gemm weights", "gated up": "gemm gated", "gated down rows": "gemm gated gradient",
    "pairs up rows": "gemm", "pairs up weights": "gemm weights", "swiglu": "", "swiglu backward": "",
    "copied rows": "", "torch up": "", "torch down": "",
}  # fmt: skip
"""Step -> operation of the table; "": it has no choices."""
GATHERING = "up", "up weights", "gated up", "pairs up weights"
"""Steps whose rows may be gathered."""


class GemmKnobs(NamedTuple):
    """Knobs of a GEMM."""

    tile: str = ""
    gathers: bool = False

    def __str__(self) -> str:
        return (self.tile or "default") + (", gathers" if self.gathers else "")


def tiles(text: str) -> tuple[str, ...]:
    """Parse configurations, separated by commas."""
    given = tuple(text.split(","))
    for tile in given:
        if tile and TILE.fullmatch(tile) is None:
            raise argparse.ArgumentTypeError(
                f"{tile!r} is not a tile; allowed: '128x192 2x1 pingpong', '128x256 2x1', ''"
            )
    return given


def parser() -> argparse.ArgumentParser:
    options = new_parser(__doc__, "gemms", "rows of the tuning table")
    add_sizes(options, width=True)
    options.add_argument("--only", type=names_of(STEPS), default=tuple(STEPS), metavar="NAME,NAME", help=only(STEPS))
    options.add_argument(
        "--tiles", type=tiles, default=TILES, metavar="TILE,TILE", help=f"configurations: {', '.join(TILES[1:])}, '' "
        "for quack's own (default: all of these)",
    )  # fmt: skip
    options.add_argument("--iterations", type=positive, default=12, help="timed calls of each (default: %(default)s)")
    options.add_argument(
        "--gain", type=float, default=0.02, help="least share of the time that a row saves (default: %(default)s)"
    )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = read_options(options, argv)
    if args.device == "cpu" or importlib.util.find_spec("quack") is None:
        options.error("quack's GEMMs need GPUs, and quack-kernels 0.6.5")
    args.ranks = 1
    args.kept = kept(args.out) if args.out else []
    return on_every_rank(TuneGemms.measure, args)


class TuneGemms(Run):
    """Times all configurations of all steps."""

    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        super().__init__(device, args, table, results=[])
        self.found["machine"]["backend"] = "quack"
        self.tuning, self.rows = quack_mm.tuning(device), list[dict[str, Any]]()

    def everything(self) -> None:
        steps = Tensors(self.device, self.args).steps()
        self.steps = len(self.args.only)
        for name in self.args.only:
            self.one(name, *steps[name])
            self.done += 1
        self.tuning.put()

    def one(self, name: str, sizes: str, mean: int, call: Callable[[], Any]) -> None:
        """Time the configurations of a step, by turns."""
        operation = STEPS[name]
        choices = candidates(name, self.args.tiles)
        calls, errors = {}, {}
        for choice in choices:
            run = self.chosen(operation, choice, call)
            try:
                run(0)
                self.timer.synchronize()
            except (RuntimeError, ValueError, TypeError, AssertionError) as error:  # the GPU has no such configuration
                errors[str(choice)] = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            calls[choice] = run
        timed = self.timer.by_turns(
            {str(choice): run for choice, run in calls.items()}, max(1, self.args.iterations // 2), row=2, rest=False
        )  # fmt: skip
        us = {str(choice): timed[str(choice)].median for choice in calls}
        result = {"step": name, "operation": operation, "sizes": sizes, "tokens": mean, "us": us, "errors": errors}
        self.tuning.put()
        layout = TOKEN_MAJOR if name in GATHERING else GROUPED
        now = self.tuning.knobs(operation, layout, tokens=mean, sizes=sizes) if operation else None
        if now is not None and calls:
            before = str(GemmKnobs(now.tile, now.gathers and name in GATHERING))
            best = min(calls, key=lambda choice: us[str(choice)])
            result |= {"before": before, "best": str(best)}
            if us[str(best)] < us.get(before, float("inf")) * (1 - self.args.gain) and not name.startswith("pairs"):
                row = {"operation": operation, "gpu": self.found["machine"]["device"], "rows": layout}
                gathers = {"gathers": best.gathers} if name in GATHERING else {}
                self.rows.append({**row, "tokens": mean // 2, "sizes": sizes, "tile": best.tile, **gathers})
        self.found["results"].append(result)
        self.say(" ".join(map(str, result.values())))
        self.save()

    def chosen(self, operation: str, choice: GemmKnobs, call: Callable[[], Any]) -> Callable[[int], Any]:
        """Return a call for which the table has this choice."""
        rows = [Row(operation, {knob: getattr(choice, knob) for knob in KNOBS[operation]})] if operation else []

        def run(_: int) -> Any:
            self.tuning.put(*rows)
            return call()

        return run

    def save(self) -> None:
        if self.args.out is not None:
            names = [name_of(row) for row in self.rows]
            others = [row for row in self.args.kept if name_of(row) not in names]
            self.args.out.write_text(text_of_rows([*self.rows, *others]))


def candidates(step: str, tiles: Sequence[str]) -> list[GemmKnobs]:
    """Return what is tried for a step."""
    if not STEPS[step]:
        return [GemmKnobs()]
    gathers = (False, True) if step in GATHERING else (False,)
    both = (GemmKnobs(*one) for one in itertools.product(tiles, gathers))
    # A GEMM that gathers cannot have clusters of several columns.
    return [one for one in both if not (one.gathers and "x2" in one.tile.partition(" ")[2])]


def name_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("operation", "gpu", "rows", "tokens", "sizes"))


class Tensors:
    """Random operands of all steps."""

    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        draw = torch.Generator(device).manual_seed(0)
        idx = draw_route(Workload(args.tokens, args.hidden, args.experts, args.top_k), 0, 0, device)
        self.lists = expert_lists(idx, args.experts)
        places = self.lists.rows.shape[0]

        def drawn(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=draw)

        tokens, hidden, width, experts = args.tokens, args.hidden, args.width, args.experts
        self.x, self.g = drawn(tokens, hidden), drawn(places, hidden)
        self.h, self.a = drawn(places, 2 * width), drawn(places, width)
        self.weights = torch.rand(places, generator=draw, device=device)
        self.w_in, self.w_out = drawn(experts, hidden, 2 * width), drawn(experts, width, hidden)
        self.stored = self.w_in.transpose(1, 2).contiguous().transpose(1, 2)

    def steps(self) -> dict[str, tuple[str, int, Callable[[], Any]]]:
        """Return sizes, mean number of rows, and the call of each step."""
        x, g, h, a, w_in, w_out, lists = self.x, self.g, self.h, self.a, self.w_in, self.w_out, self.lists
        offs, rows, along = lists.offs, lists.rows, (lists.offs, lists.counts, 1)
        (_, hidden, columns), width, mean = w_in.shape, w_out.shape[1], rows.shape[0] // offs.shape[0]
        product, gated = quack_mm.gathered_product, quack_mm.GEMMS.gated
        assert gated is not None
        calls: dict[str, tuple[int, int, Callable[[], Any]]] = {
            "up": (hidden, columns, lambda: product(x, w_in, offs, rows)),
            "down": (width, hidden, lambda: product(a, w_out, offs, None)),
            "down rows": (hidden, width, lambda: product(g, w_out.mT, offs, None)),
            "up rows": (columns, hidden, lambda: product(h, w_in.mT, offs, None)),
            "up weights": (hidden, columns, lambda: quack_mm.gathered_gradient(x, h, offs, rows)),
            "down weights": (width, hidden, lambda: quack_mm.weights_gradient(a, g, offs)),
            "gated up": (hidden, columns, lambda: gated.product(x, self.stored, offs, rows)),
            "gated down rows": (hidden, width, lambda: gated.gradient(g, w_out, h, self.weights, offs)),
            "pairs up rows": (columns, hidden, lambda: gated.rows_gradient(h, self.stored.mT, offs)),
            "pairs up weights": (hidden, columns, lambda: gated.weights_gradient(x, h, offs, rows)),
            "swiglu": (columns, width, lambda: SWIGLU(h, *along, 0)),
            "swiglu backward": (columns, width, lambda: SWIGLU_WEIGHTED_BACKWARD(a, h, self.weights, *along)),
            "copied rows": (hidden, hidden, lambda: copy_rows(x, rows, offs)),
            "torch up": (hidden, columns, lambda: grouped_mm(g, w_in, offs)),
            "torch down": (width, hidden, lambda: grouped_mm(a, w_out, offs)),
        }
        return {name: (f"{depth}x{wide}", mean, call) for name, (depth, wide, call) in calls.items()}


def table(found: dict[str, Any]) -> list[str]:
    rows = [["step", "sizes", "rows of an expert", "configuration", "µs"]]
    for result in found["results"]:
        for choice, us in sorted(result["us"].items(), key=lambda item: item[1]):
            mark = " (the table's)" if choice == result.get("before") else ""
            rows.append([result["step"], result["sizes"], str(result["tokens"]), choice + mark, f"{us:.0f}"])
        rows += [[result["step"], result["sizes"], "", choice, text] for choice, text in result["errors"].items()]
    return text_table(rows)


if __name__ == "__main__":
    sys.exit(main())
