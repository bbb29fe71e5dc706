"""How long an operation takes: a constant, and then its bytes at the speed of what binds.

One domain: an operation lasts until its rows have crossed NVLink, or until all that it reads and writes has passed the
memory, if that takes longer, after a constant of its own. Several: or until what leaves for other domains has passed
the network. What the network adds to the constant is the way of one put, and a batch that is waited for before its rows
are passed on. Rounds each take that. Few tokens: likewise, and each put takes a rank some time.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from .model_memory import Layout
from .model_traffic import Bytes, combine_bytes, dispatch_bytes, expected, few_bytes

MEMORY = 3.7e12
"""Bytes a second that an H200 reads and writes in its memory (ep_ops/backends/cute/sm_model.py)."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Bytes a second, and constants in µs by operation."""

    name: str
    pull: float  # over NVLink, in one direction: fetched
    push: float  # stored
    memory: float
    flag: float  # µs until a flag that was set at a peer is seen there
    constants: dict[str, float]
    told: str  # where that is from


@dataclasses.dataclass(frozen=True)
class Wire:
    """A rank's network."""

    name: str
    rate: float  # bytes a second, in one direction
    latency: float  # µs from a put to its signal being seen
    put: float  # µs that each put takes its rank
    told: str
    rows: int = 1  # of few tokens for one rank, at most, in a put (cute_kernels/latency/bundled.py)


# ---------------------------------------------------------------- what is measured


def best(run: dict[str, Any], direction: str) -> float:
    """Bytes a second of bare bulk copies."""
    return max(entry["gbs"] for entry in run["link"] if entry["direction"] == direction) * 1e9


def measured_gpu(many: dict[str, Any], few: dict[str, Any]) -> Gpu:
    """From a run of each benchmark. The constant of an operation on many tokens is the median, over the sizes from 512
    tokens on, of what it takes beyond its bytes; that of one on few tokens, what it takes at the smallest size."""
    bare = Gpu("", best(many, "pull"), best(many, "push"), MEMORY, few["flag"]["us"] / 2, {}, "")
    constants = {}
    for op in MANY:
        beyond = [
            result["graph_us"] - of_recorded(bare, result, many["world_size"])
            for result in many["results"]
            if result["op"] == op and is_centre(result) and result["tokens"] >= 512
        ]
        constants[op] = statistics.median(beyond)
    for op in FEW:
        result = min((r for r in few["results"] if r["op"] == op), key=lambda r: r["tokens"])
        constants["few " + op] = result["us"] - few_us(bare, layout_of(few, result["tokens"]), op == "combine")
    machine = many["machine"]["device"]
    told = (
        f"measured on {many['world_size']} x {machine}: fetching {bare.pull / 1e9:.0f} GB/s, storing"
        f" {bare.push / 1e9:.0f} GB/s over NVLink, memory {MEMORY / 1e12:.1f} TB/s, a flag {bare.flag:.2f} µs"
    )
    return dataclasses.replace(bare, name=machine, constants=constants, told=told)


BUNDLING = 50e9
"""Bytes a second that a block puts together: assumed."""

MANY = ("dispatch", "dispatch_planned", "combine", "combine_gathered")
"""Operations on many tokens that the model has, by the benchmark's names."""
FEW = ("dispatch", "combine")


def is_centre(result: dict[str, Any]) -> bool:
    """Of the sweep over tokens: everything else as in workload A, with default budgets."""
    same = {"hidden": 7168, "top_k": 8, "routing": "balanced", "given_sms": None}
    return all(result[key] == value for key, value in same.items())


def layout_of(run: dict[str, Any], tokens: int) -> Layout:
    """Of a run of the latency benchmark."""
    return Layout(1, run["world_size"], tokens, run["hidden"], experts=run["experts"], top_k=run["top_k"])


# ---------------------------------------------------------------- one domain


def of_rows(gpu: Gpu, op: str, near: float, passing: float) -> float:
    """µs for bytes over NVLink and through the memory."""
    link = gpu.pull if op != "combine" else gpu.push
    return 1e6 * max(near / link, passing / gpu.memory)


def passing_rows(op: str, copies: float, reached: float, expanded: float, tokens: float) -> float:
    """Rows that a rank reads and writes in its memory: `copies` come to it, `reached` of its tokens go out."""
    if op == "combine":
        return expanded + copies + reached + tokens
    if op == "combine_gathered":
        return reached + tokens
    return 2 * tokens + copies + expanded


def of_recorded(gpu: Gpu, result: dict[str, Any], ranks: int) -> float:
    """µs for the bytes of a recorded result, without the constant: those of the busiest rank, to which rows come from
    all ranks alike."""
    near, row = result["nvlink_bytes"], result["row_bytes"]
    copies = near / row * ranks / (ranks - 1)
    reached = min(copies, result["tokens"] * min(ranks, result["top_k"]))
    passing = passing_rows(result["op"], copies, reached, max(result["rows_expanded"]), result["tokens"])
    return of_rows(gpu, result["op"], near, passing * row)


def recorded_us(gpu: Gpu, result: dict[str, Any], ranks: int) -> float:
    return gpu.constants[result["op"]] + of_recorded(gpu, result, ranks)


# ---------------------------------------------------------------- any number of domains


def many_us(gpu: Gpu, wire: Wire | None, layout: Layout, op: str) -> float:
    """µs of a dispatch or a combine of many tokens."""
    t = expected(layout)
    moved = combine_bytes(layout) if op == "combine" else dispatch_bytes(layout)
    crossing = 3 * t.crossing  # packed, or added up and written; read by the wire; written where it arrives
    passing = (passing_rows(op, t.copies, t.copies, t.expanded, layout.tokens) + crossing) * layout.row_bytes
    alone = of_rows(gpu, op, moved.near, passing)
    if wire is None or layout.domains == 1:
        return gpu.constants[op] + alone
    batch = 1e6 * layout.batch_tokens * layout.row_bytes / wire.rate
    constant = gpu.constants[op] + wire.latency + gpu.flag + batch
    return layout.rounds * constant + max(alone, far_us(wire, moved))


def few_us(gpu: Gpu, layout: Layout, combine: bool, wire: Wire | None = None) -> float:
    """µs of a dispatch or a combine of few tokens."""
    moved = few_bytes(layout, combine, 1 if wire is None else wire.rows)
    near = 1e6 * moved.near / gpu.push
    constant = gpu.constants.get("few combine" if combine else "few dispatch", 0.0)
    if wire is None or layout.domains == 1:
        return constant + near
    return constant + max(near, bundling_us(layout, wire) + wire.latency + far_us(wire, moved))


def bundling_us(layout: Layout, wire: Wire) -> float:
    """µs before the first of several rows for a rank can be put: a block puts them together."""
    rows = min(wire.rows, expected(layout).few_far / (layout.ranks - layout.domain_ranks))
    return 0.0 if wire.rows == 1 else 1e6 * rows * layout.few_row_bytes / BUNDLING


def far_us(wire: Wire, moved: Bytes) -> float:
    return max(1e6 * moved.far / wire.rate, moved.puts * wire.put)


def sizes(ranks: Sequence[int], domain_ranks: int, tokens: int) -> list[Layout]:
    """Layouts of so many ranks, in domains of so many, or in one where there are fewer; experts as many as 256 or more
    that are a multiple of the ranks, top-8, hidden 7168, bf16."""
    found = []
    for count in ranks:
        domains = max(1, count // domain_ranks)
        experts = count * -(-256 // count)
        found.append(Layout(domains, count // domains, tokens, experts=experts, few_tokens=max(1, min(tokens, 256))))
    return found
