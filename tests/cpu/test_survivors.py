"""Communicators of the ranks that are left, and what becomes of rows that do not fit."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import fresh_seed
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import ep_ops
from ep_ops import inputs
from ep_ops.group.survivors import ExpertIds, id_of_model
from ep_ops.nn import DenseMoE, Experts, MoELayer

HELD = (2, 1, 3, 2)
SIZES: dict[str, Any] = {
    "num_experts": 8, "experts_per_rank": HELD, "hidden_size": 8, "top_k": 3, "max_tokens_per_rank": 16,
    "dtype": torch.float32, "alignment": 4, "device": "cpu",
}  # fmt: skip


def test_ids_are_converted_whatever_else_needs_no_conversion() -> None:
    """After experts were lost, int32 ids [T, K] with rows and weights of the communicator's dtypes, which need no other
    conversion, become its ids in every operator that takes ids."""
    wanted = SimpleNamespace(
        dtype=torch.float32, weights_dtype=torch.float32, expert_ids=ExpertIds((0, -1, 1), torch.device("cpu"))
    )
    x, weights = torch.zeros(2, 8), torch.ones(2, 2)
    for topk_idx in (torch.tensor([[2, 0], [1, -1]], dtype=torch.int32), torch.tensor([[2, 0], [1, -1]])):
        assert inputs.to_send(wanted, x, topk_idx, weights)[1].tolist() == [[1, 0], [-1, -1]]
        assert inputs.to_send(wanted, x, topk_idx, None)[1].dtype == torch.int32
        assert inputs.to_plan(wanted, topk_idx)[0].tolist() == [[1, 0], [-1, -1]]


def ids(seed: int, rank: int) -> torch.Tensor:
    """Draw the ids of a rank's tokens: three different experts each, some of them none."""
    gen = torch.Generator().manual_seed(seed * 100 + rank)
    idx = torch.rand(11, 8, generator=gen).topk(3).indices.int()
    return idx.masked_fill(torch.rand(11, 3, generator=gen) < 0.2, -1)


def tokens(rank: int) -> torch.Tensor:
    return (torch.arange(11.0)[:, None] + 100 * (rank + 1)).expand(11, 8).contiguous()


def check(comm: ep_ops.Communicator, ranks: list[int], seed: int, dispatch: Any = None) -> None:
    """`ranks` are those of the first communicator that are left: each finds the rows of its experts, and gets back as
    many as its tokens name experts that are there."""
    mine = ranks[comm.rank]
    there = [e for r in ranks for e in range(sum(HELD[:r]), sum(HELD[: r + 1]))]
    idx, x = ids(seed, mine), tokens(mine)
    sent = (dispatch or comm.dispatch)(x, idx)
    left = torch.isin(idx, torch.tensor(there)).sum(1)
    assert torch.equal(comm.combine(sent.x, sent.route), x * left[:, None])
    for given in (idx, idx.long()):
        assert int(comm.lost_rows(given)) == int((idx >= 0).sum() - left.sum())
    begin = 0
    for i in range(HELD[mine]):
        expert = sum(HELD[:mine]) + i
        wanted = [tokens(r)[(ids(seed, r) == expert).any(1)] for r in ranks]
        count = int(sent.route.counts[i])
        assert torch.equal(sent.x[begin : begin + count], torch.cat(wanted))
        begin = int(sent.route.offs[i])


def shrunk_twice(seed: int) -> None:
    comm = ep_ops.Communicator(**SIZES)
    check(comm, [0, 1, 2, 3], seed)
    for ranks in ([0, 2, 3], [2, 3]):
        if dist.get_rank() not in ranks:
            return
        group = dist.new_group(ranks, use_local_synchronization=True)
        old, comm = comm, comm.shrink(group)
        assert old.destroyed and comm.members == tuple(ranks)
        assert comm.experts_per_rank == tuple(HELD[r] for r in ranks)
        check(comm, ranks, seed + 1)
        compiled = torch.compile(lambda x, idx, comm=comm: comm.dispatch(x, idx), fullgraph=True, backend="aot_eager")
        check(comm, ranks, seed + 2, compiled)
    comm.destroy()


def test_shrunk_twice() -> None:
    run_ranks(4, shrunk_twice, fresh_seed())


def one_is_killed(folder: str, seed: int) -> None:
    # Whoever does not wait for the dead one itself waits for one that has given up, which tells it. Ranks have up to a
    # fiftieth of the timeout to write that they wait, too.
    comm = ep_ops.Communicator(dist.new_group(), **SIZES, name="experts", timeout=100.0)
    rank = dist.get_rank()
    check(comm, [0, 1, 2, 3], seed)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as told:
        for _ in range(100):
            comm.dispatch(tokens(rank), ids(seed, rank))
            time.sleep(0.01)
    assert "'experts' failed: rank " in str(told.value), told.value
    assert ", could not exchange data with rank 1: " in str(told.value), told.value
    group = dist.new_group([0, 2, 3], use_local_synchronization=True)
    with comm.shrink(group) as left:
        assert left.name == "experts of 3"
        check(left, [0, 2, 3], seed + 1)
    (Path(folder) / f"rank {rank} is done").touch()
    os._exit(0)  # the default group, which meets at the end, has lost a rank


