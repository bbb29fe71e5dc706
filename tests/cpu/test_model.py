"""The scale model, `ep-ops bench model`: its formulas against counts on all routes, and against the protocols."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from cases import fresh_seed
from simulator import cases
from simulator.network import Network, Place, Word
from simulator.rank import Rank
from simulator.shape import Operation, Shape

import ep_ops
from benchmarks import scale_model
from cute_kernels.heap import Problem
from ep_ops.bench import model, model_formulas
from ep_ops.bench.model_formulas import Layout

ROOT = Path(ep_ops.__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


# ---------------------------------------------------------------------- traffic


def counted(layout: Layout, ids: Sequence[Sequence[Sequence[int]]]) -> model_formulas.ModelTraffic:
    """Count the traffic of one route, token by token; ranks are numbered domain by domain. Returns means over ranks."""
    held, size = layout.experts // layout.ranks, layout.domain_ranks
    found: collections.Counter[str] = collections.Counter()
    for source, tokens in enumerate(ids):
        for chosen in tokens:
            ranks = {e // held for e in chosen}
            found["copies"] += len(ranks)
            found["staged"] += sum(rank % size == source % size for rank in ranks)  # at this rank itself
            found["crossing"] += len({rank // size for rank in ranks} - {source // size})
            found["few_near"] += sum(rank // size == source // size and rank != source for rank in ranks)
            found["few_far"] += sum(rank // size != source // size for rank in ranks)
            found["expanded"] += len(chosen)
    return model_formulas.ModelTraffic(**{key: value / layout.ranks for key, value in found.items()})


@pytest.mark.parametrize("domains, size", [(1, 4), (2, 1), (2, 4), (4, 2), (3, 3)])
@pytest.mark.parametrize("held, top_k", [(4, 3), (1, 1), (2, 2)])
def test_traffic(domains: int, size: int, held: int, top_k: int) -> None:
    """Traffic is the mean of all routes: each rank has a token for every choice of experts."""
    experts = held * domains * size
    choices = list(itertools.combinations(range(experts), min(top_k, experts)))
    layout = Layout(domains, size, tokens=len(choices), experts=experts, top_k=top_k)
    of_formula, of_route = model_formulas.expected(layout), counted(layout, [choices] * layout.ranks)
    for field in dataclasses.fields(model_formulas.ModelTraffic):
        mean, found = getattr(of_formula, field.name), getattr(of_route, field.name)
        assert found == pytest.approx(mean, rel=1e-9, abs=1e-9), field.name
    assert of_formula.near == of_formula.copies - of_formula.staged


def test_traffic_is_what_the_benchmark_counts() -> None:
    """The busiest rank of a random route has hardly more than the average one."""
    compared = 0
    for name in ("throughput-4", "throughput-2"):
        run = recorded(name)
        for result in run["results"]:
            if result["routing"] == "balanced" and result["op"] == "dispatch" and result["tokens"] >= 512:
                layout = Layout(1, run["world_size"], result["tokens"], result["hidden"], top_k=result["top_k"])
                near = model_formulas.many_bytes(layout, "dispatch").near
                assert -0.025 < near / result["nvlink_bytes"] - 1 < 0.005
                compared += 1
    assert compared > 30


def test_traffic_rejects_uneven_experts() -> None:
    with pytest.raises(ValueError, match="experts is 256; allowed: a multiple of the 72 ranks"):
        model_formulas.expected(Layout(1, 72))


# ---------------------------------------------------------------------- against the protocol


class Counting(Network):
    """Counts what crosses, and which places are used."""

    def __init__(self, world_size: int, seed: int) -> None:
        super().__init__(world_size, seed)
        self.rows: list[collections.Counter[str]] = [collections.Counter() for _ in range(world_size)]
        self.puts: collections.Counter[int] = collections.Counter()
        runs.append(self)

    def put(self, source: int, target: int, cells: list[tuple[Place, Place]], word: Word | None, value: Any) -> None:
        self.puts[source] += 1
        self.rows[source]["puts: " + word[0]] += 1
        for _, there in cells:
            self.rows[source][there[0]] += 1
        super().put(source, target, cells, word, value)


class Reading(Rank):
    def read(self, rank: int, place: Place) -> Any:
        value = super().read(rank, place)
        found = self.network.rows[self.rank]
        if rank != self.rank and place[0] in ("staged", "rows in"):
            found["near"] += 1
        return value


runs: list[Counting] = []


def run_everywhere(layout: Small, kinds: list[str], rows: int = 1) -> Counting:
    """Every token to every rank, each with one expert: nothing is left to chance."""
    size, ranks = layout.domain_ranks, layout.ranks
    shape = Shape(
        tuple(tuple(range(d * size, (d + 1) * size)) for d in range(layout.domains)), 1, ranks, layout.tokens,
        layout.batch_tokens, layout.tiles, rows=rows,
    )  # fmt: skip
    ids = ((tuple(range(ranks)),) * layout.tokens,) * ranks
    along = {"combine": 0, "few_combine": 0}
    operations = tuple(
        Operation(number, kind, ids, (layout.tokens * ranks,) * ranks, along.get(kind, -1))
        for number, kind in enumerate(kinds)
    )
    cases.run(cases.Case(shape, operations, seed=fresh_seed()), (Counting, Reading))
    return runs.pop()


@dataclasses.dataclass(frozen=True)
class Small(Layout):
    """With batches and tiles that are small enough to be simulated. 0: those of the kernels."""

    batch_tokens: int = 0
    tiles: int = 0

    @cached_property
    def problem(self) -> Problem:
        whole = super().problem
        given = {"batch_tokens": self.batch_tokens or whole.batch_tokens, "tiles": self.tiles or whole.tiles}
        kind = type("SmallProblem", (Problem,), given)
        return kind(**{field.name: getattr(whole, field.name) for field in dataclasses.fields(Problem)})


def everywhere(domains: int, size: int, **sizes: int) -> Small:
    ranks = domains * size
    return Small(domains, size, experts=ranks, top_k=ranks, **sizes)


LAYOUTS = [
    everywhere(2, 2, tokens=4, batch_tokens=2, tiles=2, few_tokens=4),
    everywhere(3, 1, tokens=4, batch_tokens=1, tiles=1, few_tokens=4),
    everywhere(2, 3, tokens=2, batch_tokens=2, tiles=1, few_tokens=2),
    everywhere(1, 3, tokens=2, batch_tokens=2, tiles=2, few_tokens=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_and_puts_are_the_protocols(layout: Small) -> None:
    """Rows and puts are those of the protocol, but scalars return only where they are gradients."""
    dispatch, combine = (model_formulas.many_bytes(layout, op) for op in ("dispatch", "combine"))
    first = run_everywhere(layout, ["dispatch"])
    then = run_everywhere(layout, ["dispatch", "combine"])
    for rank in range(layout.ranks):
        found, both = first.rows[rank], then.rows[rank] - first.rows[rank]
        assert found["near"] * layout.row_bytes == pytest.approx(dispatch.near)
        assert found["rows in"] * layout.row_bytes == pytest.approx(dispatch.far)
        assert first.puts[rank] == pytest.approx(dispatch.puts)
        assert both["rows in"] * layout.row_bytes == pytest.approx(combine.far)
        assert then.puts[rank] - first.puts[rank] - both["puts: returned"] == pytest.approx(combine.puts)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("combine", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_and_puts_of_few_tokens_are_the_protocols(layout: Small, combine: bool, rows: int) -> None:
    first = run_everywhere(layout, ["few_dispatch"], rows=rows)
    found = run_everywhere(layout, ["few_dispatch", "few_combine"], rows=rows) if combine else first
    moved = model_formulas.few_bytes(layout, combine, rows)
    routes = 0 if combine else 512 * (layout.ranks - layout.domain_ranks)
    bytes_of_row = 512 * -(-(layout.row_bytes + (0 if combine else 4 * layout.top_k)) // 480)
    for rank in range(layout.ranks):
        before = (first.rows[rank]["lines"], first.puts[rank]) if combine else (0, 0)
        assert (found.rows[rank]["lines"] - before[0]) * bytes_of_row == pytest.approx(moved.far - routes)
        assert found.puts[rank] - before[1] == pytest.approx(moved.puts)


AREAS = {"lines": "few rows", "few routes": "few routes"}


def used(network: Counting, rank: int) -> set[tuple[str, Any]]:
    """Places of few tokens in a rank's first bank that something was ever stored in, by the names of the formulas."""
    found: set[tuple[str, Any]] = set()
    for area, bank, *at in network.memory[rank]:
        kind = area.removesuffix(" out")
        if bank == 0 and kind in AREAS:
            found.add((AREAS[kind] + " to be sent" * (kind != area), tuple(at)))
    found |= {("few words", word) for word in network.words[rank] if word[1:2] == (0,) and word[0] in AREAS}
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_places_of_few_tokens_are_the_protocols(layout: Small) -> None:
    """Where tokens go everywhere every place is used."""
    kinds = ["few_dispatch", "few_combine", "few_dispatch", "few_dispatch"]
    network = run_everywhere(layout, kinds)
    for rank in range(layout.ranks):
        ranks, rows = layout.ranks, layout.ranks * layout.few_tokens
        both = {name + end: n for name, n in (("few rows", rows), ("few routes", ranks)) for end in ("", " to be sent")}
        assert collections.Counter(name for name, _ in used(network, rank)) == both | {"few words": rows + ranks}
        heap, bytes_of = layout.heap, {"lines": rows, "routes": ranks}
        for name, places in bytes_of.items() if layout.domains > 1 else ():
            assert heap.size[f"{name}_words"] == 8 * places and heap.size[f"{name}_out"] == heap.size[name]


