"""A wrong argument on one rank raises on all ranks, names the argument, and leaves a communicator that can be used."""

from __future__ import annotations

import pytest
from cases import fresh_seed
from ranks import run_ranks
from wrong_calls import MODES, run_calls

OFTEN = "no gradients"


@pytest.mark.parametrize(
    "mode", [OFTEN, *(pytest.param(mode, marks=pytest.mark.drawn) for mode in MODES if mode != OFTEN)]
)
def test_some_wrong_arguments(mode: str) -> None:
    check(200, mode)


@pytest.mark.drawn
def test_2000_wrong_arguments() -> None:
    check(2000, OFTEN)


def check(count: int, mode: str) -> None:
    found = run_ranks(2, run_calls, fresh_seed(), count, mode, timeout=300)
    assert found == [[], []], "\n".join(sum(found, []))