def test_one_is_killed(tmp_path: Path) -> None:
    told = run_ranks(4, one_is_killed, str(tmp_path), fresh_seed(), return_exceptions=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank {r} is done" for r in (0, 2, 3)], told


def test_ids() -> None:
    device = torch.device("cpu")
    first = ExpertIds.kept((2, 1, 3), [0, 2], None, device)
    assert first.own == (0, 1, -1, 2, 3, 4)
    again = ExpertIds.kept((2, 3), [1], first, device)
    assert again.own == (-1, -1, -1, 0, 1, 2)
    given = torch.tensor([[-1, 0, 2, 5, 6, 99]], dtype=torch.int32)
    assert again.of(given).tolist() == [[-1, -1, -1, 2, 3, 96]]  # the last two are rejected as too large
    assert int(again.lost(given)) == 2
    wrong = torch.tensor([[-2, -7, -(2**31), 6, 7, 2**31 - 1]], dtype=torch.int32)
    got = again.of(wrong)
    assert ((got < -1) | (got >= 3)).all() and int(again.lost(wrong)) == 0
    said = [id_of_model(i, 3) for i in got[0].tolist()]
    assert said == [*map(str, wrong[0, :-1].tolist()), "2147483647 or more"]


def invalid_ids() -> None:
    """They are rejected as by any communicator, and the texts name the model's ids."""
    comm, group = ep_ops.Communicator(**SIZES), dist.new_group([0, 2, 3])
    if comm.rank == 1:
        return
    comm = comm.shrink(group)
    x = torch.ones(4, 8)
    for wrong in (-2, -7, 8, 99):
        for made in (torch.int32, torch.int64):
            idx = torch.tensor([[0, 2, wrong]] * 4, dtype=made)
            named = max(wrong, -2) if made is torch.int64 else wrong  # int64 ids are clamped to int32
            given = rf"topk_idx\[0, 2\] is {named} on rank \d; expert ids are 0..7, or -1 for none"
            for call in (lambda idx=idx: comm.dispatch(x, idx), lambda idx=idx: comm.plan(idx)):
                with pytest.raises(ValueError, match=given):
                    call()
            assert int(comm.lost_rows(idx)) == 4  # expert 2
    with pytest.raises(ValueError, match="topk_idx.0, 0. is -2 on rank"):
        comm.dispatch(x, torch.full((4, 3), -(2**40)))
    comm.destroy()


def test_invalid_ids() -> None:
    run_ranks(4, invalid_ids)


def layers() -> None:
    """Layers cannot be created on a communicator without some experts; existing ones go on."""
    sizes = SIZES | {"num_experts": 6, "experts_per_rank": None}
    comm, group = ep_ops.Communicator(**sizes, name="experts"), dist.new_group([0, 2])
    rank, layer, dense = comm.rank, MoELayer(comm, 8), DenseMoE(comm, 8)
    if rank == 1:
        return
    left = comm.shrink(group)
    lost = "communicator 'experts of 2' has lost 2 experts with their ranks, .* set their attribute comm to this"
    for kind in (MoELayer, Experts, DenseMoE):
        with pytest.raises(ValueError, match=f"{lost}") as raised:
            kind(left, 8)
        assert f"{kind.__name__} cannot be created on it" in str(raised.value)
    with pytest.raises(RuntimeError, match="'experts' was destroyed"):
        layer(torch.ones(3, 8))
    for module in layer.modules():
        if getattr(module, "comm", None) is comm:
            module.comm = left
    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(rank))
    out, routing = layer(x, return_routing=True)
    ids = routing.topk_idx
    there = torch.where((ids == 2) | (ids == 3), -1, ids)
    torch.testing.assert_close(out, dense.experts(x, there, routing.topk_weights))
    assert routing.counts.tolist() == torch.bincount(ids.flatten().long(), minlength=6).tolist()
    out.sum().backward()
    assert layer.experts.w_in.grad.to_local().isfinite().all()
    with pytest.raises(ValueError, match=lost):
        layer.experts.from_local(torch.zeros(2, 3))
    left.destroy()


def test_layers_after_shrink() -> None:
    run_ranks(3, layers)


def other_groups() -> None:
    with ep_ops.Communicator(**SIZES | {"num_experts": 3, "experts_per_rank": (3, 0)}) as comm:
        outside = dist.new_group([1])
        if comm.rank == 1:
            with pytest.raises(ValueError, match="group has global ranks \\[1\\], which hold no experts"):
                comm.shrink(outside)
            assert not comm.destroyed


