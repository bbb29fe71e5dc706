"""Meetings of ranks at the beginning of a collective call, in which they compare which call each of them makes.

All calls that exchange data over a process group meet by a message of one length. Ranks that make different calls
therefore raise an error. Without the meeting, one call would receive the data of the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .exchange import Exchange


def gather(
    exchange: Exchange, call: str, of: str, number: int, problem: str | None, values: Sequence[int] = ()
) -> tuple[Tensor, list[str], str | None]:
    """Meet the other ranks. Collective.

    Hold ``exchange.turn`` from the meeting until the end of the call.

    Args:
        exchange: exchange over the ranks.
        call: name of the call.
        of: name of the communicator, for the error.
        number: number of the communicator (``leaving.agreed_number``); 0 if there is none.
        problem: why this rank rejects the call, or None.
        values: at most 7 + 2 W ints.

    Returns:
        ``values`` of all ranks, [W, at least as many]; the reasons of the ranks that reject the call; and how the calls
        of the ranks differ, or None. A rank that rejects a call of a communicator ends any other call of it.
    """
    message = [zlib.crc32(call.encode()), int(problem is not None), number, *values]
    message += [0] * (10 + 2 * exchange.world_size - len(message))  # one length for all calls
    mine = torch.tensor(message, device="cpu")
    gathered = exchange.all_gather(mine).cpu() if exchange.world_size > 1 else mine[None]
    rejecting = gathered[:, 1].nonzero().flatten().tolist()
    if len(gathered[:, 2].unique()) > 1 or (len(gathered[:, 0].unique()) > 1 and not rejecting):
        calls = exchange.all_gather_text(f"{call} of {of!r}" if of else call)
        made = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(calls))
        differ = (
            f"ranks make different calls at the same time ({made}); all ranks must make the calls of a process group in"
            " one order"
        )
        return gathered[:, 3:], [], differ
    if not rejecting:
        return gathered[:, 3:], [], None
    reasons = exchange.all_gather_text(problem or "")
    return gathered[:, 3:], [f"rejected by rank {rank}: {reasons[rank]}" for rank in rejecting], None


def meet(
    exchange: Exchange, call: str, of: str = "", number: int = 0, problem: str | None = None, values: Sequence[int] = ()
) -> Tensor:
    """Meet as in :func:`gather`, and return ``values`` of all ranks.

    Raises:
        ValueError: a rank rejects the call.
        RuntimeError: ranks make different calls, or calls of different communicators.
    """
    gathered, rejections, differ = gather(exchange, call, of, number, problem, values)
    if differ:
        raise RuntimeError(differ)
    if rejections:
        raise ValueError(problem or "; ".join(rejections))
    return gathered
