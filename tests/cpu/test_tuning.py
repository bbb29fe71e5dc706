"""The table of measured choices, and `ep-ops bench tune`, which writes its rows, with times that are made up."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import run_ranks

import ep_ops
from ep_ops import backends, creation
from ep_ops.backends.cute import tuning
from ep_ops.backends.cute.tuning import KNOBS, TABLE, Knobs, Row, Tuning, count, row_of
from ep_ops.bench import tune
from ep_ops.bench.tune import CASES, Change
from ep_ops.commands.launch import process_group
from ep_ops.config import Config
from ep_ops.moe import MoECommunicator, MoECommunicatorConfig

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


# ---------------------------------------------------------------------- the table


@pytest.mark.parametrize("gpu", [H100, H200, "NVIDIA GH200 480GB", "NVIDIA B200", ""])
@pytest.mark.parametrize("ranks", [1, 2, 3, 72])
def test_every_call_has_every_knob(gpu: str, ranks: int) -> None:
    """The table has a value of each knob for calls of any kind, on any GPU. SMs may be left to the model."""
    rows = [row for row in TABLE if row.names(gpu, ranks)]
    for operation, layout, format, tokens in itertools.product(
        KNOBS, tuning.LAYOUTS, ("", "wire:e4m3/32/mx", "e4m3/128/pow2=columns"), (0, 16, 1 << 20)
    ):
        has = {knob for row in rows if row.holds(operation, layout, format, tokens) for knob in row.knobs}
        assert has | {"sms"} >= set(KNOBS[operation])
        found = Tuning(gpu, ranks).knobs(operation, layout, format, tokens)
        assert set(Knobs._field_defaults) >= has and all(getattr(found, knob) is not None for knob in has)


def test_the_first_row_that_has_a_knob_counts() -> None:
    """Each knob comes from the first row that holds for the call and has it; rows that are put come before the
    table's, and rows of a file between them."""
    of_file = Row("combine", {"spare": Fraction(1, 3), "joins": False}, ranks=2, tokens=100)
    two = Tuning(H200, 2, [of_file])
    assert two.knobs("combine", tokens=99) == Knobs(Fraction(5, 6), spare=Fraction(1, 4), joins=True)
    assert two.knobs("combine", tokens=100) == Knobs(Fraction(5, 6), spare=Fraction(1, 3), joins=False)
    assert Tuning(H200, 4, [of_file]).knobs("combine", tokens=100).joins
    assert two.knobs("combine", "token_major", tokens=5000).spare == Fraction(1, 3)
    two.put(Row("combine", {"sms": None, "spare": 3}, rows="token_major", format="wire:*"))
    assert two.knobs("combine", "token_major", "wire:e4m3/32/mx", 200) == Knobs(None, spare=3, joins=False)
    assert two.knobs("combine", "grouped", "wire:e4m3/32/mx", 200).spare == Fraction(1, 3)
    two.put()
    assert two.knobs("combine", "token_major", "wire:e4m3/32/mx", 200).sms == Fraction(5, 6)


def test_rows_of_gemms() -> None:
    """Rows name sizes of matrices, the least mean number of rows of an expert, and what a GEMM does."""
    rows = [
        {"operation": "gemm", "sizes": "64x*", "tokens": 8, "tile": "128x256 2x1"},
        {"operation": "gemm", "gpu": "NVIDIA H100*", "sizes": "64x32", "gathers": False},
    ]
    found = Tuning(H100, 1, map(row_of, rows))
    assert found.knobs("gemm", tokens=8, sizes="64x32") == Knobs(tile="128x256 2x1", gathers=False)
    assert found.knobs("gemm", tokens=7, sizes="64x32") == Knobs(gathers=False)
    assert found.knobs("gemm", tokens=8, sizes="32x64") == Knobs(gathers=True)
    assert found.knobs("gemm weights", tokens=8, sizes="64x32") == Knobs(gathers=True)
    found.put(row_of({"operation": "gemm", "rows": "token_major", "tile": "128x128 1x1"}))
    assert found.knobs("gemm", "token_major", tokens=8, sizes="64x32") == Knobs(tile="128x128 1x1", gathers=False)
    assert found.knobs("gemm", tokens=8, sizes="64x32") == Knobs(tile="128x256 2x1", gathers=False)


