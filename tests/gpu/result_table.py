"""The table that ends a run of the GPU tests, and one of several runs, for benchmarks/results/tested.md.

python tests/gpu/result_table.py 4.json 1.json                                            # print it
python tests/gpu/result_table.py 4.json 1.json --into benchmarks/results/tested.md        # replace it there
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
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
            f"FAILED on {stage['name']}: {test['test']}\n{test.get('text', '')[-1500:]}"
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


# ---------------------------------------------------------------------- several runs

OUTCOMES = ("passed", "failed", "not run")
"""What the cells of such a table count; skipped tests are left out."""


def last_results(runs: Iterable[dict[str, Any]]) -> dict[int, dict[str, dict[str, Any]]]:
    """Return the tests by ranks and name: of several results the last one of a test that has run."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for run in runs:
        for stage in run["stages"]:
            tests = found.setdefault(stage["ranks"], {})
            for test in stage["tests"]:
                name = test["test"].split("tests/gpu/")[-1]
                if name not in tests or test["outcome"] != "not run":
                    tests[name] = test
    return found


def summary(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table: files by ranks."""
    by_ranks = last_results(runs)
    counts: dict[tuple[str, int], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for ranks, tests in by_ranks.items():
        for name, test in tests.items():
            counts[name.split("::")[0], ranks][test["outcome"]] += 1
    columns = sorted(by_ranks, key=lambda ranks: ranks or 10**6)
    heads = ["own processes" if not ranks else f"{ranks} rank{'s' * (ranks > 1)}" for ranks in columns]
    lines = ["| file | " + " | ".join(heads) + " |", "|---" * (len(columns) + 1) + "|"]
    for file in sorted({file for file, _ in counts}):
        lines.append(f"| `{file}` | " + " | ".join(cell(counts.get((file, ranks))) for ranks in columns) + " |")
    return lines


def cell(counts: collections.Counter[str] | None) -> str:
    """Return the text of a cell: empty where the file was not part of any run, "–" where all tests were skipped."""
    if counts is None:
        return ""
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome]) or "–"


def facts(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines for the text beside the table: what ran where, sums, and what failed."""
    lines = [f"{run['machine']}, commit {run['commit']}, seed {run['seed']}, {run['seconds']:.0f} s" for run in runs]
    for ranks, tests in sorted(last_results(runs).items()):
        sums = collections.Counter(test["outcome"] for test in tests.values())
        lines.append(f"{ranks} ranks: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(sums.items())))
        lines += [f"{ranks} ranks: FAILED {name}" for name, test in tests.items() if test["outcome"] == "failed"]
    return lines


def replaced(page: str, lines: Sequence[str]) -> str:
    """Return a page with this table in place of its table of files and ranks."""
    old = page.splitlines()
    first = next(i for i, line in enumerate(old) if line.startswith("| file | "))
    end = next((i for i in range(first, len(old)) if not old[i].startswith("|")), len(old))
    return "\n".join([*old[:first], *lines, *old[end:]]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="results that run.py has written; later ones count")
    parser.add_argument("--into", type=Path, help="page whose table is replaced (default: print the table)")
    args = parser.parse_args(argv)
    runs = [json.loads(path.read_text()) for path in args.runs]
    print(*facts(runs), sep="\n")
    if args.into is None:
        print(*summary(runs), sep="\n")
    else:
        args.into.write_text(replaced(args.into.read_text(), summary(runs)))


if __name__ == "__main__":
    main()
