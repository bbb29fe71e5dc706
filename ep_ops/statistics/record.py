"""The counts of one rank, and their text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

Sample = tuple[dict[str, int], int | float]
"""Labels besides those of the rank, and the value."""


class Statistics(NamedTuple):
    """Counts of one rank since the creation of its communicator, in host memory (:meth:`Communicator.statistics`).

    El experts of this rank, W ranks. Dispatches and combines are counted that methods of the communicator run; those of
    backward are operations only.
    """

    communicator: str  # its name
    rank: int  # the rank
    first_expert: int  # global id of this rank's first expert
    operations: int  # operations of all kinds; a call in rounds (``staging_bytes``) is one for the route and for each
    dispatches: int  # number of dispatches
    rows: Tensor  # int64 [El] rows received for each local expert; token-major: (row, k)
    dropped: Tensor  # int64 [El] rows that did not fit
    received: Tensor  # int64 [W] bytes of rows and scales received in dispatches, by source rank
    returned: Tensor  # int64 [W] bytes of rows returned in combines, by destination rank
    waited: Tensor  # float64 [W] seconds that this rank waited for each other rank, without the last operations

    def prometheus(self) -> str:
        """Return the counts in the text format of Prometheus, version 0.0.4: :func:`prometheus` of this record."""
        return prometheus(self)

    def _samples(self) -> Iterator[list[Sample]]:
        """Return the samples of each of `_METRICS`."""
        yield [({}, self.operations)]
        yield [({}, self.dispatches)]
        for counts, label, first in (
            (self.rows, "expert", self.first_expert), (self.dropped, "expert", self.first_expert),
            (self.received, "peer", 0), (self.returned, "peer", 0), (self.waited, "peer", 0),
        ):  # fmt: skip
            yield [({label: number}, value) for number, value in enumerate(counts.tolist(), first)]


_METRICS = (
    ("ep_ops_operations_total", "Operations of all kinds."),
    ("ep_ops_dispatches_total", "Dispatches."),
    ("ep_ops_rows_total", "Rows received for an expert."),
    ("ep_ops_dropped_rows_total", "Rows for an expert that did not fit."),
    ("ep_ops_received_bytes_total", "Bytes of rows received from a peer in dispatches."),
    ("ep_ops_returned_bytes_total", "Bytes of rows returned to a peer in combines."),
    ("ep_ops_waited_seconds_total", "Time that this rank waited for a peer."),
)


def prometheus(*statistics: Statistics) -> str:
    """Return the counts of communicators in the text format of Prometheus, version 0.0.4.

    Serve it with the content type ``text/plain; version=0.0.4; charset=utf-8``, or write it to a file for the textfile
    collector. All metrics are counters. Their labels are ``communicator``, ``rank``, and ``expert`` or ``peer``.

    Args:
        statistics: results of :meth:`Communicator.statistics`. The names of the communicators differ.

    Returns:
        The text; it ends with a newline.

    Raises:
        ValueError: two of them are of one rank of one communicator.
    """
    ranks = [(one.communicator, one.rank) for one in statistics]
    for number, (name, rank) in enumerate(ranks):
        if (name, rank) in ranks[:number]:
            raise ValueError(f"statistics has rank {rank} of communicator {name!r} twice; allowed: once")
    lines = []
    samples = [list(one._samples()) for one in statistics]
    for number, (metric, about) in enumerate(_METRICS):
        lines += [f"# HELP {metric} {about}", f"# TYPE {metric} counter"]
        for one, found in zip(statistics, samples, strict=True):
            for more, value in found[number]:
                labels = {"communicator": one.communicator, "rank": one.rank, **more}
                text = ",".join(f'{label}="{_escaped(str(of))}"' for label, of in labels.items())
                lines.append(f"{metric}{{{text}}} {value}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    """Return the value of a label as it stands between quotes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