# ---------------------------------------------------------------------- memory


def test_staging_of_few_tokens() -> None:
    """The staging of few tokens equals numbers computed by hand for 2 domains of 2 ranks."""
    layout = Layout(2, 2, tokens=3, hidden=8, itemsize=2, experts=4, top_k=2, few_tokens=2)
    expected = 2 * 4 * 2 * 512 + 2 * 4 * 512 + 8 * 4 * (2 + 1)
    assert model_formulas.staging(layout)["few tokens"] == 2 * expected


def test_rounds_keep_the_limit() -> None:
    layout = Layout(8, 8)
    whole = model_formulas.many_staging(layout)
    assert model_formulas.in_rounds(layout, whole).rounds == 1
    halved = model_formulas.in_rounds(layout, whole - 1)
    assert halved.rounds == 2 and model_formulas.many_staging(halved) < whole
    small = model_formulas.in_rounds(layout, 400 * 2**20)
    assert model_formulas.many_staging(small) <= 400 * 2**20
    assert small.rounds * small.round_tokens >= layout.tokens
    with pytest.raises(ValueError, match="limit is 1000 bytes; rounds of one token take"):
        model_formulas.in_rounds(layout, 1000)


def test_the_page_has_the_formulas_numbers() -> None:
    page = (ROOT / "benchmarks/results/model.md").read_text()
    rows = re.findall(r"^\| (\d+) × (\d+) \| (\d+) \| ([\d., |]+) \|$", page, re.M)
    assert len(rows) >= 6
    for domains, size, tokens, numbers in rows:
        ranks = int(domains) * int(size)
        experts = ranks * math.ceil(256 / ranks)
        layout = Layout(int(domains), int(size), round_tokens=int(tokens), experts=experts)
        of = model_formulas.staging(layout)
        beside = sum(of[name] for name in ("routes", "scalars", "wanted", "words"))
        values = (
            of["rows"] + of["rows to be sent"],
            of["pushed sums"],
            beside,
            model_formulas.many_staging(layout),
            of["few tokens"],
        )
        assert numbers.split(" | ") == [f"{value / 2**30:.2f}" for value in values], (domains, size, tokens)


