"""Micro-batches that take turns: while one computes, what the other has sent is under way."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar

Result = TypeVar("Result")


def interleave(*batches: Iterator[Result | None]) -> list[Result]:
    """Runs generators by turns and returns the result of each.

    A generator computes one micro-batch. It yields None between a start and its wait, where the others take their
    turns: what they do then overlaps with the operation. In the end it yields its result. Each takes a ``flight`` of
    its own, so there are two at most on one communicator::

        def layer(x, flight):
            topk_idx, topk_weights, _ = router(x)
            started = comm.dispatch_start(x, topk_idx, topk_weights, flight=flight)
            yield None
            rows = comm.dispatch_wait(started)
            started = comm.combine_start(grouped_experts(rows), rows.route, rows.weights, flight=flight)
            yield None
            yield x + comm.combine_wait(started)

        first, second = interleave(layer(x[:half], 0), layer(x[half:], 1))

    :meth:`ep_ops.nn.MoELayer.steps` is such a generator. If one of them raises, all are closed; a block of
    ``comm.flights()`` around the call ends the operations of generators that do not do so themselves. Backward runs in
    the opposite order, the gradients of waits as starts, and overlaps as well. Works under
    ``torch.compile(fullgraph=True)`` where the generators are made in the function that is compiled. RuntimeError for a
    generator that ends without a result.
    """
    results: list[Result | None] = [None] * len(batches)
    try:
        while any(result is None for result in results):
            for turn, batch in enumerate(batches):
                if results[turn] is None:
                    try:
                        results[turn] = next(batch)
                    except StopIteration:
                        raise RuntimeError(f"generator {turn} ended without yielding a result") from None
    except BaseException:
        for batch in batches:
            if isinstance(batch, Generator):
                batch.close()  # now, not when the traceback that holds it is freed
        raise
    return [result for result in results if result is not None]
