"""PyTorch's interface for dispatch and combine, ``torch.distributed._token_switch.TokenSwitch``, on ep_ops operators.

Gradients reach tokens, experts' outputs and routing weights.

    switch = EpOpsTokenSwitch(group, 64, 4096, 8 * 4096, 7168 * 2)  # arguments of TokenSwitchNCCL
    routing = switch.create_routing(topk_idx, counts, layout="expert_major")
    rows, row_weights, _ = switch.dispatch(routing, tokens, topk_weights, switch.max_recv_tokens_per_rank)
    out = switch.combine(routing, experts(rows, counts) * row_weights.unsqueeze(1))
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

try:
    from torch.distributed._token_switch import Routing, TokenSwitch
except ImportError as error:
    raise ImportError(
        "ep_ops.integrations.token_switch needs a PyTorch that has torch.distributed._token_switch, but torch"
        f" {torch.__version__} does not: {error}"
    ) from error

from ep_ops.communicator import Communicator
from ep_ops.operators.rejection import reject
from ep_ops.records import GROUPED, TOKEN_MAJOR

_LAYOUTS = {"flat": TOKEN_MAJOR, "expert_major": GROUPED}


class EpOpsTokenSwitch(TokenSwitch):
    """A TokenSwitch on a :class:`ep_ops.Communicator`.

    Layout "flat": a row for each (token, rank), with local expert ids and weights [R, K]. "expert_major": a row for
    each (token, local expert), grouped by expert, with weights [R]. Rows are in the order of (expert,) source rank and
    token. Rows that hold no token are undefined: do not use them in computations that mix rows.

    The host is not synchronized. Tokens that do not fit in ``max_recv_tokens_per_rank`` are dropped, are missing in the
    sums of combine, and are counted in ``routing.handle.dropped``.

    Args:
        process_group: the ranks that share the experts. None: the default group.
        num_experts: number of experts of all ranks.
        max_dispatch_tokens_per_rank: the largest number of tokens that a rank passes.
        max_recv_tokens_per_rank: R, the largest number of rows that a rank receives.
        max_token_bytes: bytes of a token: hidden size times the size of the dtype.
        dtype: dtype of the tokens.
        options: more arguments of :class:`ep_ops.Communicator`. Switches with equal arguments share one.

    Raises:
        ValueError: ``max_token_bytes`` is not a multiple of the size of the dtype, or an argument of a method is not
            allowed. Tensors are checked by the communicator, which raises on all ranks.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        num_experts: int,
        max_dispatch_tokens_per_rank: int,
        max_recv_tokens_per_rank: int,
        max_token_bytes: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> None:
        hidden_size, odd = divmod(max_token_bytes, dtype.itemsize)
        if odd:
            raise ValueError(
                f"max_token_bytes is {max_token_bytes}; allowed: a multiple of {dtype.itemsize}, for {dtype}"
            )
        self._group, self._rows, self._dtype = process_group, max_recv_tokens_per_rank, dtype
        self._options = dict(alignment=1) | options | dict(
            num_experts=num_experts, hidden_size=hidden_size, max_tokens_per_rank=max_dispatch_tokens_per_rank
        )  # fmt: skip
        self._comm: Communicator | None = None

    @property
    def max_recv_tokens_per_rank(self) -> int:
        """Return the largest number of rows that a rank receives."""
        return self._rows

    @property
    def comm(self) -> Communicator:
        """Return the communicator, which the first routing creates. RuntimeError before."""
        if self._comm is None:
            raise RuntimeError("there is no communicator before the first create_routing, which determines top_k")
        return self._comm

    def create_routing(
        self, topk_idx: Tensor, per_expert_token_counts: Tensor | None = None, *, layout: str
    ) -> Routing:
        """Plan where the tokens go. Collective.

        Args:
            topk_idx: expert ids, int32 or int64 [T, K]; -1 means none.
            per_expert_token_counts: int32 [local experts or more], set to the number of (token, local expert) that
                arrive for each local expert.
            layout: "flat" or "expert_major".
        """
        if layout not in _LAYOUTS:
            raise ValueError(f"layout is {layout!r}; allowed: 'flat', 'expert_major'")
        if self._comm is None:
            self._comm = Communicator.shared(
                self._group, device=topk_idx.device, dtype=self._dtype, top_k=topk_idx.shape[1], **self._options
            )
        route, _ = self._comm.plan(topk_idx, layout=_LAYOUTS[layout], capacity=self._rows)
        if per_expert_token_counts is not None:
            per_expert_token_counts[: self._comm.num_local_experts].copy_(route.counts)
        return Routing(handle=route, topk_idx=topk_idx, layout=layout)

    def dispatch(
        self,
        routing: Routing,
        tokens: Tensor,
        topk_weights: Tensor,
        max_recv_tokens: int | None = None,
        *,
        out: tuple[Tensor, Tensor | None, Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Send the tokens along ``routing``. Collective; differentiable unless ``out`` is given.

        Args:
            tokens: [T, H].
            topk_weights: float32 [T, K].
            max_recv_tokens: rows to return, at most ``max_recv_tokens_per_rank``; needed without ``out``.
            out: tensors to write to, as returned.

        Returns:
            Rows, their weights, and int64 local expert ids [R, K], -1 for none; None with layout "expert_major".
        """
        if out is not None:
            self._dispatch(routing, tokens, topk_weights, *out)
            return out
        if max_recv_tokens is None:
            self._reject("dispatch_planned", "max_recv_tokens is None; allowed: an int unless out= is given")
        self._check_rows("dispatch_planned", "max_recv_tokens", max_recv_tokens)
        sent = self.comm.dispatch_planned(tokens, routing.handle, topk_weights)
        assert sent.weights is not None
        ids = None if sent.local_idx is None else sent.local_idx[:max_recv_tokens].long()
        return sent.x[:max_recv_tokens], sent.weights[:max_recv_tokens], ids

    def combine(self, routing: Routing, expert_tokens: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Sum each token's rows, without weights. Collective; differentiable unless ``out`` is given.

        Args:
            expert_tokens: [R, H] in the rows of a dispatch along ``routing``, or fewer if they include all that
                arrived.
            out: [T, H] to write to.
        """
        if out is not None:
            self._combine(routing, expert_tokens, out)
            return out
        given = expert_tokens.shape[0]
        self._check_rows("combine", "the number of expert_tokens", given)
        if given < self._rows:
            expert_tokens = torch.nn.functional.pad(expert_tokens, (0, 0, 0, self._rows - given))
        return self.comm.combine(expert_tokens, routing.handle)

    def _alloc_dispatch_outputs(
        self, routing: Routing, tokens: Tensor, topk_weights: Tensor, max_recv_tokens: int, H: int, K: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        rows = tokens.new_zeros(max_recv_tokens, H)
        if routing.layout == "expert_major":
            return rows, topk_weights.new_zeros(max_recv_tokens), None
        ids = torch.full((max_recv_tokens, K), -1, dtype=torch.int64, device=tokens.device)
        return rows, topk_weights.new_zeros(max_recv_tokens, K), ids

    @torch.no_grad()
    def _dispatch(
        self, routing: Routing, tokens: Tensor, topk_weights: Tensor, out_tokens: Tensor,
        out_topk_weights: Tensor | None, out_topk_idx: Tensor | None,
    ) -> None:  # fmt: skip
        found = self.dispatch(routing, tokens, topk_weights, out_tokens.shape[0])
        for given, value in zip((out_tokens, out_topk_weights, out_topk_idx), found, strict=True):
            if given is not None and value is not None:
                given.copy_(value)

    @torch.no_grad()
    def _combine(self, routing: Routing, expert_tokens: Tensor, out_tokens: Tensor) -> None:
        out_tokens.copy_(self.combine(routing, expert_tokens))

    def _check_rows(self, operator: str, name: str, rows: int) -> None:
        if not 0 <= rows <= self._rows:
            self._reject(operator, f"{name} is {rows}; allowed: 0 to max_recv_tokens_per_rank, {self._rows}")

    def _reject(self, operator: str, reason: str) -> NoReturn:
        reject(operator, self.comm, ValueError(reason), 0, None)