def test_names_of_gpus() -> None:
    """Rows of H200s do not hold for GH200s, whose name contains theirs."""
    packed = "e4m3/32/mx=packed"
    found = [Tuning(gpu, 4).knobs("dispatch", format=packed).sms for gpu in (H200, H100, "NVIDIA GH200 480GB")]
    assert found == [Fraction(1, 2), Fraction(5, 11), Fraction(5, 11)]


def test_knobs_as_numbers_of_blocks() -> None:
    """Parts are rounded down, exactly, and no more blocks are taken than there are."""
    assert [count(Fraction(n, 132), 132) for n in range(133)] == list(range(133))
    assert (count(Fraction(5, 6), 66), count(12, 132), count(12, 8), count(Fraction(1, 200), 132)) == (55, 12, 8, 0)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (7, "the row is 7; allowed: an object"),
        ({}, "operation is None; allowed: dispatch, combine, "),
        ({"operation": []}, "operation is []; allowed: dispatch, combine, "),
        (
            {"operation": "combine", "push": 3},
            "push is 3 in a row of operation 'combine'; allowed keys: operation, gpu, ranks, rows, format, ",
        ),
        (
            {"operation": "combine", "blocks": 3},
            "blocks is 3 in a row of operation 'combine'; allowed keys: operation, gpu, ranks, rows, format, tokens",
        ),
        ({"operation": "combine", "tokens": "3"}, "tokens is '3'; allowed: an int of at least 0"),
        ({"operation": "combine", "tokens": -1}, "tokens is -1; allowed: an int of at least 0"),
        ({"operation": "combine", "ranks": True}, "ranks is True; allowed: an int of at least 1"),
        ({"operation": "combine", "ranks": 0}, "ranks is 0; allowed: an int of at least 1"),
        ({"operation": "combine", "gpu": 3}, "gpu is 3; allowed: text"),
        ({"operation": "combine", "rows": "padded"}, "rows is 'padded'; allowed: grouped, token_major"),
        ({"operation": "combine", "spare": "3/2"}, "spare is '3/2'; allowed: an int of 0..1024, or a fraction of 0..1"),
        ({"operation": "combine", "spare": "1/0"}, "spare is '1/0'"),
        ({"operation": "combine", "spare": 0.5}, "spare is 0.5"),
        ({"operation": "combine", "spare": None}, "spare is None"),
        ({"operation": "combine", "joins": 1}, "joins is 1; allowed: true or false"),
        ({"operation": "dispatch", "push": -1}, "push is -1"),
        ({"operation": "dispatch", "push": True}, "push is True"),
        ({"operation": "gemm", "gathers": 1}, "gathers is 1; allowed: true or false"),
        ({"operation": "gemm", "tile": "128x192"}, "tile is '128x192'; allowed: text such as '128x192 2x1 pingpong', "),
        ({"operation": "gemm", "tile": 3}, "tile is 3; allowed: text"),
        ({"operation": "gemm", "sizes": 3}, "sizes is 3; allowed: text"),
        ({"operation": "gemm gated gradient", "gathers": True}, "gathers is True in a row of operation 'gemm gated gr"),
        (
            {"operation": "gemm", "ranks": 2},
            "ranks is 2 in a row of operation 'gemm'; allowed keys: operation, gpu, rows, tokens, sizes, gathers, tile",
        ),
        (
            {"operation": "combine", "sizes": "8x8"},
            "sizes is '8x8' in a row of operation 'combine'; allowed keys: operation, gpu, ranks, rows, format, tokens",
        ),
        (
            {"operation": "dispatch", "surplus": 3, "tokens": 1},
            "surplus is given with tokens; allowed: only gpu and ranks",
        ),
        (
            {"operation": "dispatch", "surplus": 3, "rows": "grouped", "format": ""},
            "surplus is given with rows, format; allowed: only gpu and ranks",
        ),
    ],
)
def test_invalid_rows(row: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has an invalid row is rejected by a text that names the file, the key and what is allowed."""
    with pytest.raises(ValueError) as raised:
        row_of(row)
    assert text in str(raised.value)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"operation": "combine"}, row]))
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    with pytest.raises(ValueError) as raised:
        tuning.rows_given()
    assert str(raised.value).startswith(f"EP_OPS_TUNING is {str(path)!r}: row 1: ") and text in str(raised.value)


def test_the_file_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    assert tuning.rows_given() == []
    path = tmp_path / "rows.json"
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    for content, error in (
        (None, "the file cannot be read .*No such file.*; allowed: a JSON file"),
        (b"", "the file is not JSON .*; allowed: a list of rows"), (b"[", "is not JSON"),
        (b"\xff", "is not JSON"), (b"[" * 100_000, "is not JSON"),
        (b"{}", "the file has a dict; allowed: a list of rows"),
    ):  # fmt: skip
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^EP_OPS_TUNING is {str(path)!r}: .*{error}"):
            tuning.rows_given()
    path.write_text('[{"operation": "latency combine", "gpu": "NVIDIA*", "tokens": 3, "send": "1/4"}]')
    assert tuning.rows_given() == [Row("latency combine", {"send": Fraction(1, 4)}, "NVIDIA*", tokens=3)]


INVALID = '[{"operation": "dispatch", "push": -1}]'


def rejected(folder: str, backend: str, ranks: tuple[int, ...]) -> tuple[str, list[str]]:
    """Create a communicator where these ranks name an invalid file. Return the error, and the backends created."""
    made: list[str] = []
    path = Path(folder, "invalid.json" if dist.get_rank() in ranks else "valid.json")
    with (
        mock.patch.dict("os.environ", {tuning.VARIABLE: str(path)}),
        mock.patch.object(backends, "_plain", lambda kind, member: made.append(kind)),
        mock.patch.object(Config, "_sizes_problem", lambda _: None),  # as on a GPU
        mock.patch.object(creation, "_unfit", lambda *_: None),
        pytest.raises(ValueError) as raised,
    ):
        ep_ops.Communicator(
            num_experts=4, hidden_size=128, top_k=2, max_tokens_per_rank=4, backend=backend, device="cpu"
        )
    return str(raised.value), made


@pytest.mark.parametrize("backend", ["auto", "reference", "cute"])
def test_an_invalid_file_is_rejected_before_anything_is_allocated(backend: str, tmp_path: Path) -> None:
    """All ranks raise the same text when a communicator is created, on each backend."""
    (tmp_path / "invalid.json").write_text(INVALID)
    (tmp_path / "valid.json").write_text("[]")
    where = f"rank 1: EP_OPS_TUNING is '{tmp_path}/invalid.json': row 0"
    text = f"{where}: push is -1; allowed: an int of 0..1024, or a fraction of 0..1 as text"
    assert run_ranks(2, rejected, str(tmp_path), backend, (1,)) == [(text, [])] * 2


def test_a_valid_file_is_ignored_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"operation": "dispatch", "push": 3}]')
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    sizes: Any = dict(num_experts=4, hidden_size=128, top_k=2, max_tokens_per_rank=4, device="cpu")
    with ep_ops.Communicator(**sizes) as comm:
        assert comm.backend.name == "reference"
    path.write_text(INVALID)
    with pytest.raises(ValueError, match="^rank 0: EP_OPS_TUNING is .*: row 0: push is -1; allowed: "):
        ep_ops.Communicator(**sizes)
    with pytest.raises(ValueError, match="^rank 0: EP_OPS_TUNING is .*: row 0: push is -1; allowed: "):
        MoECommunicator(MoECommunicatorConfig(num_experts=4, hidden_size=128, top_k=2, max_tokens_per_rank=4))


# ---------------------------------------------------------------------- the search


def test_search_finds_the_least_time() -> None:
    """The search varies each knob until nothing helps, also where one knob's best value depends on another's."""
    tried: list[dict[str, int]] = []

    def time(choice: dict[str, int]) -> float:
        tried.append(choice)
        a, b = choice["a"], choice["b"]
        return 100 + (a - 3) ** 2 + (b - a) ** 2 / 2

    best, least, before = tune.search({"a": 0, "b": 0}, {"a": range(6), "b": range(6)}, time, 0.0)
    assert (best, least, before) == ({"a": 3, "b": 3}, 100.0, 109.0)
    assert all(choice in tried for choice in ({"a": 0, "b": 0}, {"a": 3, "b": 3}))


def test_search_ignores_small_gains() -> None:
    """The choice stays if a change saves less than the given share of the time, which may be noise."""
    times = {1: 100.0, 2: 99.2, 3: 98.9, 4: 98.0}
    start = {"a": 1}
    assert tune.search(start, {"a": [1, 2]}, lambda choice: times[choice["a"]], 0.01) == (start, 100.0, 100.0)
    found = tune.search(start, {"a": [1, 2, 3, 4]}, lambda choice: times[choice["a"]], 0.01)
    assert found == ({"a": 3}, 98.9, 100.0)


@pytest.mark.parametrize("tuned", CASES, ids=lambda tuned: tuned.call)
def test_candidates_are_valid(tuned: tune.Tuned) -> None:
    """Every value to try is one that rows can have, and of a knob that the operation has."""
    for operation in (tuned.operation, f"latency {tuned.operation}", "combine across domains"):
        for knob, values in tune.candidates(operation, tuned, 132, 56, 98).items():
            assert len(values) > 3
            for value in values:
                assert row_of({"operation": operation, knob: tune.written(value)}).knobs == {knob: value}


# ---------------------------------------------------------------------- rows


def found(tokens: int, choice: dict[str, Any], case: int = 0) -> Change:
    return Change(CASES[case], tokens, {"sms": None, "push": 12}, {"sms": None, "push": 12} | choice, 2.0, 1.0)


def test_rows_make_the_choices() -> None:
    """Rows read back make exactly the choices that were found, at all numbers of tokens from the smallest one on, with
    as few rows as that takes; below it the table counts."""
    quarter, third = Fraction(1, 4), Fraction(1, 3)
    choices = {64: {}, 128: {"sms": quarter}, 512: {"sms": quarter}, 1024: {}, 2048: {"sms": third, "push": 8}}
    ones = [("dispatch", found(tokens, choice)) for tokens, choice in reversed(choices.items())]
    rows = tune.new_rows(H200, 4, [*ones, ("latency dispatch", found(16, {}))])
    assert [row["tokens"] for row in rows] == [2048, 1024, 128, 64]
    assert rows[0] == {
        "operation": "dispatch", "gpu": H200, "ranks": 4, "rows": "grouped", "format": "", "tokens": 2048,
        "sms": "1/3", "push": 8,
    }  # fmt: skip
    read = Tuning(H200, 4, [row_of(row) for row in json.loads(tune.text_of_rows(rows))])
    for tokens in (64, 127, 128, 1000, 1024, 2047, 2048, 9999):
        choice = {"sms": None, "push": 12} | choices[max(n for n in choices if n <= tokens)]
        knobs = read.knobs("dispatch", "grouped", "", tokens)
        assert (knobs.sms, knobs.push) == (choice["sms"], choice["push"]), tokens
    assert read.knobs("dispatch", "grouped", "e4m3/32/mx=packed", 4096).sms == Fraction(1, 2), "another row's"
    assert tune.new_rows(H200, 4, [("dispatch", found(64, {}))]) == []


def test_rows_of_others_are_kept(tmp_path: Path) -> None:
    """A file keeps rows of other GPUs, numbers of ranks and operations; those of what was measured are replaced."""
    old = [row for gpu in (H100, H200) for row in tune.new_rows(gpu, 2, [("dispatch", found(64, {"push": 6}))])]
    new = tune.new_rows(H200, 2, [("dispatch", found(64, {"push": 8}))])
    merged = tune.merged(old, new, {("dispatch", H200, 2, "grouped", "")})
    assert [(row["gpu"], row["push"]) for row in merged] == [(H200, 8), (H100, 6)]
    path = tmp_path / "rows.json"
    path.write_text("")
    assert tune.kept(path) == []
    path.write_text(tune.text_of_rows(merged))
    assert tune.kept(path) == merged and len(path.read_text().splitlines()) == 4
    path.write_text('{"version": 1}')
    with pytest.raises(SystemExit, match="--out is .*; allowed: a list of rows"):
        tune.kept(path)


@pytest.mark.parametrize("hidden", [256, pytest.param(192, marks=pytest.mark.drawn)])
def test_all_cases_are_timed(hidden: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run makes the calls of all cases that the hidden size has formats for, with each number of tokens."""
    ran = []

    def one(run: Any, comm: Any, calls: Any, tuned: tune.Tuned, tokens: int) -> None:
        assert calls.workload.tokens == tokens and calls.call(tuned.call)(0) is not None
        ran.append((tokens, tuned.call))

    monkeypatch.setattr(tune.Tune, "one", one)
    every = [tuned.call for tuned in CASES]
    args = SimpleNamespace(
        tokens=(3, 8), hidden=hidden, experts=8, top_k=2, only=every, out=None, sharing=1, backend="reference",
        domain_size=None, staging_bytes=None,
    )  # fmt: skip
    with process_group(0, str(tmp_path / "store"), 1, "cpu") as device:
        tune.Tune.measure(device, args)  # type: ignore[arg-type]
    names = [tuned.call for tuned in CASES if not tuned.format or hidden == 256]
    assert ran == [(tokens, name) for tokens in (3, 8) for name in names]


class Backend:
    """Stands for a cute backend whose operations take a time that follows from the knobs."""

    def __init__(self) -> None:
        self.tuning, self.latency = Tuning(H100, 2), SimpleNamespace(tokens=64)
        self.budget = SimpleNamespace(beyond=56, most_dispatch=98, most_combine=132)
        self.forgotten = 0

    def tune(self, *rows: Row) -> None:
        self.tuning.put(*rows)

    def forget(self) -> None:
        self.forgotten += 1

    def us(self, operation: str, format: str, tokens: int) -> float:
        knobs = self.tuning.knobs(operation, "grouped", format, tokens)
        if operation == "latency combine":
            return 10 + abs(count(knobs.send, 132) - 30)
        return 200 + (0 if knobs.spare == Fraction(1, 8) else 20)


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with times that are made up: from the calls to a file of rows that make the best choices, and a table."""
    backend, out = Backend(), tmp_path / "rows.json"
    comm: Any = SimpleNamespace(
        backend=backend, multiprocessors=132, config=SimpleNamespace(domains=()), calls=SimpleNamespace()
    )
    comm.calls.forget = backend.forget
    run: Any = object.__new__(tune.Tune)
    run.rank, run.world_size, run.steps, run.done, run.began, run.tuned = 0, 2, 0, 0, 0.0, []
    run.args = SimpleNamespace(out=out, iterations=3, gain=0.01, kept=[])
    run.found = {"machine": {"device": H100}, "results": []}
    (combine,) = (tuned for tuned in CASES if tuned.call == "combine")
    at: dict[str, Any] = {}
    run.timer = SimpleNamespace(graph=lambda call, iterations: (SimpleNamespace(median=backend.us(*call(0))), None))
    calls: Any = SimpleNamespace(call=lambda name: lambda i: (at["operation"], "", at["tokens"]))
    for tokens, operation in ((16, "latency combine"), (4096, "combine")):
        at |= {"tokens": tokens, "operation": operation}
        run.one(comm, calls, combine, tokens)
    assert backend.forgotten > 10, "calls are bound anew for each choice"
    assert json.loads(out.read_text()) == [
        {"operation": "latency combine", "gpu": H100, "ranks": 2, "rows": "grouped", "format": "", "tokens": 16,
         "send": "5/22"},
        {"operation": "combine", "gpu": H100, "ranks": 2, "rows": "grouped", "format": "", "tokens": 4096,
         "spare": "1/8"},
    ]  # fmt: skip
    assert backend.tuning.knobs("combine").spare == 1, "the table's, once the run has ended"
    lines = tune.table(run.found)
    assert lines[1].split() == ["latency", "combine", "grouped", "16", "46.0", "10.0", "send", "5/22"]
    assert lines[2].split() == ["combine", "grouped", "4096", "220.0", "200.0", "spare", "1/8"]
    assert "combine grouped" in capsys.readouterr().out
