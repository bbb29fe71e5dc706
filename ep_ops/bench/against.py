"""Comparison of a run with an earlier one, measurement by measurement, as ratios."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .figures import machine_line, text_table

Found = dict[str, Any]

KIND = ("benchmark", "preset", "world_size", "hidden", "experts", "top_k", "pairs")
"""Facts of a run that two runs must have in common. A run has those of its benchmark."""
KEY = ("op", "tokens", "hidden", "experts", "top_k", "dtype", "routing", "given_sms")
"""What tells the results of a run apart."""
TIMES = ("graph_us", "steady_us", "us_median", "us")
"""Times of a result, the one to compare first."""


def recorded(text: str, *others: str) -> Found:
    """Parse the path of a run that `--out` has written, and read it. `others`: further keys of such a run."""
    try:
        run = json.loads(Path(text).read_text())
        run["machine"]["device"]
        for key in ("results", *others):
            run[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text} is not a run that --out has written: {error}") from error
    return {**run, "path": text}


def difference(run: Found, earlier: Found) -> str | None:
    """Return why a run is of another kind than an earlier one, or None."""
    for name in KIND:
        if run.get(name) != earlier.get(name):
            return f"{name} is {run.get(name)} in this run and {earlier.get(name)} in {earlier['path']}"
    if bool(run.get("sharing")) != bool(earlier.get("sharing")):
        shared = earlier["path"] if earlier.get("sharing") else "this run"
        return f"ranks share a GPU in {shared} alone"
    return None


def reject_other_kind(options: argparse.ArgumentParser, args: argparse.Namespace, **facts: Any) -> None:
    """End the program with one line if the run of `--against` is of another kind than a run with these facts."""
    if args.against is not None:
        why = difference({**facts, "world_size": args.ranks, "sharing": args.sharing > 1}, args.against)
        if why:
            options.error(f"--against: {why}; allowed: a run of the same kind")


def key_of(result: Found) -> tuple[str, ...]:
    return tuple(str(result.get(name)) for name in KEY)


def time_of(result: Found) -> float:
    """Return the µs of a result that are compared."""
    return next(float(result[name]) for name in TIMES if name in result)


def ratios(run: Found, earlier: Found) -> dict[tuple[str, ...], float]:
    """Return this run's time over the earlier one's, for each result that both have."""
    before = {key_of(result): time_of(result) for result in earlier["results"]}
    times = ((key_of(result), time_of(result)) for result in run["results"])
    return {key: us / before[key] for key, us in times if before.get(key)}


def mean(values: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def lines(run: Found, earlier: Found) -> list[str]:
    """Return the lines of a table: times of this run and of the earlier one, and their ratio."""
    found = ratios(run, earlier)
    before = {key_of(result): result for result in earlier["results"]}
    rows = [("what", "T", "µs", "earlier µs", "ratio")]
    for result in run["results"]:
        key = key_of(result)
        if key in found:
            us, us_before = time_of(result), time_of(before[key])
            rows.append((result["op"], str(result["tokens"]), f"{us:.1f}", f"{us_before:.1f}", f"{found[key]:.3f}"))
    head = [f"compared with {earlier['path']}: {machine_line(earlier)}"]
    if run["machine"]["device"] != earlier["machine"]["device"]:
        head.append("The GPUs differ, so ratios compare the GPUs as well.")
    return [*head, *text_table(rows), f"geometric mean of {len(found)} ratios: {mean(list(found.values())):.3f}"]
