"""The communicators of a buffer. DeepEP's callers pass sizes with each call, and not when they create a buffer."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ep_ops import backends
from ep_ops.communicator import Communicator, together
from ep_ops.formats import round_up
from ep_ops.group import meeting
from ep_ops.group.exchange import Exchange
from ep_ops.nn.sums import sum_rows
from ep_ops.operators.rejection import reject
from ep_ops.records import TOKEN_MAJOR, Dispatched, Route, check_types, whole

Rows = Tensor | tuple[Tensor, Tensor]
"""[., H]; or float8_e4m3fn [., H] and their scales, float32 [., H / 128] or int32 (see :func:`format_of`)."""
Bias = Tensor | tuple[Tensor, Tensor] | None


class Communicators:
    """A communicator for each kind of rows, which all ranks create in the same call."""

    latency_max_tokens: int | None = None
    """The bound of all communicators that are created from now on (``Config.latency_max_tokens``)."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._made: dict[tuple[Any, ...], Communicator] = {}
        self._captured: list[Communicator] = []  # in use by CUDA graphs
        self._latest: dict[str, tuple[Communicator, str]] = {}  # method -> its last call's communicator and operator

    @contextlib.contextmanager
    def informing(
        self, method: str, operator: str = "", max_tokens: Any = None, agrees: bool = False
    ) -> Iterator[None]:  # fmt: skip
        """Inform the other ranks if the block raises, which comes before the method's first operator. They run this
        ``operator`` on the communicator of the method's last call (before its first call: on that of another
        method), or create the first communicator.

        Args:
            operator: "": that of the method's last call.
            agrees: whether they call :meth:`agreed` first.
        """
        try:
            yield
        except Exception as error:
            comm, last = self._latest.get(method) or next(reversed(self._latest.values()), (None, ""))
            if agrees or not self._made:
                self.agreed(-1, torch.device("cpu") if comm is None else comm.device, error)
            if comm is None or comm.destroyed:
                raise
            reject(operator or last, comm, error, 0, max_tokens)

    def reject_experts(self, method: str, num_experts: int) -> None:
        """Raise ValueError unless all ranks have the same number of experts. Before the first call of the method, the
        creation of the communicator raises it, on all ranks."""
        if method in self._latest:
            reject_experts(num_experts, self._group.size())

    def of(
        self, x: Tensor, num_experts: int, top_k: int, max_tokens: int, method: str = "", operator: str = "dispatch"
    ) -> Communicator:
        """Return the communicator for rows like ``x`` [., H] (bfloat16 if quantized) and at least ``max_tokens`` per
        rank.

        Args:
            method: the method that is called, if this is its first communicator.
            operator: operator that the caller runs next. Ranks whose ``max_tokens`` is not too large for the living
                communicator run it at once.

        Raises:
            ValueError: ranks pass different ``max_tokens``, of which some are too large for the living communicator.
        """
        dtype = torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype
        key = (x.shape[1], num_experts, top_k, dtype, x.device)
        found = self._made.get(key)
        if found is None or found.max_tokens_per_rank < max_tokens:
            if found is not None:
                _agree_on(found, operator, max_tokens)
            if found is not None and found not in self._captured:
                found.destroy()  # its routes remain valid with its successor
            ranks = self._group.size()
            found = self._made[key] = Communicator(
                self._group, num_experts=num_experts, hidden_size=x.shape[1], top_k=top_k, dtype=dtype,
                max_tokens_per_rank=1 << max(max_tokens - 1, 0).bit_length(), alignment=1, device=x.device,
                experts_per_rank=(num_experts // ranks,) * ranks, latency_max_tokens=self.latency_max_tokens,
            )  # fmt: skip
        if _capturing(x.device) and found not in self._captured:
            self._captured.append(found)
        if method:
            self._latest[method] = found, operator
        return found

    def along(self, x: Tensor, num_experts: int, route: Route, operator: str, method: str = "") -> Communicator:
        """Return the communicator for rows like ``x`` along a route. ``operator``, ``method``: as for :meth:`of`."""
        return self.of(x, num_experts, route.topk_idx.shape[1], route.max_tokens, method, operator)

    def agreed(self, tokens: int, device: torch.device, problem: Exception | None = None) -> int:
        """Return the largest number of tokens of any rank. Waits for all ranks, which raise if one has a problem."""
        exchange = Exchange(self._group, device)
        text = None if problem is None else str(problem)
        try:
            with exchange.turn:
                found = meeting.meet(exchange, "Buffer.dispatch", problem=text, values=(tokens,))
        except ValueError as error:
            raise (problem or error) from None
        return int(found[:, 0].max())

    def total(self, counts: Tensor) -> Tensor:
        """Return the sum over ranks. Waits for all ranks."""
        exchange = Exchange(self._group, counts.device)
        with exchange.turn:
            meeting.meet(exchange, "Buffer.dispatch: counts of experts")
            return exchange.all_gather(counts).sum(0)

    def combined(
        self, x: Tensor, route: Route, num_experts: int, bias: Bias = None, slots: Tensor | None = None,
        round_partial: bool = True, method: str = "",
    ) -> Tensor:  # fmt: skip
        """Return the sums of the rows ``x`` at their owners, [T, H].

        Rows of a token are summed in fp32 on their rank, rounded there if ``round_partial``, then summed in fp32 over
        ranks and ``bias`` and rounded. Without rounding in between and with two biases, sums are sent as float32, which
        takes a float32 copy of x and twice the bytes of bfloat16.

        Args:
            slots: rows of each (token, rank) pair, int32 [N, K], -1 for none; needed for two biases if a pair has
                several.
            method: as for :meth:`of`.
        """
        several = route.layout != TOKEN_MAJOR
        if not isinstance(bias, tuple) and (round_partial or not several):
            return self.along(x, num_experts, route, "combine", method).combine(x.contiguous(), route, residual=bias)
        if several and round_partial:
            assert slots is not None
            pairs = sum_rows(x.contiguous(), slots)  # rounded sums, in each pair's first row; other rows are zero
            first = torch.where(slots >= 0, slots, x.shape[0]).amin(1).long()
            wide = x.new_zeros(x.shape[0] + 1, x.shape[1], dtype=torch.float32)
            wide = wide.index_copy_(0, first, pairs.float())[:-1]
        else:
            wide = x.float()
        out = self.along(wide, num_experts, route, "combine", method).combine(wide, route)
        if bias is not None:
            out = out + (bias[0].float() + bias[1].float() if isinstance(bias, tuple) else bias.float())
        return out.to(x.dtype)

    def summed(self, weights: Tensor, route: Route, num_experts: int) -> Tensor:
        """Return the sums of the weights [N, K] of token-major rows, float32 [T, K]. They are sent as rows of 16 n
        bytes."""
        top_k = weights.shape[1]
        wide = torch.nn.functional.pad(weights.float(), (0, -top_k % 4))
        return self.combined(wide, route, num_experts)[:, :top_k].contiguous()

    def destroy(self) -> None:
        """Destroy all communicators. Collective."""
        for made in dict.fromkeys((*self._captured, *self._made.values())):
            made.destroy()
        self._captured.clear()
        self._made.clear()
        self._latest.clear()


def _agree_on(comm: Communicator, operator: str, max_tokens: int) -> None:
    """Raise ValueError on all ranks unless all call an operator with the same ``max_tokens``."""
    with together(comm, f"ep::{operator}", values=(max_tokens,)) as found:
        bounds = found[:, 0].tolist()
    if len(set(bounds)) > 1:
        raise ValueError(f"{operator}: ranks disagree on max_tokens: {bounds} by rank; all ranks must pass the same")


def latency_bound(comm: Communicator) -> float:
    """Return the largest ``max_tokens`` of calls on the latency kernels; infinity on the reference backend, which has
    one way for all sizes."""
    return backends.latency_tokens(comm.config) if comm.config.backend == "cute" else math.inf


def counts_of(sent: Dispatched, comm: Communicator, alignment: int) -> list[int]:
    """Return the counts of an exact dispatch, each rounded up to a multiple of ``alignment``.

    On the cute backend the host has waited for the kernel that counts, when the dispatch returns. The counts are then
    copied on another stream, so that the host does not wait for the rows.
    """
    counts = sent.route.counts
    aside = torch.cuda.stream(_stream(counts.device)) if comm.config.backend == "cute" else contextlib.nullcontext()
    with aside:
        return [round_up(count, alignment) for count in counts.tolist()]


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def format_of(x: Tensor, scales: Tensor | None, columns: bool = False) -> dict[str, Any]:
    """Return the arguments of a dispatch of rows with ``scales`` [T, G].

    Scales are sent unchanged as 4-byte words: float32, or int32 with four UE8M0 exponents in each, one for 128 numbers
    (G = ceil(H / 512)) or for 32 (G = H / 128).

    Args:
        columns: whether received scales are column-major.

    Raises:
        TypeError: ``scales`` are neither float32 nor int32.
        ValueError: ``scales`` have more than H / 128 columns.
    """
    if scales is None:
        return {}
    if scales.dtype not in (torch.float32, torch.int32):
        raise TypeError(f"scales of x have dtype {scales.dtype}; allowed: float32, or int32 of four UE8M0 exponents")
    groups = x.shape[1] // 128
    if scales.shape[1] > groups:
        raise ValueError(
            f"scales of x have shape {tuple(scales.shape)}; at most {groups} columns for x {tuple(x.shape)}"
        )
    words = torch.nn.functional.pad(scales, (0, groups - scales.shape[1])) if scales.shape[1] < groups else scales
    return {
        "scales": words.contiguous().view(torch.float32), "format": "e4m3/128/fp32",
        "scales_as": "columns" if columns else "rows",
    }  # fmt: skip


def with_scales(rows: Tensor, received: Tensor | None, sent: Tensor | None) -> Rows:
    """Return received rows, with scales in the dtype and number of columns of the ``sent`` ones if there are any."""
    if received is None or sent is None:
        return rows
    scales = received[:, : sent.shape[1]]
    if received.stride(1) == 1:
        scales = scales.contiguous()
    return rows, scales.view(sent.dtype)


def bound_of(handle: Any) -> Any:
    """Return the bound on tokens of a handle's route; None for what is no handle."""
    return getattr(getattr(handle, "route", None), "max_tokens", None)


def check_tokens(x: Any, topk_idx: Any) -> None:
    """Raise TypeError or ValueError unless x and ids are tensors of two dimensions."""
    check_types(Tensor, x=x, topk_idx=topk_idx)
    for name, given in (("x", x), ("topk_idx", topk_idx)):
        if given.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(given.shape)}; allowed: [T, {'H' if name == 'x' else 'K'}]")


