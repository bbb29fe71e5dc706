"""`ep-ops bench moe` on a CPU: it measures all it names, and notices results that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks

from ep_ops.bench import moe
from ep_ops.moe import MoECommunicator

SMALL = "--device cpu --backend reference --tokens 3 --hidden 64 --experts 4 --top-k 2 --iterations 1"


def measured() -> tuple[dict[str, Any], str]:
    """What is found, and what is said where a MoECommunicator combines wrongly."""
    args = moe.options().parse_args(SMALL.split())
    session = moe.Session(torch.device("cpu"), args)
    session.measure()
    session.close()
    combine = MoECommunicator.combine
    MoECommunicator.combine = lambda *given: 2 * combine(*given)  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError, match="results are wrong by") as said:
            moe.Session(torch.device("cpu"), args).measure()
    finally:
        MoECommunicator.combine = combine  # type: ignore[method-assign]
    return session.found, str(said.value)


def test_figures() -> None:
    found, said = run_ranks(1, measured)[0]
    assert [(one["tokens"], one["what"]) for one in found["results"]] == [(3, how) for how in moe.HOW]
    assert all(one["host_us"] > 0 and one["eager_us"] > 0 for one in found["results"])
    assert "'operators': 0.0" in said and "'MoECommunicator': 0.0" not in said
    assert len(moe.table(found["results"])) == 1 + len(found["results"])
