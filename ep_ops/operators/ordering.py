"""Keep the order in which compiled graphs run the ep operators."""

from __future__ import annotations


def install() -> None:
    """Teach Inductor the order (to come)."""
