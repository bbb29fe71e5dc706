"""The table that ends a run of the GPU tests."""

from __future__ import annotations

import collections
from typing import Any


def table(found: dict[str, Any], slowest: int = 12) -> list[str]:
    """Lines: files by stages, what was skipped and why, what failed, and what took longest."""
    stages = found["stages"]
    lines = [f"{found['machine']}, commit {found['commit']}, seed {found['seed']}, {found['seconds']:.0f} s", ""]
    names = [stage["name"] for stage in stages]
    cells = {}
    for stage in stages:
        for test in stage["tests"]:
            cell = cells.setdefault((file_of(test), stage["name"]), collections.Counter())
            cell[test["outcome"]] += 1
            cell["seconds"] += sum(test.get(part, 0) for part in ("setup", "call", "teardown"))
    lines.append("| file | " + " | ".join(f"{name}: passed, skipped, failed, not run, s" for name in names) + " |")
    lines.append("|---" * (len(names) + 1) + "|")
    for file in sorted({file for file, _ in cells}):
        row = [cells.get((file, name)) for name in names]
        lines.append(f"| {file} | " + " | ".join(map(shown, row)) + " |")
    sums = [sum((cell for (_, of), cell in cells.items() if of == name), collections.Counter()) for name in names]
    lines.append("| all | " + " | ".join(map(shown, sums)) + " |")
    walls = (f"{stage['seconds']:.0f} s, {stage['groups']} groups" for stage in stages)
    lines += ["| wall time | " + " | ".join(walls) + " |", ""]
    reasons: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for stage in stages:
        for test in stage["tests"]:
            if test["outcome"] == "skipped":
                reasons[stage["name"], file_of(test), test.get("reason", "")] += 1
    lines += [f"skipped, {name}, {file}: {count} × {why}" for (name, file, why), count in sorted(reasons.items())]
    for stage in stages:
        spent: collections.Counter[str] = collections.Counter()
        for test in stage["tests"]:
            spent.update({name: took for name, (took, _) in test.get("spent", {}).items()})
        if spent:
            shares = ", ".join(f"{took:.0f} s {name}" for name, took in spent.most_common())
            lines.append(f"{stage['name']}: rank 0 spent {shares}")
        longest = sorted(stage["tests"], key=lambda test: -test.get("call", 0))[:slowest]
        for test in longest:
            if test.get("call", 0) > 1:
                lines.append(f"{stage['name']}: {test['call']:6.1f} s {test['test'].split('tests/gpu/')[-1]}")
    for stage in stages:
        lines += [
            f"FAILED on {stage['name']}: {test['test']}\n{test.get('text', '')[-700:]}"
            for test in stage["tests"] if test["outcome"] == "failed"
        ]  # fmt: skip
    return lines


def file_of(test: dict[str, Any]) -> str:
    return test["test"].split("::")[0].split("/")[-1]


def shown(cell: Any) -> str:
    if not cell:
        return ""
    counts = ", ".join(str(cell[name]) for name in ("passed", "skipped", "failed", "not run"))
    return f"{counts}, {cell['seconds']:.1f}"