def test_other_groups() -> None:
    run_ranks(2, other_groups)


def groups_of_other_kinds(seed: int) -> None:
    comm, rank = ep_ops.Communicator(**SIZES), dist.get_rank()
    group = dist.new_group([0, 2, 3])
    if rank == 1:  # torch gives a rank that the group leaves out no group
        with pytest.raises(TypeError, match="group does not contain this rank; allowed: "):
            comm.shrink(group)
        assert not comm.destroyed
    else:
        ranks = [0, 2, 3]
        check(comm.shrink(DeviceMesh.from_group(group, "cpu")), ranks, seed)
    dist.barrier()


def test_groups_of_other_kinds() -> None:
    run_ranks(4, groups_of_other_kinds, fresh_seed())


# ---------------------------------------------------------------------- overflow


def small(**more: Any) -> ep_ops.Communicator:
    return ep_ops.Communicator(
        num_experts=4, hidden_size=8, top_k=1, max_tokens_per_rank=16, dtype=torch.float32, alignment=1, device="cpu",
        **more,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["eager", "compiled", "split"])
def test_overflow_is_raised(how: str) -> None:
    with small(overflow="raise") as comm:
        x, idx = torch.ones(16, 8), torch.tensor([[0], [2]], dtype=torch.int32).repeat(8, 1)

        def step() -> Any:
            if how == "split":
                return comm.dispatch_wait(comm.dispatch_start(x, idx, layout="padded", slots=5))
            return comm.dispatch(x, idx, layout="padded", slots=5)

        if how == "compiled":
            step = torch.compile(step, fullgraph=True, backend="aot_eager")
        comm.check_errors()
        assert step().dropped.tolist() == [3, 0, 3, 0]
        step()
        with pytest.raises(ValueError, match=r"dropped 12 rows .* by expert: 0 \(6\), 2 \(6\)"):
            comm.check_errors()
        comm.check_errors()
        comm.plan(idx, layout="padded", slots=5)
        with pytest.raises(ValueError, match="dropped 6 rows"):
            comm.check_errors()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing_counts_a_row_that_did_not_fit_once(reentrant: bool, compiled: bool) -> None:
    with torch.inference_mode():  # what is made there is used behind it
        comm = small(overflow="raise")
    with comm:
        x, idx = torch.ones(16, 8, requires_grad=True), torch.zeros(16, 1, dtype=torch.int32)

        def layer(x: torch.Tensor) -> torch.Tensor:
            sent = comm.dispatch(x, idx, layout="padded", slots=5)
            return comm.combine(sent.x.sin(), sent.route)

        def step(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(layer, x, use_reentrant=reentrant)

        run = torch.compile(step, backend="aot_eager") if compiled else step
        run(x).sum().backward()
        with pytest.raises(ValueError, match="dropped 11 rows"):
            comm.check_errors()


def test_overflow_is_counted() -> None:
    with small() as comm:
        idx = torch.zeros(16, 1, dtype=torch.int32)
        assert comm.dispatch(torch.ones(16, 8), idx, layout="padded", slots=5).dropped.tolist() == [11, 0, 0, 0]
        comm.check_errors()
    with pytest.raises(ValueError, match="overflow is 'drop'; allowed: one of 'count', 'raise'"):
        small(overflow="drop")


def test_a_large_worst_case_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with small() as comm:
        x, idx = torch.ones(16, 8), torch.zeros(16, 1, dtype=torch.int32)
        monkeypatch.setattr(comm, "warned_rows", 15)
        with pytest.warns(RuntimeWarning, match="GiB in the worst case. Pass capacity .*exact=True.*max_tokens"):
            comm.dispatch(x, idx)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            comm.dispatch(x, idx, capacity=20)
            comm.dispatch(x, idx[:4].repeat(4, 1), layout="padded", slots=20)


def _shrunk_over_nvshmem() -> str:
    comm = small(domain_size=2)
    pair = dist.new_group([0, 2])
    comm.config = dataclasses.replace(comm.config, backend="cute", wire="nvshmem")
    text = ""
    if comm.rank in (0, 2):
        with pytest.raises(ValueError) as raised:
            comm.shrink(pair)
        text = str(raised.value)
    assert not comm.destroyed
    comm.destroy()
    return text


def test_nvshmem_cannot_go_on_with_fewer_ranks() -> None:
    """Shrinking over NVSHMEM is rejected before anything is given up."""
    first, second, third, last = run_ranks(4, _shrunk_over_nvshmem)
    assert first == third and second == last == ""
    assert (
        "NVSHMEM, which cannot continue with fewer than 4 ranks; allowed: a group of ranks of one NVLink domain"
        in first
    )
