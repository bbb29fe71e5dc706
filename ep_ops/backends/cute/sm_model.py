"""Numbers of multiprocessors (SMs) of dispatch and combine: those that the user sets, or those of a model.

The model assumes even routing. Of the rows that belong to one token, a rank moves on average:

    reached   into it in a dispatch, out of it in a combine: one for each rank that the token reaches
    crossing  of these over the link
    rows      into or out of the receive buffer: one for each expert, or, token-major, for each rank reached

An operation lasts until its rows have crossed the link, or until its reads and writes of memory have ended, if that
takes longer. It uses as many SMs as move its bytes in that time, times a headroom (`*_HEADROOM`), because with exactly
as many, SMs and link would wait for each other alternately. The rest of the GPU is left to computation. With several
ranks an operation uses at most half of the GPU. A combine that does not run concurrently with computation takes more
(`ADDING_SHARE`).

Rates were measured on H200s (18 links of NVLink 4, 132 SMs). H100s have the same links and slower memory, which changes
how a combine divides its SMs, and how many SMs a dispatch of rows in a format takes (`fast_memory`). On other GPUs the
numbers are a starting point: measure, and set them (`dispatch_sms`, `combine_sms`, `Communicator.sm_budget`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.heap import RING_BYTES, SEND, Problem

from ...specs import DispatchSpec
from ..budget import Budget

PULL = 320e9
"""Bytes per second that a rank fetches from its peers by bulk copies of rows, in one direction."""
PUSH = 331e9
"""Bytes per second of the rows that a combine sends to its peers, from its begin to the last sum, with 4096 tokens on
each rank."""
MEMORY = 3.7e12
"""Bytes per second that a GPU reads and writes in its memory while it copies x to staging."""
FAST_MEMORY = 4.5e12
"""Bytes per second from which on memory counts as fast. H200s have 4.8e12, H100s 3.35e12."""
COPY_SM = 80e9
"""Bytes per second that an SM moves in and out by bulk copies (with 8 to 16 SMs, which do not fill the link)."""
UNDER_WAY = 2.3e6
"""Bytes of loads from peers that must be in flight to saturate the link. Estimated from top-1 on 4 ranks, where 1.5 MB
took 174 us, 2.1 MB 164 us and 3.3 MB 160 us."""
ADD_ITEM = 24e-9
ADD_SLICE = 29e-9
ADD = 146e9
"""Time of an SM of a combine: `ADD_SLICE` seconds for each slice of a row that it adds plus one second for every `ADD`
bytes, `SEND` times as long for a row that it sends, and `ADD_ITEM` seconds to check whether a token has rows. Fitted to
rows of 4, 8 and 16 KiB in slices of 2 and 4 KiB, with fewer SMs than saturate the link. Measured times are up to 4 %
longer on 4 ranks, 6 to 9 % on 2 ranks, and 15 % if memory is saturated (36 and more SMs that push)."""
ENCODE, DECODE = 0.9, 1.5
"""Cost of quantizing a sum that a combine sends in a format, and of adding one at its owner, relative to adding a row.
Estimated from the numbers of instructions; not measured."""
ADDING_SHARE = 5 / 6
"""Share of the GPU for a combine that does not run concurrently with computation. 2 H100s, 4096 tokens: grouped rows
took 277 us with 80 SMs, 262 with 98, 253 with 112 and 120, and with 60 between 257 and 302 us, depending on how many of
them push; token-major rows 180 to 185 us with 98 to 120. On 2 H200s grouped rows took 200, 200 and 199 us with 110, 120
and 132. On 4 H200s 96 SMs took at most 2 % longer than fewer; more are not measured there."""
SURPLUS_SHARE = 3 / 7
"""Share of the GPU for a dispatch on a rank with more rows. 2 H100s, 4096 tokens: with at most 66, 60, 56 and 52 SMs,
1.93 times the mean rows on one rank took 433, 427, 424 and 422 us; on 2 H200s 334, 330, 326 and 337 us."""
FORMAT_SHARE, PACKED_SHARE = 5 / 11, 1 / 2
"""Share of the GPU for a dispatch of rows in a format, which are short and have scales to store; the second if scales
are packed and memory is fast. 2 H200s, 4096 tokens, 56, 60, 66, 72 and 80 SMs: packed scales 141, 140, 137, 137 and 138
us, along a known route 132, 132, 133, 136 and 140 us; scales in columns 151, 149, 154, 155 and 155 us. 2 H100s, 52, 56,
60 and 66 SMs: packed scales 152, 151, 150 and 154 us. Not measured: scales in columns on H100s, the formats `wire:*`,
and more ranks."""
MANY_TOKENS = 2048
SPARE_SHARE, SPARE_TWO, SPARE_GROUPED = 1 / 4, 1 / 8, 1 / 32
"""Share of the blocks beyond those that a combine needs which push as well, in case the link is faster than in this
model or more rows cross it; the others sum. The second is for two ranks with fast memory and more than `MANY_TOKENS`
tokens each, the third for rows of these that are grouped by expert and sent in no format. 2 H200s, 4096 tokens of 14
KiB, with so many of 110 blocks: weighted rows grouped by expert 203 (24 blocks), 200 (26), 202 (28), 204 (30), 213
(36), 217 us (42); token-major 182 (14), 178 (18), 179 (22), 181 us (29); in the format wire:e4m3/32/mx grouped 208
(30), 186 (36), 189 us (42), token-major 115, 121 and 125 us. Fewer tokens need more blocks: weighted rows of 2048, 1024
and 512 tokens 120, 78 and 53 us (26), 121, 72 and 48 us (34), 124, 75 and 48 us (42). 36, their default, is not
measured."""
GATHER_SM = 68e9
"""Bytes per second that an SM of a gathering combine fetches and writes (8 SMs, which nearly saturate the link)."""
SCALE_SLICE = 90e-9
"""Seconds that an SM needs for a slice in the backward of a weighted combine, which processes a row for each expert and
half a row for each rank reached (32 SMs, rows of 4 and 16 KiB)."""
SCALE_HEADROOM = 1.5
"""Factor on the SMs of the backward of a weighted combine, because skewed routing gives the busiest rank more rows."""
PULL_HEADROOM = 6 / 5
"""Factor on the SMs of kernels that fetch. A larger one does not make them faster."""
PUSH_HEADROOM = 1.08
"""Factor on the SMs that push in a combine. With a larger one, fences wait for more rows in flight, and sums start
later."""
SUM_HEADROOM = 1.3
"""Factor on the SMs that sum in a combine, because they wait for flags."""

ACROSS_LEFT = 4
"""Multiprocessors that a combine leaves free with several NVLink domains. Its blocks also put sums on the wire, and
more of them are faster (2 domains of one H200: 60 blocks 1017 us, 96 blocks 527 us, 128 blocks 428 us)."""
ACROSS_PUSHING, ACROSS_ENCODING = 9 / 32, 11 / 32
"""Share of its blocks that push there, without and with a format of the sums, which makes pushing take longer. 2 H100s
over NVSHMEM, 4096 tokens: if 32, 36, 40 and 48 of 128 blocks push, a combine takes 371, 376, 379 and 398 us, and 375,
344, 318 and 323 us in a format. Not measured in domains of several ranks."""


@dataclass(frozen=True)
class TokenTraffic:
    """Average rows that a rank moves for each token of a rank, their size, and their number of slices in a combine.
    `across`: there are several NVLink domains. `fast_memory`: see :func:`has_fast_memory`. `sum_bytes`: bytes of a sum
    of a combine if sums are sent in a format; else 0."""

    ranks: int
    reached: float
    crossing: float
    rows: float
    row_bytes: int
    slices: int
    across: bool = False
    fast_memory: bool = False
    sum_bytes: int = 0

    @staticmethod
    def of(
        experts_per_rank: Sequence[int], top_k: int, row_bytes: int, slices: int, across: bool = False,
        fast_memory: bool = False,
    ) -> TokenTraffic:  # fmt: skip
        """Return the traffic of tokens that each choose `top_k` different experts, all equally likely."""
        experts = sum(experts_per_rank)
        chosen = min(top_k, experts)
        missed = [math.comb(experts - held, chosen) / math.comb(experts, chosen) for held in experts_per_rank]
        reached = len(missed) - sum(missed)
        crossing = reached * (1 - 1 / len(missed))
        return TokenTraffic(len(missed), reached, crossing, chosen, row_bytes, slices, across, fast_memory)

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

    def dispatch_sms(self, sms: int) -> int:
        """Return the SMs of a dispatch on a GPU with `sms`: they fetch one row for each rank reached, and store all
        rows."""
        moved = self.reached + self.rows
        staged = 2 if self.crossing else 0  # read and written, by the other SMs
        seconds = max(self.crossing / PULL, (moved + staged) / MEMORY)
        asking = UNDER_WAY / RING_BYTES * self.reached / self.crossing if self.crossing else 0.0
        return self._enough(max(PULL_HEADROOM * moved / COPY_SM / seconds, asking), sms)

    def combine_sms(self, sms: int) -> int:
        """Return the SMs that a combine needs on a GPU with `sms`: they read expert rows and push sums, and read pushed
        sums and write results."""
        if self.across:
            return sms - ACROSS_LEFT
        return self._enough(self._pushing + self._summing, sms)

    def most_combine_sms(self, sms: int) -> int:
        """Return the SMs of a combine on a GPU with `sms` that has nothing else to do."""
        return max(self.combine_sms(sms), 2 * int(sms * ADDING_SHARE / 2) if self.crossing else 0)

    def gather_sms(self, sms: int) -> int:
        """Return the SMs of a gather on a GPU with `sms`: they fetch one row for each rank reached, and write sums."""
        moved = self.reached + 1
        seconds = max(self.crossing / PULL, moved / MEMORY)
        return self._enough(PULL_HEADROOM * moved / GATHER_SM / seconds, sms)

    def scaled_sms(self, sms: int) -> int:
        """Return the SMs of the backward of a weighted combine on a GPU with `sms`: they fetch one row for each rank
        reached, and read and write one for each expert."""
        moved = 2 * (self.reached + self.rows) + (2 if self.crossing else 0)
        seconds = self.row_bytes * max(self.crossing / PULL, moved / MEMORY)
        busy = (self.rows + self.reached / 2) * self.slices * SCALE_SLICE
        return self._enough(SCALE_HEADROOM * busy / seconds, sms)

    def pushers(self, blocks: int, tokens: int) -> int:
        """Return how many of the blocks (at least 2) of a combine push: those needed, and a share of the spare ones. If
        slow memory limits both kinds of blocks, they share the GPU as they share the rows. `tokens`: of a rank."""
        if self.across:
            share = ACROSS_ENCODING if self.sum_bytes else ACROSS_PUSHING
            return max(1, min(blocks - 1, round(blocks * share)))
        share = round(blocks * self._pushing / (self._pushing + self._summing))
        if not self._memory_limits:
            spare = max(0, blocks - math.ceil(self._pushing + self._summing))
            share = min(share, math.ceil(self._pushing) + int(spare * self._spare_share(tokens)))
        return max(1, min(blocks - 1, share))

    @property
    def _memory_limits(self) -> bool:
        """Whether slow memory limits a combine: owners add the rows of their own rank, and a copy has several."""
        return self.adds_own and self._grouped and not self.fast_memory

    @property
    def _grouped(self) -> bool:
        """Whether a copy has several rows."""
        return self.rows >= 2 * self.reached

    def _spare_share(self, tokens: int) -> float:
        """Return the share of the spare blocks that push."""
        if not (self.adds_own and self.fast_memory and tokens > MANY_TOKENS):
            return SPARE_SHARE
        return SPARE_GROUPED if self._grouped and not self.sum_bytes else SPARE_TWO

    @property
    def summers(self) -> int:
        """Return how many of a combine's blocks have to sum."""
        return math.ceil(self._summing)

    @property
    def adds_own(self) -> bool:
        """Whether the owners of tokens add the rows of their own rank in a combine (Combine.adds_own)."""
        return self.ranks == 2 and not self.across

    @property
    def joins(self) -> bool:
        """Whether blocks that sum join those that push in a combine on a rank with more rows. Where slow memory limits
        both, and across NVLink domains, none does: such a rank has more for those that sum, too."""
        return not self.across and (self.fast_memory or not self.adds_own)

    @property
    def _sent(self) -> float:
        """Sums of a combine that go to staging."""
        return self.crossing if self.adds_own else self.reached

    @functools.cached_property
    def _pushing(self) -> float:
        """Number of SMs that add and send a combine's rows."""
        sending = SEND + ENCODE if self.sum_bytes else SEND
        added = self.rows * self._sent / self.reached
        return PUSH_HEADROOM * self._adding(1 if self.adds_own else self.ranks, added + sending * self._sent)

    @functools.cached_property
    def _summing(self) -> float:
        """Number of SMs that sum what arrives, and add the rows of their own rank."""
        own = self.rows * (1 - self._sent / self.reached)
        return SUM_HEADROOM * self._adding(1, own + (DECODE if self.sum_bytes else 1) * self._sent + 1)

    def _adding(self, items: int, rows: float) -> float:
        """Return the SMs that process so many items, and add so many rows for each token, during a combine."""
        sums = self.sum_bytes / self.row_bytes if self.sum_bytes else 1.0
        moved = self.rows + 2 * sums * self._sent + 1
        seconds = self.row_bytes * max(self.crossing * sums / PUSH, moved / MEMORY)
        return (ADD_ITEM * items + (ADD_SLICE * self.slices + self.row_bytes / ADD) * rows) / seconds

    def _enough(self, needed: float, sms: int) -> int:
        """Round up to whole TPCs (2 SMs); at most half of the GPU if rows cross a link."""
        return min(2 * math.ceil(needed / 2), sms // 2 if self.crossing else sms)

    def expected(self, tokens: int, of_copy: float = 1.0) -> int:
        """Load of an average rank whose ranks have so many tokens: one for each row, `of_copy` for each copy."""
        return round(tokens * (self.rows + of_copy * self.reached))


_changed: Callable[..., TokenTraffic] = functools.lru_cache(maxsize=128)(dataclasses.replace)


def default_budget(
    traffic: TokenTraffic, sms: int, most_dispatch: int, dispatch: int | None, combine: int | None
) -> Budget:
    """Return the default budget: the given values, limited to the GPU; otherwise those of the model. A rank with more
    rows gets more in a dispatch."""
    return Budget(
        dispatch or traffic.dispatch_sms(sms), combine or traffic.most_combine_sms(sms),
        combine or traffic.gather_sms(sms), combine or traffic.scaled_sms(sms), most_dispatch, sms,
        0 if traffic.ranks == 1 or dispatch else int(sms * SURPLUS_SHARE), (dispatch is None, combine is None),
    )  # fmt: skip


def has_fast_memory(device: torch.device) -> bool:
    """Return whether a GPU's memory is fast (`FAST_MEMORY`)."""
    return memory_speed(device) >= FAST_MEMORY


def memory_speed(device: torch.device) -> float:
    """Return the bytes per second of a GPU's memory by its data sheet: its clock in kHz, with two transfers a cycle,
    times its bus width in bits."""
    gpu = torch.cuda.get_device_properties(device)
    return 2 * 1e3 * gpu.memory_clock_rate * gpu.memory_bus_width / 8


class OperationSms:
    """How many SMs each throughput operation takes: what the budget allows, as far as the model says that its rows need
    them.

    `aside`: the operations run concurrently with computation. They leave it what they can do without: no blocks join
    them, and few SMs stage rows.
    """

    def __init__(self, problem: Problem, budget: Budget, average: TokenTraffic, sms: int, aside: bool = False) -> None:
        self.budget, self.average, self._aside = budget, average, aside
        self._problem, self._sms = problem, sms

    @property
    def beyond(self) -> int:
        """SMs that a rank with more rows than others may take in a dispatch."""
        return 0 if self._aside else self.budget.beyond

    def traffic_of(self, rows: int, tokens: int, token_major: bool = False) -> TokenTraffic:
        """Return the traffic of an average rank. A combine does not know whether its rows are token-major, but a buffer
        of token-major rows has room for at most one row of each token of each rank."""
        return self.average.copies if token_major else self.average.within(rows, tokens)

    @property
    def token_major(self) -> tuple[int, int]:
        """SMs of a dispatch and of a combine of token-major rows."""
        copies = self.average.copies
        return self.dispatch(copies), self.combine(copies)

    def dispatch(self, traffic: TokenTraffic) -> int:
        """Return the SMs that fetch the rows of that traffic."""
        most = self.budget.dispatch
        return min(most, traffic.dispatch_sms(self._sms)) if self.budget.modelled[0] else most

    def combine(self, traffic: TokenTraffic) -> int:
        """Return the SMs that push and sum the rows of that traffic."""
        most = self.budget.combine
        needed = self._aside and self.budget.modelled[1]
        return min(most, traffic.combine_sms(self._sms)) if needed else most

    def pulling(self, traffic: TokenTraffic, spec: DispatchSpec) -> int:
        """Return the SMs that fetch rows. Rows in a format use more, at least as many as a rank with more rows, unless
        a budget was set or computation runs concurrently."""
        more = 0
        if spec.format and self.beyond:
            packed = spec.scales_layout == "packed" and traffic.fast_memory
            more = max(self.beyond, int(self._sms * (PACKED_SHARE if packed else FORMAT_SHARE)))
        return max(self.dispatch(traffic), min(more, self.budget.most_dispatch))

    def pushing(self, traffic: TokenTraffic, tokens: int, rows: bool) -> dict[str, int]:
        """Return the number of blocks of a combine of that traffic, and how many of them push: always, and in addition
        on a rank with more rows. Without `rows` (of weights alone) there are none of the latter."""
        blocks = self.combine(traffic)
        pushers = traffic.pushers(blocks, tokens)
        return {
            "pushers": pushers,
            "expected": traffic.expected(tokens, SEND),
            "joining": max(0, blocks - pushers - traffic.summers) if rows and traffic.joins else 0,
            "blocks": blocks,
        }

    def publishing(
        self, pulling: int, *, route: bool = False, rows: bool = False, weights: bool = False, pushes: bool = False,
        **others: Any,
    ) -> int:  # fmt: skip
        """Return the number of blocks of a publish kernel of this variant: tile blocks, and blocks that stage, announce
        and, across NVLink domains, send and relay rows. They leave `pulling` SMs to the kernel that runs next, at the
        same time."""
        tile_blocks = self._problem.tiles if route or weights else 0
        staging = self._sms - MARGIN - tile_blocks - pulling
        if self._aside:
            staging = min(staging, 1 + min(STAGING_BLOCKS, pulling))
        if pushes:
            staging = min(staging, PUSHING_BLOCKS)
        staging = max(row_blocks(self._problem), staging)
        return tile_blocks + (staging if rows else 0)


# Co-residency. Blocks that wait for others keep their place on the GPU, so those that they wait for must find one. In a
# throughput dispatch these are the tile blocks of all ranks, the announcing block and one that stages, and across
# NVLink domains the relaying block and one that sends. Latency kernels have no more blocks than there are SMs, and two
# fit on one.

MARGIN = 2
"""SMs that are left free, so that a block of another kernel delays nothing."""
STAGING_BLOCKS = 16
"""SMs that the budget of a dispatch leaves to staging and announcing. One SM takes 3.9 ms for 59 MB; other smaller
numbers are not measured."""


PUSHING_BLOCKS = 12
"""SMs that push the rows of a dispatch. With fewer and with more it takes longer (2 H100s, 4096 tokens of 14 KiB, known
route: 12 SMs 176 us, 8 SMs 194 us, 16 SMs 188 us, 24 SMs 208 us)."""


def most_pulling(problem: Problem, sms: int) -> int:
    """Return the most SMs that may pull: blocks that place the route and some that stage rows run at the same time."""
    return sms - problem.tiles - STAGING_BLOCKS - MARGIN


def needed(problem: Problem) -> int:
    """Return the smallest number of multiprocessors: for the blocks that wait for others, those that stage and send,
    and one that pulls."""
    return problem.tiles + row_blocks(problem) + 1 + MARGIN


def row_blocks(problem: Problem) -> int:
    """Return the smallest number of blocks, in addition to the tile blocks, that stage and announce rows: one of each
    kind; across NVLink domains also one that relays and one that sends."""
    return 4 if problem.domains else 2


def too_small(problem: Problem, found: int) -> str | None:
    """Return the error text for a GPU, or a part of one, with too few multiprocessors."""
    least = needed(problem)
    if found >= least:
        return None
    return (
        f"the GPU has {found} multiprocessors for this process; the cute backend needs {least} with these sizes, so"
        " that blocks that wait for each other run at once. Give it a larger part of the GPU, or use"
        " backend='reference'"
    )
