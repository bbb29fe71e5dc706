"""The publish kernel of a token-major dispatch (publish.py), which also writes local ids and weights [R, K].

Each rank stores its ids and weights where peers read them, because a rank that has a copy reads all K of its token.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from .. import sync
from .placing_tokens import finish_copies, new_copy_tables, place_copies, place_copy_weights, weights_and_ids
from .publish import Publish, PublishArgs


@dataclass(frozen=True)
class PublishTokens(Publish):
    """`route` or `weights`: without either there is nothing but rows to publish, which the publish kernel does."""

    NAME: ClassVar[str] = "ep_publish_tokens"
    TOKEN_MAJOR: ClassVar[bool] = True

    @property
    def published_bytes(self) -> int:
        return self.problem.token_bytes

    @cute.jit
    def publish_weight(self, ranks: sync.Ranks, j: Int32, args: Any) -> None:
        """Store a weight and its id where peers read them."""
        p = self.problem
        token = j // p.top_k
        k = j - token * p.top_k
        weights, ids = (view.part(token) for view in weights_and_ids(p, ranks.view("weights").base))
        if const_expr(self.weights):
            weights[k] = args.topk_weights[j]
        ids[k] = args.topk_idx[j]

    def new_tables(self, smem: Any, table: Any) -> Any:
        return new_copy_tables(self.problem, smem)

    def place(self, ranks: sync.Ranks, ok: Int32, tile: Int32, tables: Any, args: PublishArgs) -> None:
        place_copies(ranks, ok, tile, tables, args)

    def is_placed(self, ok: Int32, tables: Any) -> Boolean:
        return ok != 0

    def finish(self, ranks: sync.Ranks, tile: Int32, tables: Any, args: PublishArgs) -> None:
        finish_copies(ranks, tile, tables, args, self.weights)

    def place_weights(self, ranks: sync.Ranks, ok: Int32, tile: Int32, args: PublishArgs) -> None:
        place_copy_weights(ranks, ok, tile, args)