# ---------------------------------------------------------------------- times


GPU = model_formulas.Gpu(
    "", pull=100e9, push=200e9, memory=1e12, flag=0.5,
    constants={"dispatch": 20.0, "combine": 30.0, "few dispatch": 5.0, "few combine": 3.0}, source="",
)  # fmt: skip
WIRE = model_formulas.WireSpeed("", rate=10e9, latency=8.0, put=0.1, source="")


def test_what_binds() -> None:
    """The link, the memory, or the network; each by hand."""
    layout = dataclasses.replace(everywhere(1, 2, tokens=1000), hidden=5000)  # rows of 10 kB, each token to both ranks
    near = model_formulas.many_bytes(layout, "dispatch").near
    assert near == 1000 * 1e4
    assert model_formulas.many_us(GPU, None, layout, "dispatch") == pytest.approx(20 + near / 100e3)
    slow = dataclasses.replace(GPU, memory=1e11)
    rows = 2 * 1000 + 2000 + 2000  # staged, read and written; fetched; stored
    assert model_formulas.many_us(slow, None, layout, "dispatch") == pytest.approx(20 + rows * 1e4 / 1e5)
    rows = 2000 + 2000 + 2000 + 1000  # expert rows read; sums written; read; tokens written
    assert model_formulas.many_us(slow, None, layout, "combine") == pytest.approx(30 + rows * 1e4 / 1e5)

    link = dataclasses.replace(GPU, push=1e9)
    assert model_formulas.many_us(link, None, layout, "combine") == pytest.approx(30 + near / 1e3)

    apart = dataclasses.replace(layout, domains=2, domain_ranks=1, round_tokens=500)
    far = model_formulas.many_bytes(apart, "dispatch").far
    constant = 20 + 8 + 0.5 + 13 * 10_000 / 10e3
    assert far == 1000 * 1e4
    assert model_formulas.many_us(GPU, WIRE, apart, "dispatch") == pytest.approx(2 * constant + far / 10e3)
    dear = dataclasses.replace(WIRE, put=1000.0)
    puts = model_formulas.many_bytes(apart, "dispatch").puts
    assert model_formulas.many_us(GPU, dear, apart, "dispatch") == pytest.approx(2 * constant + puts * 1000)


