"""Interleaving of micro-batches: one computes while the operations of the other run."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar

Result = TypeVar("Result")


def interleave(*batches: Iterator[Result | None]) -> list[Result]:
    """Run generators alternately and return the result of each.

    A generator computes one micro-batch. It yields None between a start and its wait, so that computation of the other
    generators overlaps with the operation, and finally yields its result. Each generator uses its own ``flight``, so at
    most two can share a communicator::

        def layer(x, flight):
            topk_idx, topk_weights, _ = router(x)
            started = comm.dispatch_start(x, topk_idx, topk_weights, flight=flight)
            yield None
            rows = comm.dispatch_wait(started)
            started = comm.combine_start(grouped_experts(rows), rows.route, rows.weights, flight=flight)
            yield None
            yield x + comm.combine_wait(started)

        first, second = interleave(layer(x[:half], 0), layer(x[half:], 1))

    :meth:`ep_ops.nn.MoELayer.steps` is such a generator. If a generator raises an exception, all generators are closed.
    A block of ``comm.flights()`` around the call finishes operations that generators leave in progress. Backward runs
    in the opposite order, in which the gradients of waits are starts, and overlaps as well. Works under
    ``torch.compile(fullgraph=True)`` if the generators are created in the compiled function.

    Args:
        batches: the generators.

    Returns:
        The result of each generator.

    Raises:
        RuntimeError: a generator ends without a result.
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
