"""Pages whose blocks form one program, as a reader pastes it into a file, on two ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ep_ops
from ep_ops.nn import ExpertModule, MoELayer, clip_grad_norm_, expert_parameters, keep_experts_apart

DOCS = Path(ep_ops.__file__).parent.parent / "docs"


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)


def run_program(page: str) -> dict[str, Any]:
    """Run the program of a page on a rank that has its process group already, and return its names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with (
        mock.patch.object(dist, "init_process_group") as entered,
        mock.patch.object(dist, "destroy_process_group") as left,
    ):
        exec(compile("\n".join(blocks_of(page)), str(DOCS / page), "exec"), names)
    entered.assert_called_once()
    left.assert_called_once()
    assert names["comm"].destroyed
    return names


def run_training() -> float:
    names = run_program("training.md")
    learned = {name for name, p in names["tuned"].named_parameters() if p.grad is not None}
    assert learned == {"parametrizations.w_in.0.a", "parametrizations.w_in.0.b"}
    assert not names["model"].moe.experts.w_in.to_local().any()
    return float(names["norm"])


def test_training_runs_on_two_ranks() -> None:
    norm, other = run_ranks(2, run_training)
    assert norm == other > 0


def of_all_ranks(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def run_convert(folder: str) -> None:
    """The converted model returns what the dense one does, and is trained as the dense one is in one process."""
    os.chdir(folder)
    names = run_program("convert.md")
    model, dense = names["model"], names["dense"]
    assert isinstance(model[1], MoELayer) and isinstance(model[1].experts.w_in, DTensor)
    assert names["error"] < 1e-5 and Path("checkpoint/.metadata").is_file()

    optimizer = torch.optim.AdamW(dense.parameters(), lr=1e-3)
    x = of_all_ranks(names["x"])
    for _ in range(10):
        optimizer.zero_grad()
        (dense(x) - x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(dense.parameters(), 1.0)
        optimizer.step()
    torch.testing.assert_close(names["norm"], norm, rtol=1e-3, atol=0)
    torch.testing.assert_close(model[1].router.weight, dense[1].gate.weight, rtol=0, atol=1e-4)
    w_out: Any = model[1].experts.w_out
    for local, expert in zip(w_out.to_local(), dense[1].experts[4 * dist.get_rank() :], strict=False):
        torch.testing.assert_close(local, expert.down_proj.weight.t(), rtol=0, atol=1e-4)


def test_a_converted_model_trains_like_the_dense_one(tmp_path: Path) -> None:
    run_ranks(2, run_convert, str(tmp_path))


SIZES: dict[str, Any] = dict(hidden_size=16, top_k=2, max_tokens_per_rank=32, dtype=torch.float32, device="cpu")


def run_own() -> tuple[float, float, float]:
    """Return the norms of a page's program, and that of the model with all experts and all tokens."""
    names = run_program("own-experts.md")
    with ep_ops.Communicator(num_experts=5, **SIZES) as comm:
        names["comm"] = comm
        model = names["create"]()
        first, own = model
        x = of_all_ranks(torch.randn(7, 16))
        w, bias = (getattr(own, name).full_tensor().detach().requires_grad_() for name in ("w", "bias"))
        h = first(x)
        weights, ids = own.router(h).softmax(-1).topk(2)
        y = torch.relu(torch.einsum("th,tkhf->tkf", h, w[ids]) + bias[ids])
        (y * weights[..., None]).sum(1).square().mean().backward()
        norm = nn.utils.get_total_norm([p.grad for p in (*first.parameters(), own.router.weight, w, bias)])
    return float(names["norm"]), float(names["sharded_norm"]), float(norm)


def test_own_experts_have_the_gradients_of_one_process() -> None:
    for norms in run_ranks(2, run_own):
        assert norms == pytest.approx([norms[2]] * 3, rel=1e-5) and norms[2] > 0


def backward(model: nn.Module) -> None:
    model(torch.randn(7, 16)).square().mean().backward()


def make_mistakes() -> None:
    names: dict[str, Any] = {}
    with mock.patch.object(dist, "init_process_group"):
        block = blocks_of("own-experts.md")[0]
        assert "num_experts=5" in block
        exec(block.replace("num_experts=5", "num_experts=4"), names)
    own, create, ranks = names["MyExperts"], names["create"], dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))

    def of(**changes: Any) -> nn.Sequential:
        names["MyExperts"] = type("Changed", (own,), changes)
        return create()

    def sharded(model: nn.Module, ignore: bool = True) -> nn.Module:
        return fully_shard(model, mesh=mesh, ignored_params=set(expert_parameters(model)) if ignore else None)

    plain, raw = {"from_local": lambda self, local: local}, {"local_weight": lambda self, name: getattr(self, name)}
    tensors = {name: torch.zeros(p.shape) for name, p in create().state_dict().items()}
    mistakes: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "DistributedDataParallel would replace the experts", lambda: DistributedDataParallel(create())),
        (ValueError, "FSDP2 averages the gradients", lambda: backward(sharded(create()))),
        (TypeError, "", lambda: backward(sharded(keep_experts_apart(create(), ranks), ignore=False))),
        (ValueError, "an ordinary tensor of which", lambda: backward(
            sharded(keep_experts_apart(of(**plain), ranks), ignore=False))),
        (ValueError, "model has ordinary tensors .* experts, 1.w, 1.bias, so", lambda: clip_grad_norm_(
            DistributedDataParallel(keep_experts_apart(of(**plain), ranks)).module, 1.0)),
        (ValueError, "expert_names of Changed contains 'v'", lambda: keep_experts_apart(
            of(expert_names=("w", "v")), ranks)),
        (TypeError, "the parameter is a DTensor", lambda: create().load_state_dict(tensors)),
        (ValueError, "w has shape", lambda: backward(keep_experts_apart(of(**raw), ranks))),
        (ValueError, "contains no experts", lambda: keep_experts_apart(nn.Linear(16, 16), ranks)),
    ]  # fmt: skip
    for error, text, mistake in mistakes:
        with pytest.raises(error, match=text):
            mistake()

    frozen = keep_experts_apart(of(**plain), ranks)
    for p in expert_parameters(frozen):
        p.requires_grad_(False)
    backward(frozen)
    assert clip_grad_norm_(frozen, 1.0) > 0

    whole = of(local_weight=lambda self, name: getattr(self, name).to_local())
    names["MyExperts"] = own
    twin = create()
    for model in (whole, twin):
        keep_experts_apart(model, ranks)
        torch.manual_seed(dist.get_rank())
        backward(model)
    torch.testing.assert_close(whole[1].w.grad.to_local(), twin[1].w.grad.to_local() * ranks)

    unknown = nn.Module()
    unknown.w = nn.Parameter(torch.full((2,), float(dist.get_rank())))
    DistributedDataParallel(unknown)
    assert not unknown.w.any() and not isinstance(unknown, ExpertModule)
    names["comm"].destroy()


def test_mistakes_with_own_experts_raise_as_the_page_says() -> None:
    run_ranks(2, make_mistakes)


def agree() -> list[int | None]:
    names: dict[str, Any] = {"ep_ops": ep_ops, "torch": torch, "step": lambda x: x}
    (block,) = (block for block in blocks_of("decode.md") if "def agreed(" in block)
    exec(block, names)
    rank = dist.get_rank()
    return [names["agreed"](tokens) for tokens in ([3, 13][rank], [8, 0][rank], 0, [64, 1][rank])]


def test_ranks_agree_on_max_tokens() -> None:
    assert run_ranks(2, agree) == [[16, 8, 0, 64]] * 2