def test_few_tokens() -> None:
    layout = dataclasses.replace(everywhere(1, 2, tokens=3), hidden=6000)
    line, route = 128 / 120, 2 * 2 * 3  # bytes of a line and its payload; of a route
    assert model_formulas.few_us(GPU, layout, False) == pytest.approx(5 + (12000 * 3 + route) * line / 200e3)
    assert model_formulas.few_us(GPU, layout, True) == pytest.approx(3 + 12000 * 3 * line / 200e3)
    apart = dataclasses.replace(layout, domains=2, domain_ranks=1)
    far = 3 * 26 * 512 + 512  # packets of rows and of a route
    assert model_formulas.few_us(GPU, apart, False, WIRE) == pytest.approx(5 + 8 + far / 10e3)
    dear = dataclasses.replace(WIRE, put=1000.0)
    assert model_formulas.few_us(GPU, apart, False, dear) == pytest.approx(5 + 8 + (3 + 1 + 1) * 1000)
    assert model_formulas.few_us(GPU, apart, True, dear) == pytest.approx(3 + 8 + (3 + 1) * 1000)
    bundled = dataclasses.replace(dear, rows=2)
    bundling = 2 * 26 * 512 / 50e3
    assert model_formulas.few_us(GPU, apart, False, bundled) == pytest.approx(5 + 8 + bundling + (2 + 1 + 1) * 1000)


