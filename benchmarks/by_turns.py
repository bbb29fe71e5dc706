"""Compare the kernels of two checkouts: one of `ep-ops bench` runs with each of them by turns, in fresh processes.

    git worktree add /tmp/earlier v0.1.0
    python benchmarks/by_turns.py --other /tmp/earlier --rounds 3 latency --ranks 2 --tokens 1,8 --only pair

Both are timed by the benchmark code of this checkout. Rounds alternate between this, other and other, this. Printed is
the ratio of this checkout's time to the other's for each measurement: the median over rounds, the least and the
largest. Ranks may share a GPU; start MPS before (docs/progress.md).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("latency", "throughput")


def parser() -> argparse.ArgumentParser:
    from ep_ops.commands.arguments import positive

    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--other", type=Path, required=True, help="the other checkout")
    options.add_argument("--rounds", type=positive, default=3, help="of both checkouts (default: %(default)s)")
    options.add_argument("--timeout", type=float, default=600.0, help="seconds of one run (default: %(default)s)")
    options.add_argument("--out", type=Path, help="write all runs and the ratios as JSON")
    options.add_argument("kind", choices=KINDS)
    options.add_argument("rest", nargs=argparse.REMAINDER, help="options of the benchmark")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    from ep_ops.bench import against
    from ep_ops.bench.figures import machine_line, text_table

    args = parser().parse_args(argv)
    if not (args.other / "cute_kernels").is_dir():
        raise SystemExit(f"--other is {args.other}; allowed: a checkout of this repository")
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number in range(args.rounds):
        found: dict[Path, dict[str, Any]] = {}
        for checkout in (ROOT, args.other) if number % 2 == 0 else (args.other, ROOT):
            print(f"round {number + 1} of {args.rounds}: {checkout}", flush=True)
            found[checkout] = run(checkout, args)
        pairs.append((found[ROOT], found[args.other]))
        by_round = [against.ratios(*pair) for pair in pairs]
        rows = [("what", "T", "µs", "other µs", "ratio", "least", "largest")]
        for result in pairs[0][0]["results"]:
            key = against.key_of(result)
            values = [ratios[key] for ratios in by_round if key in ratios]
            if values:
                both = (statistics.median(times_of(one, key)) for one in zip(*pairs, strict=True))
                shown = (statistics.median(values), min(values), max(values))
                rows.append((result["op"], str(result["tokens"]), *map("{:.1f}".format, both),
                             *map("{:.3f}".format, shown)))  # fmt: skip
        if args.out is not None:
            args.out.write_text(json.dumps({"rounds": pairs, "ratios": rows}, indent=0) + "\n")
    medians = [float(row[4]) for row in rows[1:]]
    print(machine_line(pairs[0][0]), *text_table(rows), sep="\n")
    print(f"geometric mean of {len(medians)} ratios: {against.mean(medians):.3f}")
    return 0


def times_of(runs: Sequence[dict[str, Any]], key: tuple[str, ...]) -> list[float]:
    from ep_ops.bench import against

    return [against.time_of(one) for run in runs for one in run["results"] if against.key_of(one) == key]


def run(checkout: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark once with the kernels of a checkout, and return what it has written."""
    rest = list(args.rest)
    ranks = rest[rest.index("--ranks") + 1] if "--ranks" in rest else "gpu"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        command += [__file__, "one", args.kind, *rest, "--out", str(out)]
        path = os.pathsep.join([str(checkout.resolve()), os.environ.get("PYTHONPATH", "")])
        try:
            subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, timeout=args.timeout)
        except subprocess.SubprocessError as error:  # which names the command, and the exit code or the seconds
            raise SystemExit(f"the run with {checkout} failed: {error}") from None
        return json.loads(out.read_text())


def one(kind: str, rest: Sequence[str]) -> int:
    """Run a benchmark of this checkout with the rest of the package from the first folder of PYTHONPATH."""
    import ep_ops

    folder = ROOT / "ep_ops" / "bench"
    spec = importlib.util.spec_from_file_location(
        "ep_ops.bench", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ep_ops.bench"] = module
    ep_ops.bench = module  # type: ignore[attr-defined]
    spec.loader.exec_module(module)
    return int(importlib.import_module(f"ep_ops.bench.{kind}").main(rest))


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        sys.path.pop(0)  # this folder
        sys.exit(one(sys.argv[2], sys.argv[3:]))
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
