"""Throughput of dispatch and combine: `ep-ops bench throughput`, on all GPUs of this host or under torchrun.

ep-ops bench throughput                                        # preset quick, one process for each visible GPU
torchrun --nproc-per-node 4 -m ep_ops bench throughput --preset full --out results.json
ep-ops bench throughput --ranks 2 --against results.json       # 2 ranks may share a GPU; ratios to a recorded run
ep-ops bench throughput --preset tiny --device cpu             # the benchmark itself, on two CPU processes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .against import reject_other_kind
from .options import add_against, add_domain_options, names_of, new_parser, numbers, only, positive, read
from .presets import MEASURABLE, PRESETS
from .ranks import on_every_rank
from .session import Session


def parser() -> argparse.ArgumentParser:
    options = new_parser(__doc__, "throughput")
    options.add_argument("--preset", choices=PRESETS, help="what to measure (default: quick; on CPUs: tiny)")
    options.add_argument("--sms", type=numbers, metavar="N,N", help="numbers of SMs that preset sms tries")
    everything = ("link", *MEASURABLE)
    options.add_argument(
        "--only", type=names_of(everything), default=everything, metavar="NAME,NAME", help=only(everything)
    )
    options.add_argument("--iterations", type=positive, default=20, help="timed calls of each (default: %(default)s)")
    options.add_argument("--seconds", type=float, help="start no further workload after that many seconds")
    add_domain_options(options)
    add_against(options)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = read(options, argv)
    if args.preset is None:
        args.preset = "quick" if args.device == "cuda" else "tiny"
    reject_other_kind(options, args, preset=args.preset)
    return on_every_rank(Session.measure, args)


if __name__ == "__main__":
    sys.exit(main())