def test_bundled_puts() -> None:
    """The number of bundled puts equals that of tokens that are drawn one by one."""
    layout = Layout(2, 2, tokens=5, experts=8, top_k=2)
    draw, puts = random.Random(fresh_seed()), 0
    for _ in range(20_000):
        rows = sum(any(expert < 2 for expert in draw.sample(range(8), 2)) for _ in range(5))
        puts += -(-rows // 2)
    assert model_formulas.bundled_puts(layout, 2) == pytest.approx(puts / 20_000, abs=0.05)
    assert model_formulas.bundled_puts(layout, 1) == pytest.approx(5 * (1 - 15 / 28))


def test_constants_come_from_the_runs() -> None:
    """A run that takes exactly its bytes and 17 µs."""
    many, few = recorded("throughput-4"), recorded("latency-4")
    bare = dataclasses.replace(scale_model.measured_gpu(many, few), constants={})
    for result in many["results"]:
        if result["op"] in scale_model.MANY:
            result["graph_us"] = 17.0 + scale_model.of_recorded(bare, result, 4)
    for result in few["results"]:
        layout = scale_model.layout_of(few, result["tokens"])
        both = [4.0 + model_formulas.few_us(bare, layout, combine) for combine in (False, True)]
        result["us"] = {"dispatch": both[0], "combine": both[1], "pair": sum(both)}.get(result["op"], 0.0)
    gpu = scale_model.measured_gpu(many, few)
    assert gpu.constants == pytest.approx({op: 4.0 if op.startswith("few") else 17.0 for op in gpu.constants})
    found = scale_model.measured_errors(gpu, [many], few)
    errors = [entry["model"] / entry["us"] - 1 for entry in found if entry["ranks"] == 4]
    assert len(errors) > 100 and max(map(abs, errors)) < 1e-9


def test_published_units() -> None:
    """43 GB/s of domains, 2 of them reached by nearly all tokens, are 4096 rows of 7 KB twice, by time."""
    gpu = scale_model.measured_gpu(recorded("throughput-4"), recorded("latency-4"))
    entry = scale_model.PUBLISHED[0]
    found = scale_model.beside(gpu, entry, 4 * 2**30)
    us = model_formulas.many_us(gpu, entry.wire, model_formulas.in_rounds(entry.layout, 4 * 2**30), "dispatch")
    both = 2 * (1 - math.comb(128, 8) / math.comb(256, 8))
    assert found["model"] == pytest.approx(4096 * both * 7168 / us / 1e3)
    assert found["published"] == 43


# ---------------------------------------------------------------------- the commands


def test_embedded_constants_are_the_measured_ones() -> None:
    assert scale_model.measured_gpu(recorded("throughput-4"), recorded("latency-4")) == model.H200


def test_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script reproduces the recorded file, and the page quotes its tables."""
    assert scale_model.main(["--out", str(tmp_path / "model.json")]) == 0
    found = json.loads((tmp_path / "model.json").read_text())
    assert found == recorded("model")
    assert "<svg" in (tmp_path / "model.svg").read_text()
    assert "one of 72" in capsys.readouterr().out
    assert scale_model.markdown(found) in (RESULTS / "model.md").read_text()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command needs no recorded runs and predicts what the functions do."""
    assert model.main(["--out", str(tmp_path / "model.json")]) == 0
    assert json.loads((tmp_path / "model.json").read_text())["predictions"] == recorded("model")["predictions"]
    said = capsys.readouterr().out
    assert "one of 72" in said and "64 x 8, InfiniBand" in said and "8 x 72, EFA" in said


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("--tokens 0", "--tokens: 0 is not an int of at least 1"),
        ("--staging nan", "--staging is nan; allowed: a positive number of GiB"),
        ("--staging inf", "--staging is inf; allowed: a positive number of GiB"),
        ("--staging 1e-6", "rounds of one token take"),
    ],
)
def test_command_rejects(options: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        model.main(options.split())
    assert stop.value.code == 2 and error in capsys.readouterr().err