def alignment_of(expert_alignment: Any) -> int:
    """Return the multiple that counts are rounded up to. Raise ValueError unless it is an int of at least 1."""
    number = whole("expert_alignment", expert_alignment)
    if number < 1:
        raise ValueError(f"expert_alignment is {number}; allowed: an int of at least 1")
    return number


def check_rows(x: Any, topk_weights: Any, bias: Any, *weights_of_row: int) -> None:
    """Raise TypeError or ValueError unless these are rows [N, H] of a combine, their weights [N, *weights_of_row] or
    None, and biases."""
    check_types(Tensor, x=x)
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; allowed: [N, H]")
    if topk_weights is not None:
        check_types(Tensor, topk_weights=topk_weights)
        allowed = (x.shape[0], *weights_of_row)
        if topk_weights.shape != allowed:
            raise ValueError(f"topk_weights has shape {tuple(topk_weights.shape)}; allowed: {allowed}")
    several = isinstance(bias, tuple)
    if several and len(bias) != 2:
        raise ValueError(f"bias has {len(bias)} tensors; allowed: a tensor, two of them, or None")
    for one in bias if several else () if bias is None else (bias,):
        check_types(Tensor, bias=one)


def check_ids(route: Route, **given: Tensor) -> None:
    """Raise ValueError unless tensors have the shape of the ids of a route."""
    for name, one in given.items():
        if one.shape != route.topk_idx.shape:
            raise ValueError(f"{name} has shape {tuple(one.shape)}; allowed: {tuple(route.topk_idx.shape)}")


def reject_experts(num_experts: int, ranks: int) -> None:
    """Raise ValueError unless all ranks have the same number of experts."""
    if num_experts % ranks:
        raise ValueError(f"num_experts is {num_experts}; allowed: a multiple of the {ranks} ranks")
