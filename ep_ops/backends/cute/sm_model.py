"""Numbers of multiprocessors (SMs) of dispatch and combine: those that the user sets, those of a table of measured
choices (tuning.py), or those of a model.

The model assumes even routing. Of the rows that belong to one token, a rank moves on average:

    reached   into it in a dispatch, out of it in a combine: one for each rank that the token reaches
    crossing  of these over the link
    rows      into or out of the receive buffer: one for each expert, or, token-major, for each rank reached

An operation lasts until its rows have crossed the link, or until its reads and writes of memory have ended, if that
takes longer. It uses as many SMs as move its bytes in that time (rates.py). The rest of the GPU is left to computation.
With several ranks an operation uses at most half of the GPU. A combine that does not run concurrently with computation
takes more, by the table.

On GPUs that the table does not name the numbers are a starting point: run `ep-ops bench tune`, or set them
(`dispatch_sms`, `combine_sms`, `Communicator.sm_budget`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cute_kernels.heap import RING_BYTES, SEND, Problem

from ...specs import DispatchSpec
from ..budget import Budget
from .rates import H200, PULL, PUSH, SM, passing_rows
from .residency import MARGIN, STAGING_BLOCKS, row_blocks
from .tuning import Knobs, Tuning, count, text_of


@dataclass(frozen=True)
class TokenTraffic:
    """Average rows that a rank moves for each token of a rank, their size, and their number of slices in a combine.
    `adds_own`, `across`: whether owners add the rows of their own rank in a combine, and whether there are several
    NVLink domains. `sum_bytes`: bytes of a sum of a combine if sums are sent in a format; else 0."""

    ranks: int
    reached: float
    crossing: float
    rows: float
    row_bytes: int
    slices: int
    adds_own: bool = False
    across: bool = False
    sum_bytes: int = 0

    @staticmethod
    def of(problem: Problem, slices: int) -> TokenTraffic:
        """Return the traffic of tokens that each choose `top_k` different experts, all equally likely."""
        held, experts = problem.experts_per_rank, sum(problem.experts_per_rank)
        chosen = min(problem.top_k, experts)
        missed = [math.comb(experts - here, chosen) / math.comb(experts, chosen) for here in held]
        reached = len(missed) - sum(missed)
        crossing = reached * (1 - 1 / len(missed))
        sizes = problem.row_bytes, slices, problem.adds_own, bool(problem.domains)
        return TokenTraffic(len(missed), reached, crossing, chosen, *sizes)

    @property
    def copies(self) -> TokenTraffic:
        """Return the traffic of token-major rows: one for each rank reached."""
        return _changed(self, rows=self.reached)

    def within(self, rows: int, tokens: int) -> TokenTraffic:
        """Return the traffic with a buffer of so many rows, on a rank of so many tokens: an average token has no more
        rows than fit."""
        each = max(self.reached, -(-rows // max(1, tokens)))
        return self if each >= self.rows else _changed(self, rows=each)

    def in_format(self, sum_bytes: int) -> TokenTraffic:
        """Return the traffic of a combine whose sums have this many bytes on the wire; 0: those of a row."""
        return _changed(self, sum_bytes=sum_bytes) if sum_bytes else self

    @property
    def layout(self) -> str:
        """Layout of such rows, as rows of the table name it."""
        return "grouped" if self.rows >= 2 * self.reached else "token_major"

    def dispatch_sms(self, sms: int) -> int:
        """Return the SMs of a dispatch on a GPU with `sms`: they fetch one row for each rank reached, and store all
        rows. Other SMs stage x."""
        staged = 1 if self.crossing else 0
        seconds = self._seconds(PULL, self.crossing, passing_rows("dispatch", self.reached, 0, self.rows, staged))
        asking = SM.under_way / RING_BYTES * self.reached / self.crossing if self.crossing else 0.0
        return self._enough(max((self.reached + self.rows) / SM.copies / seconds, asking), sms)

    def combine_sms(self, sms: int) -> int:
        """Return the SMs that a combine needs on a GPU with `sms`: they read expert rows and push sums, and read pushed
        sums and write results. Across NVLink domains its blocks also put sums on the wire, and all are of use."""
        if self.across:
            return sms - 2 * MARGIN
        return self._enough(self._pushing + self._summing, sms)

    def alone(self, sms: int, knobs: Knobs) -> int:
        """Return the SMs of a combine that does not run concurrently with computation, in whole TPCs."""
        needed = self.combine_sms(sms)
        return max(needed, count(knobs.sms, sms) // 2 * 2) if self.crossing and knobs.sms is not None else needed

    @property
    def combining(self) -> str:
        """A combine, as rows of the table name it."""
        return "combine across domains" if self.across else "combine"

    def gather_sms(self, sms: int) -> int:
        """Return the SMs of a gather on a GPU with `sms`: they fetch one row for each rank reached, and write sums."""
        moved = passing_rows("combine_gathered", 0, self.reached, 0, 1)
        return self._enough(moved / SM.gathers / self._seconds(PULL, self.crossing, moved), sms)

    def scaled_sms(self, sms: int) -> int:
        """Return the SMs of the backward of a weighted combine on a GPU with `sms`: they fetch one row for each rank
        reached, and read and write one for each expert."""
        staged = 1 if self.crossing else 0
        passing = passing_rows("combine_backward", 2 * self.reached, 0, 2 * self.rows, staged)
        seconds = self.row_bytes * self._seconds(PULL, self.crossing, passing)
        return self._enough((self.rows + self.reached / 2) * self.slices * SM.scale_slice / seconds, sms)

    def pushers(self, blocks: int, knobs: Knobs) -> int:
        """Return how many of the blocks (at least 2) of a combine push: those needed, and a share of the spare ones,
        but no larger part of them all than pushing is of the work."""
        if self.across:
            push = count(knobs.push, blocks)
        else:
            spare = max(0, blocks - math.ceil(self._pushing + self._summing))
            push = round(blocks * self._pushing / (self._pushing + self._summing))
            push = min(push, math.ceil(self._pushing) + count(knobs.spare, spare))
        return max(1, min(blocks - 1, push))

    @property
    def summers(self) -> int:
        """Return how many of a combine's blocks have to sum."""
        return math.ceil(self._summing)

    @property
    def _sent(self) -> float:
        """Sums of a combine that go to staging."""
        return self.crossing if self.adds_own else self.reached

    @functools.cached_property
    def _pushing(self) -> float:
        """Number of SMs that add and send a combine's rows."""
        sending = SEND + SM.encodes if self.sum_bytes else SEND
        added = self.rows * self._sent / self.reached
        return self._adding(1 if self.adds_own else self.ranks, added + sending * self._sent)

    @functools.cached_property
    def _summing(self) -> float:
        """Number of SMs that sum what arrives, and add the rows of their own rank."""
        own = self.rows * (1 - self._sent / self.reached)
        return SM.sums * self._adding(1, own + (SM.decodes if self.sum_bytes else 1) * self._sent + 1)

    def _adding(self, items: int, rows: float) -> float:
        """Return the SMs that process so many items, and add so many rows for each token, during a combine."""
        sums = self.sum_bytes / self.row_bytes if self.sum_bytes else 1.0
        passing = passing_rows("combine", sums * self._sent, sums * self._sent, self.rows, 1)
        seconds = self.row_bytes * self._seconds(PUSH, self.crossing * sums, passing)
        return (SM.add_item * items + (SM.add_slice * self.slices + self.row_bytes / SM.adds) * rows) / seconds

    def _seconds(self, link: float, crossing: float, passing: float) -> float:
        """Return the seconds for a byte of each of so many rows."""
        return max(crossing / link, passing / H200.memory)

    def _enough(self, needed: float, sms: int) -> int:
        """Round up to whole TPCs (2 SMs); at most half of the GPU if rows cross a link."""
        return min(2 * math.ceil(needed / 2), sms // 2 if self.crossing else sms)

    def expected(self, tokens: int, of_copy: float = 1.0) -> int:
        """Load of an average rank whose ranks have so many tokens: one for each row, `of_copy` for each copy."""
        return round(tokens * (self.rows + of_copy * self.reached))


_changed: Callable[..., TokenTraffic] = functools.lru_cache(maxsize=128)(dataclasses.replace)


def default_budget(
    traffic: TokenTraffic, tuning: Tuning, sms: int, most_dispatch: int, dispatch: int | None, combine: int | None
) -> Budget:
    """Return the default budget: the given values, limited to the GPU; otherwise those of the table and the model. A
    rank with more rows gets more in a dispatch."""

    return Budget(
        dispatch or traffic.dispatch_sms(sms), combine or traffic.alone(sms, tuning.knobs(traffic.combining)),
        combine or traffic.gather_sms(sms), combine or traffic.scaled_sms(sms), most_dispatch, sms,
        0 if traffic.ranks == 1 or dispatch else count(tuning.knobs("dispatch").surplus, sms),
        (dispatch is None, combine is None),
    )  # fmt: skip


class OperationSms:
    """How many SMs each throughput operation takes: what the budget allows, as far as its rows need them by the table
    and the model.

    `aside`: the operations run concurrently with computation. They leave it what they can do without: no blocks join
    them, and few SMs stage rows.
    """

    def __init__(
        self, problem: Problem, budget: Budget, average: TokenTraffic, tuning: Tuning, sms: int, aside: bool = False
    ) -> None:
        self.budget, self.average, self._aside = budget, average, aside
        self._problem, self._sms, self._tuning, self._knobs = problem, sms, tuning, tuning.knobs
        self._pulls = functools.lru_cache(maxsize=1024)(self._pulling)
        self._pushes = functools.lru_cache(maxsize=1024)(self._pushing)

    @property
    def beyond(self) -> int:
        """SMs that a rank with more rows than others may take in a dispatch."""
        return 0 if self._aside else self.budget.beyond

    @property
    def _state(self) -> Any:
        """The state of the budget and of the table, on which remembered numbers depend."""
        return self.budget.asked, self._tuning.version

    def traffic_of(self, rows: int, tokens: int, token_major: bool = False) -> TokenTraffic:
        """Return the traffic of an average rank. A combine does not know whether its rows are token-major, but a buffer
        of token-major rows has room for at most one row of each token of each rank."""
        return self.average.copies if token_major else self.average.within(rows, tokens)

    @property
    def token_major(self) -> tuple[int, int]:
        """SMs of a dispatch and of a combine of token-major rows."""
        copies = self.average.copies
        return self.dispatch(copies), self.combine(copies, self._knobs(copies.combining, copies.layout))

    def dispatch(self, traffic: TokenTraffic) -> int:
        """Return the SMs that fetch the rows of that traffic."""
        most = self.budget.dispatch
        return min(most, traffic.dispatch_sms(self._sms)) if self.budget.modelled[0] else most

    def combine(self, traffic: TokenTraffic, knobs: Knobs) -> int:
        """Return the SMs that push and sum the rows of that traffic."""
        most = self.budget.combine
        if not self.budget.modelled[1]:
            return most
        if self._aside:
            return min(most, traffic.combine_sms(self._sms))
        if not traffic.crossing:
            return most
        return max(2, min(self.budget.most_combine, traffic.alone(self._sms, knobs)))

    def pulling(self, traffic: TokenTraffic, spec: DispatchSpec, tokens: int) -> int:
        """Return the SMs that fetch rows. Those that the table has more for use at least as many as a rank with more
        rows, unless a budget was set or computation runs concurrently."""
        return self._pulls(traffic, spec, tokens, self._state)

    def _pulling(self, traffic: TokenTraffic, spec: DispatchSpec, tokens: int, state: Any) -> int:
        share, more = self._knobs("dispatch", traffic.layout, text_of(spec.format, spec.scales_layout), tokens).sms, 0
        if share is not None and self.beyond:
            more = max(self.beyond, count(share, self._sms))
        return max(self.dispatch(traffic), min(more, self.budget.most_dispatch))

    def pushing(self, traffic: TokenTraffic, tokens: int, rows: bool, format: str = "") -> dict[str, int]:
        """Return the number of blocks of a combine of that traffic, and how many of them push: always, and in addition
        on a rank with more rows. Without `rows` (of weights alone) there are none of the latter."""
        return self._pushes(traffic, tokens, rows, format, self._state)

    def _pushing(self, traffic: TokenTraffic, tokens: int, rows: bool, format: str, state: Any) -> dict[str, int]:
        knobs = self._knobs(traffic.combining, traffic.layout, format, tokens)
        blocks = self.combine(traffic, knobs)
        pushers = traffic.pushers(blocks, knobs)
        return {
            "pushers": pushers,
            "expected": traffic.expected(tokens, SEND),
            "joining": max(0, blocks - pushers - traffic.summers) if rows and knobs.joins else 0,
            "blocks": blocks,
        }

    def publishing(
        self, pulling: int, tokens: int = 0, *, route: bool = False, rows: bool = False, weights: bool = False,
        pushes: bool = False, **others: Any,
    ) -> int:  # fmt: skip
        """Return the number of blocks of a publish kernel of this variant: tile blocks, and blocks that stage, announce
        and, across NVLink domains, send and relay rows. They leave `pulling` SMs to the kernel that runs next, at the
        same time."""
        tile_blocks = self._problem.tiles if route or weights else 0
        staging = self._sms - MARGIN - tile_blocks - pulling
        if self._aside:
            staging = min(staging, 1 + min(STAGING_BLOCKS, pulling))
        if pushes:
            staging = min(staging, count(self._knobs("dispatch", "token_major", "", tokens).push, self._sms))
        staging = max(row_blocks(self._problem), staging)
        return tile_blocks + (staging if rows else 0)
