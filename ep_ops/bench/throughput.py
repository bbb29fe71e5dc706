"""Throughput of dispatch and combine: `ep-ops bench throughput`, on all GPUs of this host or under torchrun.

ep-ops bench throughput                                        # preset quick, one process for each visible GPU
torchrun --nproc-per-node 4 -m ep_ops bench throughput --preset full --out results.json
ep-ops bench throughput --ranks 2 --against results.json       # 2 ranks may share a GPU; ratios to a recorded run
ep-ops bench throughput --preset sizes --dry-run               # what would be measured; needs no GPU
ep-ops bench throughput --preset tiny --device cpu             # the benchmark itself, on two CPU processes
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from .against import reject_other_kind
from .options import add_against, add_domain_options, names_of, new_parser, numbers, only, positive, read
from .presets import MEASURABLE, PRESETS, Preset, over_sms
from .ranks import on_every_rank
from .session import Session
from .workloads import expected_traffic


def parser() -> argparse.ArgumentParser:
    options = new_parser(__doc__, "throughput")
    options.add_argument("--preset", choices=PRESETS, help="what to measure (default: quick; on CPUs: tiny)")
    options.add_argument("--sms", type=numbers, metavar="N,N", help="numbers of SMs that preset sms tries")
    options.add_argument(
        "--dispatch-sms", type=positive, metavar="N", help="SMs of a dispatch, where the preset does not set them"
    )
    options.add_argument(
        "--combine-sms", type=positive, metavar="N", help="SMs of a combine, where the preset does not set them"
    )
    everything = ("link", *MEASURABLE)
    options.add_argument("--only", type=names_of(everything), metavar="NAME,NAME", help=only(everything))
    options.add_argument(
        "--skip", type=names_of(everything), default=(), metavar="NAME,NAME", help="measure all but these"
    )
    options.add_argument("--iterations", type=positive, default=20, help="timed calls of each (default: %(default)s)")
    options.add_argument("--seconds", type=float, help="start no further workload after that many seconds")
    add_domain_options(options)
    add_against(options)
    options.add_argument("--dry-run", action="store_true", help="print what would be measured, and stop")
    return options


def preset_of(args: argparse.Namespace) -> Preset:
    made = over_sms(args.sms) if args.preset == "sms" and args.sms else PRESETS[args.preset]()
    made = made.with_default_sms(args.dispatch_sms, args.combine_sms)
    skipped = set(args.skip) if args.only is None else {"link", *MEASURABLE} - set(args.only)
    return made.without(skipped)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = read(options, argv)
    if args.preset is None:
        args.preset = "quick" if args.device == "cuda" or args.dry_run else "tiny"
    reject_other_kind(options, args, preset=args.preset)
    if args.dry_run:
        if os.environ.get("RANK", "0") == "0":
            print(plan_text(preset_of(args), args.ranks))
        return 0
    return on_every_rank(measure, args)


def plan_text(preset: Preset, world_size: int) -> str:
    """Return what a preset measures, with the bytes that cross NVLink on the busiest rank with balanced routing."""
    lines = [f"{world_size} ranks"]
    if preset.link_sms:
        rows = ", ".join(map(str, preset.row_bytes))
        lines.append(f"link: push and pull of rows of {rows} bytes with {', '.join(map(str, preset.link_sms))} SMs")
    for case in preset.cases:
        nbytes = expected_traffic(case.workload, world_size).crossing * case.workload.row_bytes
        lines.append(f"{case} ({nbytes / 1e6:.1f} MB over NVLink on average)")
    return "\n".join(lines)


def measure(device: torch.device, args: argparse.Namespace) -> None:
    with Session(device, args) as session:
        session.run(preset_of(args))


if __name__ == "__main__":
    sys.exit(main())
