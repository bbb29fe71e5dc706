"""The publish kernel of a token-major dispatch (publish.py), which also writes local ids and weights [R, K].

Each rank holds its ids, and its weights, where peers read them: a rank that has a copy looks at all K of its token.
To other NVLink domains they go as weights do; so there is something to relay where no rows travel, too.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute import arch

from .. import ptx, sync
from ..launch import RankArgs
from .placing_tokens import finish_copies, new_copy_tables, offset_of_token, place_copies, place_copy_weights
from .publish import THREADS, Publish
from .route import Counters, publish_tile


class PublishTokensArgs(NamedTuple):
    """As those of the publish kernel. Along a known route there are no `recv_idx` either."""

    ranks: RankArgs
    x: Int64
    topk_idx: Int64
    topk_weights: Int64
    scales: Int64
    send_rows: Int64
    arrivals: Int64
    offs: Int64
    counts: Int64
    dropped: Int64
    recv_weights: Int64
    recv_idx: Int64
    tokens: Int32
    max_tokens: Int32
    capacity: Int32  # rows of the receive buffer; along a known route those that are cleared behind the last copy
    num_rows: Int32  # of the receive buffer
    alignment: Int32  # 1
    slots: Int32  # 0
    blocks: Int32


@dataclass(frozen=True)
class PublishTokens(Publish):
    """`route` or `weights`: without either there is nothing but rows to publish, which the publish kernel does."""

    NAME: ClassVar[str] = "ep_publish_tokens"
    Args: ClassVar[Any] = PublishTokensArgs

    @property
    def published_bytes(self) -> int:
        return self.problem.token_bytes

    @cute.jit
    def publish_weight(self, ranks: sync.Ranks, j: Int32, args: Any) -> None:
        """And the id."""
        p = self.problem
        token = j // p.top_k
        place = ranks.at(ranks.own, "weights") + offset_of_token(p, token, j - token * p.top_k)
        if const_expr(self.weights):
            ptx.st_f32(place, ptx.ld_f32(args.topk_weights + Int64(j) * 4))
        ptx.st_i32(place + p.weights_each * 4, ptx.ld_i32(args.topk_idx + Int64(j) * 4))

    @cute.jit
    def do_tile(self, ranks: sync.Ranks, smem: Any, tile: Int32, args: Any) -> None:
        p = self.problem
        tid, _, _ = arch.thread_idx()
        failed = smem.allocate_tensor(Int32, cute.make_layout(1))
        if tid == 0:
            failed[0] = 0
        counters: Any = None
        if const_expr(self.route):
            table = smem.allocate_tensor(Int32, cute.make_layout(p.table_ints))
            counters = Counters(table, smem.allocate_tensor(Int32, cute.make_layout(p.counters)))
            tables = new_copy_tables(p, smem)
            publish_tile(ranks, counters, THREADS, tile, args, True)
        self.publish_weights(ranks, tile, args)
        self.put_tile(ranks, counters, tile, args)
        ok = self.meet(ranks, tile, failed)
        if const_expr(self.route):
            place_copies(ranks, THREADS, ok, tile, tables, args)
            # The tile's part of the lists comes before the release, and before what this block reads of it. Without the
            # flag the pull kernel gives up, and looks at no list.
            arch.sync_threads()
            if tid == 0 and ok != 0:
                ranks.signal("placed", ranks.rank, tile)
            finish_copies(ranks, THREADS, tile, tables, args, self.weights)
        else:
            place_copy_weights(ranks, THREADS, ok, tile, args)
