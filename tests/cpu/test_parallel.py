"""Models with experts of their own on every rank under DDP and FSDP2: gradients of the mean loss over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ep_ops
from ep_ops.nn import TORCH, DenseMoE, MoELayer, clip_grad_norm_, expert_parameters, keep_experts_apart

H, E = 16, 5  # five experts: ranks hold different numbers of them


class Model(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.moe, self.last = nn.Linear(H, H), moe, nn.Linear(H, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.moe(self.first(x))).square().mean()


def trained(how: str, compiled: bool, options: dict[str, Any]) -> float:
    """The largest difference of a gradient, or of the clipped ones, from the dense model's on all ranks' tokens."""
    sizes: dict[str, Any] = dict(num_experts=E, hidden_size=H, top_k=2, max_tokens_per_rank=12, dtype=torch.float32)
    with ep_ops.Communicator(**sizes, device="cpu") as comm:
        model, dense = Model(MoELayer(comm, 8, capacity=64, **options)), Model(DenseMoE(comm, 8))
        names = [name for name, _ in model.named_parameters()]
        if how == "checkpointed":
            model.moe = checkpoint_wrapper(model.moe)
            model = checkpoint_wrapper(model)
        if how == "compiled":
            model.moe = torch.compile(model.moe, backend="aot_eager")
        if how == "fsdp" and compiled:
            model.moe.compile(backend="aot_eager", fullgraph=True)
        if how == "meta":
            model = model.to("meta")
        keep_experts_apart(model, comm.world_size)
        run: Any = model
        if how in ("ddp", "checkpointed", "compiled"):
            run = DistributedDataParallel(model)
            run = torch.compile(run, backend="aot_eager") if compiled else run
        else:
            from torch.distributed.fsdp import fully_shard

            mesh = torch.distributed.init_device_mesh("cpu", (comm.world_size,))
            run = fully_shard(model, mesh=mesh, ignored_params=set(expert_parameters(model)))
        if how == "meta":
            model.to_empty(device="cpu")
            set_model_state_dict(model, dense.state_dict(), options=StateDictOptions(full_state_dict=True))
        xs = [torch.randn(4 + 3 * r, H, generator=torch.Generator().manual_seed(r)) for r in range(comm.world_size)]
        run(xs[comm.rank]).backward()
        torch.stack([dense(x) for x in xs]).mean().backward()
        worst = 0.0
        for again in range(2):
            for name, p, q in zip(names, model.parameters(), dense.parameters(), strict=True):
                assert p.grad is not None and q.grad is not None
                got = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                expected = q.grad
                assert got.shape == expected.shape and got.isfinite().all(), name
                worst = max(worst, float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-9)))
            if not again:
                norm = clip_grad_norm_(model, 1e-3)
                torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(dense.parameters(), 1e-3))
        experts = expert_parameters(model)
        others = [p for p in model.parameters() if all(p is not own for own in experts)]
        torch.optim.SGD([{"params": others}, {"params": experts}], lr=1e3, foreach=True).step()
        torch.optim.SGD(dense.parameters(), lr=1e3).step()
        for p, q in zip(experts, dense.moe.experts.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q)
    return worst


@pytest.mark.parametrize(
    ("how", "compiled"),
    [("ddp", False), ("ddp", True), ("checkpointed", False), ("compiled", False), ("fsdp", False), ("meta", False)],
)
def test_trained(how: str, compiled: bool) -> None:
    assert max(run_ranks(2, trained, how, compiled, {})) < 1e-4


def on_token_major_rows(how: str, compiled: bool) -> list[float]:
    late = TORCH._replace(late=True)
    plain: dict[str, Any] = {"rows": "token_major"}
    again = {**plain, "redispatch": True}
    ways = [plain, again, {**again, "gemms": late}]
    return [trained(how, compiled, options) for options in (ways[-1:] if compiled else ways)]


@pytest.mark.parametrize(("how", "compiled"), [("ddp", True), ("checkpointed", False), ("fsdp", False), ("fsdp", True)])
def test_trained_on_token_major_rows(how: str, compiled: bool) -> None:
    """Kept, dispatched again, and with gradients of the matrices that are computed while those of rows are sent."""
    assert max(sum(run_ranks(2, on_token_major_rows, how, compiled), [])) < 1e-4


def test_experts_that_are_trained_later() -> None:
    sizes: dict[str, Any] = dict(num_experts=4, hidden_size=H, top_k=2, max_tokens_per_rank=32, dtype=torch.float32)
    with ep_ops.Communicator(**sizes, device="cpu") as comm:
        apart, plain = (MoELayer(comm, 8) for _ in range(2))
        apart.experts.w_in.requires_grad_(False)
        keep_experts_apart(apart, 4)
        assert [p.requires_grad for p in expert_parameters(apart)] == [False, True]
        apart.experts.w_in.requires_grad_()
        x = torch.randn(5, H)
        apart(x).sum().backward(), plain(x).sum().backward()
        for own, whole in zip(expert_parameters(apart), expert_parameters(plain), strict=True):
            assert own.grad is not None and whole.grad is not None
            torch.testing.assert_close(own.grad * 4, whole.grad)


def test_dropped_rows_are_counted_once_under_checkpointing() -> None:
    sizes: dict[str, Any] = dict(num_experts=4, hidden_size=H, top_k=2, max_tokens_per_rank=32, dtype=torch.float32)
    with ep_ops.Communicator(**sizes, alignment=1, device="cpu") as comm:
        layer = MoELayer(comm, 8, capacity=30)
        x = torch.randn(32, H, requires_grad=True)
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        assert int(layer.experts.dropped.sum()) == 64 - 30


def _ddp_without_preparation():
    """Return what DDP raises for a model as it is, and whether the experts are the rank's own afterwards."""
    rank = torch.distributed.get_rank()
    sizes: dict[str, Any] = dict(num_experts=4, hidden_size=H, top_k=2, max_tokens_per_rank=12, dtype=torch.float32)
    with ep_ops.Communicator(**sizes, device="cpu") as comm:
        model = Model(MoELayer(comm, 8))
        with torch.no_grad():
            model.moe.experts.w_in.fill_(rank)
        with pytest.raises(ValueError) as raised:
            DistributedDataParallel(model)
        kept = bool((model.moe.experts.w_in.to_local() == rank).all())
        DistributedDataParallel(keep_experts_apart(model, comm.world_size))
    return str(raised.value), kept and bool((model.moe.experts.w_in.to_local() == rank).all())


