"""The results of a run of the latency benchmark as a table."""

from __future__ import annotations

from .figures import text_table
from .ranks import Found

NAMES = {
    "pair": "dispatch + combine",
    "pair_padded": "dispatch + combine, [experts, slots] rows",
    "pair_aligned": "dispatch + combine, padded to 16 rows",
    "pair_cleared": "the same, padding cleared",
    "pair_fp8": "FP8 dispatch + combine",
    "pair_fp8_warm": "FP8 dispatch + combine, rows of experts in cache",
    "pair_tokens": "token-major dispatch + combine",
    "pair_single": "dispatch + combine, a graph of one pair",
    "pair_eager": "dispatch + combine, eager",
    "pair_throughput": "dispatch + combine, throughput kernels",
    "pair_nccl": "all_to_all_single of the bytes, both ways",
    "dispatch": "dispatch",
    "dispatch_start": "dispatch_start, can be hidden",
    "dispatch_wait": "dispatch_wait, all having arrived",
    "dispatch_nccl": "all_to_all_single of dispatch's bytes",
    "combine": "combine",
    "combine_fp8": "combine, sums in FP8",
    "combine_start": "combine_start, can be hidden",
    "combine_wait": "combine_wait, all having arrived",
    "host": "host time of an eager call",
}
"""What is measured -> its name in the table, in that order. The last does not depend on the number of tokens."""


def lines_of(run: Found) -> dict[str, dict[int, Found]]:
    """Return the results by name and number of tokens, in the order of NAMES."""
    found: dict[str, dict[int, Found]] = {}
    for result in sorted(run["results"], key=lambda result: list(NAMES).index(result["op"])):
        found.setdefault(result["op"], {})[result["tokens"]] = result
    return found


def rows_of(run: Found) -> list[list[str]]:
    """Return the heading, and a row for each measurement: mean (99th percentile) for each number of tokens."""
    lines = lines_of(run)
    sizes = sorted({tokens for points in lines.values() for tokens in points})
    rows = [["µs, mean (p99), at T =", *map(str, sizes)]]
    for op, points in lines.items():
        wrong = "" if all(result.get("correct", True) for result in points.values()) else " WRONG"
        cells = [f"{points[t]['us']:.1f} ({points[t]['us_p99']:.1f})" if t in points else "" for t in sizes]
        rows.append([NAMES[op] + wrong, *cells])
    return rows


def remarks(run: Found) -> list[str]:
    """Return lines about results that do not depend on the number of tokens."""
    return [f"host time of an eager {entry['op']}: {entry['us']:.1f} µs" for entry in run["host"]]


def setting(run: Found) -> str:
    return (
        f"hidden {run['hidden']}, {run['experts']} experts, top-{run['top_k']}, {run['dtype']};"
        f" graphs of {run['pairs']}, {run['replays']} replays ({run['few']} in comparisons), slowest rank"
    )


def table(run: Found) -> list[str]:
    """Return the lines of the table for a terminal."""
    return [setting(run), *text_table(rows_of(run)), *remarks(run)]
