"""`ep-ops bench gemms`: what it tries, and the rows that it writes, with stand-ins for quack and times that are made
up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import quacks
import torch

from ep_ops.backends.cute.tuning import Knobs, Tuning, row_of
from ep_ops.bench import gemms
from ep_ops.bench.gemms import GemmKnobs
from ep_ops.nn import quack_mm

H100 = "NVIDIA H100 80GB HBM3"
TILES = ("", "128x256 2x1", "128x192 1x2 pingpong")


def test_steps_are_named_as_their_calls_look_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operation, layout, mean number of rows and sizes of a step, with which its row is written, are those with which
    the GEMM of the step asks for its choices."""
    quacks.install(monkeypatch)
    asked: list[tuple[Any, ...]] = []

    def knobs(operation: str, rows: str, *, tokens: int, sizes: str) -> Knobs:
        asked.append((operation, rows, tokens, sizes))
        return Knobs()

    monkeypatch.setattr(quack_mm, "tuning", lambda device: SimpleNamespace(knobs=knobs))
    args: Any = SimpleNamespace(tokens=24, hidden=32, width=24, experts=3, top_k=2)
    steps = gemms.Tensors(torch.device("cpu"), args).steps()
    assert steps.keys() == gemms.STEPS.keys()
    for name, (sizes, mean, call) in steps.items():
        asked.clear()
        call()
        layout = "token_major" if name in gemms.GATHERING else "grouped"
        assert mean == 16 and asked == [(gemms.STEPS[name], layout, mean, sizes)] * bool(gemms.STEPS[name]), name


def test_what_is_tried() -> None:
    """All tiles, for steps on token-major rows also gathering, for which a cluster has blocks along the rows only."""
    copied = [GemmKnobs(tile) for tile in TILES]
    gathering = [GemmKnobs(tile, True) for tile in TILES[:2]]
    for step in gemms.STEPS:
        found = gemms.candidates(step, TILES)
        wanted = copied + gathering if step in gemms.GATHERING else copied if gemms.STEPS[step] else copied[:1]
        assert sorted(found) == sorted(wanted), step
    with pytest.raises(Exception, match="'128x256' is not a tile; allowed: '128x192 2x1 pingpong', '128x256 2x1', ''"):
        gemms.tiles("128x256 2x1,128x256")


class Run:
    """A run on an H100 whose configurations take times that are made up. Unless it is given, a time is 100 µs."""

    def __init__(self, out: Path, kept: list[dict[str, Any]]) -> None:
        self.us: dict[str, float] = {}
        self.made: Any = object.__new__(gemms.TuneGemms)
        row = {"operation": "gemm", "rows": "token_major", "tile": "128x256 2x1", "gathers": True}
        self.made.tuning, self.made.rows = Tuning(H100, 1, [row_of(row)]), []
        self.made.args = SimpleNamespace(tiles=TILES, iterations=12, gain=0.02, out=out, kept=kept)
        self.made.found = {"machine": {"device": H100}, "results": []}
        self.made.rank = self.made.steps = self.made.done = 0
        self.made.began = 0.0
        self.made.timer = SimpleNamespace(synchronize=lambda: None, by_turns=self.by_turns)

    def by_turns(self, calls: dict[str, Callable[[int], Any]], rounds: int, **how: Any) -> dict[str, Any]:
        for call in calls.values():
            call(0)
        return {name: SimpleNamespace(median=self.us.get(name, 100.0)) for name in calls}

    def step(self, name: str, us: dict[str, float], lacks: str | None = None) -> list[tuple[str, bool]]:
        """Time a step, and return the choices with which its call ran. `lacks`: a tile that the GPU does not have."""
        self.us, ran = us, []

        def call() -> None:
            layout = "token_major" if name in gemms.GATHERING else "grouped"
            knobs = self.made.tuning.knobs(gemms.STEPS[name] or "gemm", layout, tokens=900, sizes="64x32")
            if knobs.tile == lacks:
                raise RuntimeError("no such tile")
            ran.append((knobs.tile, knobs.gathers))

        self.made.one(name, "64x32", 900, call)
        return ran


def test_rows(tmp_path: Path) -> None:
    """A step gets a row if a configuration saves more of the time than the least share, compared with that of the
    table. The row replaces one of its name, and a program that reads the file uses it."""
    out = tmp_path / "rows.json"
    name = {"operation": "gemm", "gpu": H100, "rows": "token_major", "tokens": 450, "sizes": "64x32"}
    other = {**name, "tokens": 100, "tile": ""}
    run = Run(out, [{**name, "tile": "256x128 2x1"}, other])
    before, best = "128x256 2x1, gathers", "128x192 1x2 pingpong"
    ran = run.step("up", {before: 80.0, best: 78.5})
    assert set(ran) == {*((tile, False) for tile in TILES), *((tile, True) for tile in TILES[:2])}
    (result,) = run.made.found["results"]
    assert (result["before"], result["best"], result["us"][before]) == (before, best, 80.0)
    assert json.loads(out.read_text()) == [{**name, "tile": "256x128 2x1"}, other], "it saves less than 2 %"
    assert run.made.tuning.knobs("gemm", "token_major", tokens=900, sizes="64x32").gathers, "the table counts again"

    run.step("up", {before: 80.0, best: 78.3})
    new = {**name, "tile": best, "gathers": False}
    assert json.loads(out.read_text()) == [new, other]
    read = Tuning(H100, 1, [row_of(row) for row in json.loads(out.read_text())])
    for tokens, tile in ((450, best), (900, best), (449, "")):
        assert read.knobs("gemm", "token_major", tokens=tokens, sizes="64x32").tile == tile, tokens

    run.step("pairs up weights", {best: 50.0})  # they go with the steps before them
    run.step("swiglu", {"default": 50.0})
    assert json.loads(out.read_text()) == [new, other]
    run.step("down", {"128x256 2x1": 40.0, best: 30.0}, lacks=best)
    down = {**name, "rows": "grouped", "tile": "128x256 2x1"}
    assert json.loads(out.read_text()) == [new, down, other]
    assert run.made.found["results"][-1]["errors"] == {best: "RuntimeError: no such tile"}
    lines = gemms.table(run.made.found)
    assert any(line.split()[-4:] == ["gathers", "(the", "table's)", "80"] for line in lines)
    assert lines[-1].endswith("RuntimeError: no such tile")