def test_ddp_of_a_model_that_is_not_prepared():
    """DistributedDataParallel of a model that is not prepared raises, because it would copy the experts of rank 0 to
    all ranks."""
    for text, kept in run_ranks(2, _ddp_without_preparation):
        assert kept
        assert (
            "those of rank 0: moe.experts.w_in, moe.experts.w_out;" in text
            and "keep_experts_apart(model, ranks=...)" in text
        )


def _ddp_of_whole_experts():
    """Experts that every rank holds all of are parameters like others."""
    sizes: dict[str, Any] = dict(num_experts=4, hidden_size=H, top_k=2, max_tokens_per_rank=12, dtype=torch.float32)
    alone = [torch.distributed.new_group([rank]) for rank in range(torch.distributed.get_world_size())]
    with ep_ops.Communicator(alone[torch.distributed.get_rank()], **sizes, device="cpu") as comm:
        DistributedDataParallel(Model(MoELayer(comm, 8)))


def test_ddp_of_experts_that_each_rank_holds():
    run_ranks(2, _ddp_of_whole_experts)


def _clipped_alone():
    """The norm of a model all of whose experts this rank holds, clipped and torch's."""
    sizes: dict[str, Any] = dict(num_experts=4, hidden_size=H, top_k=2, max_tokens_per_rank=12, dtype=torch.float32)
    rank = torch.distributed.get_rank()
    alone = [torch.distributed.new_group([one]) for one in range(torch.distributed.get_world_size())]
    with ep_ops.Communicator(alone[rank], **sizes, device="cpu") as comm:
        model = Model(MoELayer(comm, 8))
        for p in model.parameters():
            p.grad = torch.full_like(p, rank + 1.0)
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        return clip_grad_norm_(model, 1e9), expected


def test_norms_count_the_ranks_of_the_communicator():
    norms = run_ranks(2, _clipped_alone)
    for norm, expected in norms:
        torch.testing.assert_close(norm, expected)
    assert norms[0][0] != norms[1][0]
