"""The results of a run of the throughput benchmark as a table."""

from __future__ import annotations

from .figures import text_table
from .ranks import Found

COLUMNS = ("what", "T", "H", "K", "routing", "SMs", "µs", "steady µs", "graph µs", "GB/s", "of link")

NAMES = {
    "dispatch": "dispatch",
    "dispatch_planned": "dispatch, reused route",
    "dispatch_fp8": "dispatch in FP8, scales in columns",
    "dispatch_fp8_packed": "dispatch in FP8, packed scales",
    "dispatch_fp8_planned": "dispatch in FP8, scales in columns, reused route",
    "dispatch_fp8_packed_planned": "dispatch in FP8, packed scales, reused route",
    "dispatch_token_major": "dispatch, token-major",
    "dispatch_token_major_planned": "dispatch, token-major, reused route",
    "dispatch_token_major_fp8": "dispatch in FP8, token-major",
    "combine": "combine, weighted",
    "combine_unweighted": "combine, unweighted",
    "combine_residual": "combine, weighted, with a residual",
    "combine_token_major": "combine, token-major",
    "combine_fp8": "combine, weighted, sums in FP8",
    "combine_token_major_fp8": "combine, token-major, sums in FP8",
    "combine_gathered": "combine, token-major, gathered",
    "combine_pushed": "combine of a row per rank, pushed",  # in older files
    "dispatch_backward": "dispatch, backward",
    "combine_backward": "combine, backward",
    "pair_forward": "both, forward, compiled",
    "pair_forward_backward": "both, forward + backward, compiled",
    "host_dispatch": "host time of a dispatch",
    "nccl_dispatch": "all_to_all_single, dispatch's bytes",
    "nccl_combine": "all_to_all_single, combine's bytes",
    "eager_dispatch": "eager PyTorch dispatch",
    "eager_combine": "eager PyTorch combine",
}

BUDGETS = {
    op: "combine_sms" if op.startswith("combine") or op.endswith("backward") else "dispatch_sms"
    for op in NAMES
    if op.startswith(("dispatch", "combine"))
}
"""Operator -> the budget that it runs under. Backwards move rows the other way."""


def best_link(run: Found) -> float | None:
    """Return the GB/s of the fastest push or pull at any number of SMs and row size, or None if not measured."""
    return max((entry["gbs"] for entry in run["link"]), default=None)


def taken(result: Found) -> float:
    """Return the µs of a call in a graph if measured, else back to back, else of a single call."""
    us: float = next(result[key] for key in ("graph_us", "steady_us", "us") if key in result)
    return us


def complete(run: Found) -> Found:
    """Fill in the time that the bytes take at the link's speed, and its ratio to the time taken."""
    speed = best_link(run)
    for result in run["results"]:
        nbytes = result.get("nvlink_bytes")
        if nbytes and taken(result):
            result["gbs"] = nbytes / taken(result) / 1e3
            if speed:
                result["limit_us"] = nbytes / speed / 1e3
                result["ratio"] = result["limit_us"] / taken(result)
    return run


def cells(result: Found) -> list[str]:
    """Return the cells of a result in the order of COLUMNS."""
    op: str = result["op"]
    budget = result[BUDGETS[op]] if op in BUDGETS else None
    wrong = "" if result.get("correct", True) else " WRONG"
    return [
        NAMES.get(op, op) + wrong,
        *(str(result[key]) for key in ("tokens", "hidden", "top_k")),
        result["routing"],
        str(budget or ""),
        *(f"{result[key]:.1f}" if key in result else "" for key in ("us", "steady_us", "graph_us")),
        f"{result['gbs']:.0f}" if "gbs" in result else "",
        f"{100 * result['ratio']:.0f} %" if "ratio" in result else "",
    ]


def link_lines(run: Found) -> list[str]:
    """Return one line for each direction and row size: GB/s at each number of SMs."""
    by_kind: dict[tuple[str, int], list[str]] = {}
    for entry in run["link"]:
        by_kind.setdefault((entry["direction"], entry["row_bytes"]), []).append(f"{entry['gbs']:.0f} ({entry['sms']})")
    return [
        f"link {direction}, rows of {row_bytes} bytes, GB/s (SMs): {', '.join(speeds)}"
        for (direction, row_bytes), speeds in by_kind.items()
    ]


def table(run: Found) -> list[str]:
    """Return the lines of the table for a terminal."""
    return [*link_lines(run), *text_table([COLUMNS, *map(cells, run["results"])])]
