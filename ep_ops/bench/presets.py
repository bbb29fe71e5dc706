"""Presets: workloads and numbers of multiprocessors to measure, by name."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection

from .workloads import ROUTINGS, Workload

FORWARD = ("dispatch", "dispatch_planned", "combine", "combine_unweighted")
BACKWARD = ("dispatch_backward", "combine_backward")
FORMATS = {
    "dispatch_fp8": ("e4m3/128/pow2", "columns"),
    "dispatch_fp8_packed": ("e4m3/128/pow2", "packed"),
    "dispatch_fp8_planned": ("e4m3/128/pow2", "columns"),
    "dispatch_fp8_packed_planned": ("e4m3/128/pow2", "packed"),
    "dispatch_token_major_fp8": ("e4m3/128/pow2", "columns"),
}
"""Dispatches that quantize: what rows arrive as, and how their scales lie."""
SUM_FORMAT = "wire:e4m3/32/mx"
SUMS = ("combine_fp8", "combine_token_major_fp8")
"""Combine operators that send their sums quantized, in SUM_FORMAT."""
TOKEN_MAJOR = ("dispatch_token_major", "dispatch_token_major_planned", "combine_token_major")
"""Operators on token-major rows, one for each copy of a token, that are not quantized."""
GATHERED = "combine_gathered"
"""Combine of token-major rows that lie in symmetric memory."""
OPERATORS = (*FORWARD, "combine_residual", *BACKWARD, *FORMATS, *TOKEN_MAJOR, *SUMS, GATHERED)
"""Operators that are measured. All are weighted but `combine_unweighted` and combines of token-major rows."""

BASELINES = ("nccl", "eager")
MEASURABLE = (*OPERATORS, "pair", "host", *BASELINES)
"""What can be measured. `pair`: dispatch and combine compiled together, forward and forward + backward. `host`: host
time of a dispatch."""

WORKLOAD_A = Workload()
TINY = Workload(tokens=48, hidden=128, experts=8, top_k=2)

SMS = (8, 12, 16, 20, 22, 24, 28, 32, 48, 64, 96, 132)
TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
HIDDEN = (2048, 4096, 7168, 8192)
TOP_K = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload with one budget of multiprocessors (None: the backend's own choice)."""

    workload: Workload
    measure: tuple[str, ...]
    dispatch_sms: int | None = None
    combine_sms: int | None = None

    @property
    def communicator(self) -> tuple:
        """Cases in which this is equal, and which follow each other, share a communicator."""
        w = self.workload
        return w.hidden, w.experts, w.top_k, w.dtype

    def __str__(self) -> str:
        budget = f"{self.dispatch_sms or 'default'}/{self.combine_sms or 'default'} SMs"
        return f"{self.workload}, {budget}: {' '.join(self.measure)}"


@dataclasses.dataclass(frozen=True)
class Preset:
    """`link_sms`: how many blocks the link's own speed is measured with; () to leave that out."""

    cases: tuple[Case, ...]
    link_sms: tuple[int, ...]

    def groups(self) -> list[list[Case]]:
        """Yield successive cases that share a communicator."""
        return [list(cases) for _, cases in itertools.groupby(self.cases, key=lambda case: case.communicator)]

    @property
    def row_bytes(self) -> list[int]:
        return sorted({case.workload.row_bytes for case in self.cases}, reverse=True)

    def only(self, names: Collection[str]) -> Preset:
        """Return the preset with the named measurements, and without cases that have none left."""
        kept = [dataclasses.replace(c, measure=tuple(m for m in c.measure if m in names)) for c in self.cases]
        return Preset(tuple(case for case in kept if case.measure), self.link_sms if "link" in names else ())


def quick() -> Preset:
    """Return workload A with the default budgets, compared with the link, NCCL and eager PyTorch."""
    return Preset((Case(WORKLOAD_A, MEASURABLE),), (16, 24, 32, 64, 132))


def over_sms(sms: tuple[int, ...] = SMS) -> Preset:
    """Return workload A with each budget for both directions."""
    return Preset(tuple(Case(WORKLOAD_A, (*FORWARD, GATHERED, *TOKEN_MAJOR), n, n) for n in sms), sms)


def over_sizes() -> Preset:
    """Return variations of workload A in tokens, hidden size, top-k and routing, with the default budgets."""
    a = WORKLOAD_A
    operators = ("dispatch", "dispatch_planned", "combine", *BACKWARD, GATHERED)

    def cases(workloads: list[Workload]) -> list[Case]:
        return [Case(dataclasses.replace(w, routing=r), operators) for w in workloads for r in ROUTINGS]

    # Tokens in between: what surrounds this in `full` is then not measured with a communicator for more tokens.
    made = cases([dataclasses.replace(a, hidden=h) for h in HIDDEN if h != a.hidden])
    for case in cases([dataclasses.replace(a, tokens=t) for t in TOKENS]):
        compared = BASELINES if case.workload.routing == "balanced" else ()
        host = ("host",) if case.workload.tokens == 128 else ()  # where it may matter
        made.append(dataclasses.replace(case, measure=(*operators, *host, *compared)))
    made += cases([dataclasses.replace(a, top_k=k) for k in TOP_K if k != a.top_k])
    return Preset(tuple(made), (24, 64, 132))


def skew() -> Preset:
    """Return workload A with one hot rank, which receives 1.6, 2.5 and 3.8 times the mean rows on 4 ranks, and 1.2, 1.5
    and 1.9 times on 2 ranks."""
    routings = ("balanced", "hot 0.2", "hot 0.5", "hot 0.93")
    operators = ("dispatch", "dispatch_planned", "combine", *BACKWARD)
    return Preset(tuple(Case(dataclasses.replace(WORKLOAD_A, routing=r), operators) for r in routings), (24, 64, 132))


def tiny() -> Preset:
    """Return small sizes that try out the benchmark itself, also on CPUs."""
    skewed = dataclasses.replace(TINY, tokens=32, routing="skewed")
    return Preset((Case(TINY, MEASURABLE), Case(skewed, OPERATORS)), (2, 8))


def full() -> Preset:
    """Return all cases of quick, sms and sizes, which are recorded. Cases that torch compiles take longest and come
    last."""
    others = [name for name in MEASURABLE if name != "pair"]
    parts = (quick().only(others), over_sms(), over_sizes(), quick().only(["pair"]))
    return Preset(tuple(case for part in parts for case in part.cases), SMS)


PRESETS: dict[str, Callable[[], Preset]] = {
    "quick": quick,
    "sms": over_sms,
    "sizes": over_sizes,
    "skew": skew,
    "full": full,
    "tiny": tiny,
}
