"""Marks say which operation they belong to, and reports say in words what differs."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from cute_kernels import marks, sync
from ep_ops.backends.cute.report import Report


def mark(epoch: int, *args, **kwargs) -> int:
    return epoch << marks.SHIFT | marks.pack(*args, **kwargs)


@pytest.mark.parametrize("kind", marks.KINDS[1:])
@pytest.mark.parametrize("flags", [(False, True, False), (True, False, True)])
@pytest.mark.parametrize("tokens", [0, 1, 4096, 2**20 - 1])
def test_round_trip(kind, flags, tokens):
    terms = marks.Terms(kind, *flags, tokens)
    packed = marks.pack(kind, tokens, *flags)
    assert marks.unpack(12345 << marks.SHIFT | packed) == (12345, terms)
    assert packed < 2**31 and packed >> marks.SHIFT == 0


def report(reason: int, own: int, seen: int) -> str:
    made = object.__new__(Report)
    made._timeout, made._num_experts = 2.0, 8
    made._words = [1, reason, sync.FLAGS.index("route"), 0, 1, 0, own, seen] + [0] * 24
    text = made.failed()
    assert text is not None
    return text


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (mark(7, "plan", 64), "met rank 1 in ep::plan: the ranks call operators in different orders"),
        (mark(7, "dispatch", 32), "met rank 1, which passed max_tokens 32, not 64"),
        (mark(7, "dispatch", 64, True), "disagree on whether weights (or their gradients) are given"),
        (mark(7, "dispatch", 64, few=True), "disagree on whether a residual is given"),
    ],
)
def test_mismatch(other, said):
    text = report(sync.MISMATCH, mark(7, "dispatch", 64), other)
    assert said in text
    assert "rank 0, in ep::dispatch (operation 7" in text


def test_timeout():
    text = report(sync.TIMEOUT, mark(7, "dispatch", 64), mark(6, "combine", 64))
    assert "waited 2 s for rank 1 (route flag" in text and "that is ep::combine, operation 6" in text
    assert "that is nothing" in report(sync.TIMEOUT, mark(7, "dispatch", 64), 0)


def test_refusal():
    """Whoever sees it first or last in an operation, the host is told once, and of the next one again."""
    made = object.__new__(Report)
    made._told = 0
    for epoch in (7, 8):
        own, refusal = mark(epoch, "dispatch", 64), epoch << marks.SHIFT | marks.pack("refused", 3)
        record = [1, sync.REFUSAL, 0, 0, 1, 5, own, refusal]
        made._words = [0] * 32 + record + [0] * 8
        assert made.pending()
        assert made.refusal() == (3, epoch, f"ep::dispatch (operation {epoch})")
        assert made.refusal() is None and not made.pending()
        made._words[32:40] = record
        assert made.refusal() is None and not made.pending()
