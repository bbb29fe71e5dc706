"""The host launches the right kernels for SwiGLU experts with few rows each. Needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

from cute_kernels.gemm.few_rows import FewRows, rows_of, tile_of
from cute_kernels.gemm.few_rows_e4m3 import tile_of as tile_of_e4m3
from ep_ops.backends.cute import local_kernels
from ep_ops.formats import Segments

EXPERTS, HIDDEN, WIDTH = 16, 256, 128


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Kernel, blocks, device, tensors and numbers of each launch."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(local_kernels, "_run", lambda *given: found.append(given))
    return found


def weights(transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.zeros(EXPERTS, HIDDEN, 2 * WIDTH).bfloat16(), torch.zeros(EXPERTS, WIDTH, HIDDEN).bfloat16()
    return (made[0].mT.contiguous().mT, made[1].mT.contiguous().mT) if transposed else made


def run(rows: int, share: local_kernels.Share, given: tuple[torch.Tensor, ...], experts: int = EXPERTS) -> None:
    x, ints = torch.zeros(rows, HIDDEN).bfloat16(), torch.zeros(experts, dtype=torch.int32)
    local_kernels.few_rows(x, *(w[:experts] for w in given), torch.empty_like(x), Segments(ints, ints, 8), share)


@pytest.mark.parametrize("transposed", [False, True])
def test_two_launches(transposed: bool, launched: list[tuple[Any, ...]]) -> None:
    """Two kernels for the sizes are launched, on weights as they lie in memory, with blocks for the experts that can be
    named."""
    given = weights(transposed)
    run(64, local_kernels.Share(2, 3, 1), given)
    (first, *_), (second, *_) = launched
    rows = rows_of(2, 6 / EXPERTS)
    assert first == FewRows(EXPERTS, HIDDEN, WIDTH, "bf16", tile_of(WIDTH, True, transposed, rows, 6), True, transposed)
    assert second == FewRows(
        EXPERTS, WIDTH, HIDDEN, "bf16", tile_of(HIDDEN, False, transposed, rows, 6), False, transposed
    )
    assert [blocks for _, blocks, *_ in launched] == [6 * first.shares, 6 * second.shares]
    for (_, _, _, tensors, alignment), w in zip(launched, given, strict=True):
        assert tensors[1].data_ptr() == w.data_ptr() and tensors[1].is_contiguous() and alignment == 8
    assert launched[0][3][2].data_ptr() == launched[1][3][0].data_ptr()  # what is between the GEMMs


def test_tiles_follow_the_experts_that_can_have_rows() -> None:
    """With more rows than experts, tiles are those for all experts, and not for one expert a row."""
    share = local_kernels.Share(32, 4, 1)
    for experts, named in ((EXPERTS, EXPERTS), (256, 128)):
        rows = rows_of(32, 128 / experts)
        found = local_kernels.few_rows_kernels(experts, HIDDEN, WIDTH, "bf16", share, (False, False))
        tiles = [tile_of(WIDTH, True, False, rows, named), tile_of(HIDDEN, False, False, rows, named)]
        assert [kernel.tile for kernel in found] == tiles
    assert tile_of(HIDDEN, False, False, rows, EXPERTS) != tiles[1]


def test_blocks_are_bounded_by_experts_and_rows(launched: list[tuple[Any, ...]]) -> None:
    for rows, share, experts in ((64, (8, 3, 4), EXPERTS), (5, (8, 3, 4), 5), (64, (1, 3, 2), 6)):
        launched.clear()
        run(rows, local_kernels.Share(*share), weights(False))
        assert launched[0][1] == experts * launched[0][0].shares


def test_weights_in_another_order_are_copied(launched: list[tuple[Any, ...]]) -> None:
    w_in, w_out = weights(False)
    other = w_in.permute(1, 0, 2).contiguous().permute(1, 0, 2)
    run(8, local_kernels.Share(2, 2, 1), (other, w_out))
    kernel, _, _, tensors, _ = launched[0]
    assert not kernel.transposed and tensors[1].is_contiguous() and torch.equal(tensors[1], w_in)


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_at_odd_addresses_are_copied(transposed: bool, launched: list[tuple[Any, ...]]) -> None:
    """Weights that do not begin at a multiple of 16 bytes, such as views of a flat parameter, are copied."""
    odd = []
    for w in weights(False):
        stored = w.mT if transposed else w
        view = torch.zeros(w.numel() + 1, dtype=w.dtype)[1:].view(stored.shape)
        odd.append(view.mT if transposed else view)
    run(8, local_kernels.Share(2, 2, 1), tuple(odd))
    for kernel, _, _, tensors, _ in launched:
        assert kernel.transposed == transposed and tensors[1].data_ptr() % 16 == 0 and tensors[1].is_contiguous()


def test_nothing_to_compute(launched: list[tuple[Any, ...]]) -> None:
    run(0, local_kernels.Share(2, 2, 1), weights(False))
    run(8, local_kernels.Share(0, 2, 1), weights(False))
    run(8, local_kernels.Share(2, 2, 1), weights(False), experts=0)
    assert not launched


def test_e4m3(launched: list[tuple[Any, ...]]) -> None:
    """Two launches for the sizes. The codes and scales that the first one makes are what the second one takes."""
    codes = {"dtype": torch.float8_e4m3fn}
    w_in, w_out = torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN, **codes), torch.zeros(EXPERTS, HIDDEN, WIDTH, **codes)
    in_scales, out_scales = torch.zeros(EXPERTS, 2, 2), torch.zeros(EXPERTS, 2, 1)
    x, scales, ints = torch.zeros(64, HIDDEN, **codes), torch.zeros(64, 2), torch.zeros(EXPERTS, dtype=torch.int32)
    out, share = torch.empty(64, HIDDEN).bfloat16(), local_kernels.Share(2, 3, 1)
    weights = w_in, in_scales, w_out, out_scales
    local_kernels.few_rows_e4m3(x, scales, weights, out, Segments(ints, ints, 8), share)
    (first, *_, one, _), (second, *_, other, _) = launched
    assert (first, second) == local_kernels.few_rows_e4m3_kernels(EXPERTS, HIDDEN, WIDTH, share)
    assert (first.depth, first.width, second.depth, second.width) == (HIDDEN // 2, WIDTH, WIDTH // 2, HIDDEN)
    assert [blocks for _, blocks, *_ in launched] == [6 * first.shares, 6 * second.shares]
    assert all(given is wanted for given, wanted in zip(one[:4], (x, scales, w_in, in_scales), strict=True))
    assert other[0] is one[4] and other[1] is one[5] and one[4].shape == (64, WIDTH) and one[5].shape == (64, 1)
    assert other[2] is w_out and other[3] is out_scales and other[4] is out and other[5] is None


def test_tiles_of_e4m3() -> None:
    """A tile holds the rows that an expert is expected to have, and no more than all ranks have tokens."""
    for share, rows in (((8, 8, 16), 32), ((2, 8, 2), 8), ((64, 8, 1), 64)):
        found = local_kernels.few_rows_e4m3_kernels(4, HIDDEN, WIDTH, local_kernels.Share(*share))
        tokens, top_k, ranks = share
        assert rows_of(tokens * ranks, tokens * top_k / 4) == rows
        assert [kernel.tile for kernel in found] == [tile_of_e4m3(gated, rows) for gated in (True, False)], share


def test_blocks_of_lists(launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists have a block for 64 entries or places, whichever are more, at most as many as there are multiprocessors,
    and one without entries, which writes that the lists are empty."""
    monkeypatch.setattr(local_kernels, "_multiprocessors", lambda index: 8)
    for rows, places, blocks in ((0, 0, 1), (100, 64, 4), (10, 300, 5), (1000, 1, 8)):
        launched.clear()
        ids = torch.zeros(rows, 2, dtype=torch.int32)
        local_kernels.expert_lists(ids, 3, 4, (torch.zeros(places, dtype=torch.int32),) * 6)
        ((_, found, _, tensors, *numbers),) = launched
        assert found == blocks and tensors[0] is ids and numbers == [2 * rows, 2, places, 4]


def test_tensors_on_another_device_are_rejected() -> None:
    """A kernel gets addresses, so a tensor that its GPU cannot read raises an error before the launch."""
    kernel = local_kernels.few_rows_kernels(4, HIDDEN, WIDTH, "bf16", local_kernels.Share(2, 2, 1), (False, False))[0]
    for given in (torch.zeros(8), torch.zeros(8, device="meta")):
        with pytest.raises(ValueError, match=f"is on {given.device}; allowed: cuda:0, as the others"):
            local_kernels._run(kernel, 1, torch.device("cuda:0"), (None, given))
