"""What ``spread_experts`` checks of a model before it changes it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ep_ops.arguments import launched_ranks
from ep_ops.communicator import Communicator, reject_destroyed
from ep_ops.config import options
from ep_ops.group import leaving, meeting
from ep_ops.group.exchange import Exchange


def check_launch(group: Any) -> None:
    """Raise RuntimeError if a launcher has started several processes that do not know each other yet."""
    ranks = launched_ranks()
    if group is None and not dist.is_initialized() and ranks > 1:
        raise RuntimeError(
            f"WORLD_SIZE is {ranks} in the environment, but torch.distributed is not initialized, so every process"
            " would keep all experts; call torch.distributed.init_process_group() before spread_experts"
        )


@contextlib.contextmanager
def raising_together(exchange: Exchange) -> Iterator[None]:
    """Raise an error of the ``with`` block on all ranks, on the others as a ValueError. Collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    try:
        with exchange.turn:
            meeting.meet(exchange, "spread_experts", problem=None if error is None else str(error))
    except ValueError:
        if error is None:
            raise
    if error is not None:
        raise error


def check_unwrapped(name: str, experts: nn.Module) -> None:
    """Raise ValueError if weights of a module of experts are parametrized."""
    if is_parametrized(experts):
        raise ValueError(
            f"{name} is parametrized (torch.nn.utils.parametrize); call spread_experts before parametrizations are"
            " registered"
        )


def check_optimizers(parameters: dict[str, Tensor]) -> None:
    """Raise RuntimeError if an optimizer holds one of these parameters, which spread_experts replaces."""
    if not _held(parameters):
        return
    gc.collect()  # optimizers that nobody uses are not freed at once
    if held := _held(parameters):
        raise RuntimeError(
            f"an optimizer holds {held[0]}, which spread_experts replaces by this rank's experts, so that it would not"
            " update them; create optimizers after spread_experts"
        )


def _held(parameters: dict[str, Tensor]) -> list[str]:
    """Return the names of the parameters that optimizers hold."""
    optimizers: Iterable[Any] = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    held = {
        id(p) for one in optimizers for group in getattr(one, "param_groups", ()) for p in group.get("params", ())
    }  # fmt: skip
    return [name for name, p in parameters.items() if id(p) in held]


def no_experts(model: nn.Module) -> ValueError:
    """Return the error for a model without modules that have transformers' interface of experts."""
    others = [f"{name} ({type(m).__name__})" for name, m in model.named_modules() if hasattr(m, "down_proj")]
    others = [text for text in others if "experts" in text.lower()]
    without = f": {others[0]} does not have it; register() may support it" if others else ""
    return ValueError(f"{type(model).__name__} has no MoE layer with transformers' interface of experts{without}")


def check_options(who: str, given: dict[str, Any]) -> None:
    """Raise TypeError for options that a communicator does not have, or that follow from the model."""
    known = [name for name in options() if name not in ("num_experts", "hidden_size")]
    if unknown := [name for name in given if name not in known]:
        raise TypeError(f"{who} got unknown arguments {', '.join(unknown)}; allowed: {', '.join(known)}")


def check_all_save(comm: Communicator) -> None:
    """Raise RuntimeError unless all ranks call save_pretrained, which gathers their experts."""
    reject_destroyed(comm)
    seconds = comm.config.timeout
    if missing := leaving.missing_in("save_pretrained", comm.group, comm.number, seconds, comm.backend.has_failed):
        raise RuntimeError(
            f"save_pretrained waited {seconds:g} s for ranks {missing}, which did not call it; every rank must call it,"
            " because it gathers the experts of all ranks. transformers' Trainer saves on one rank: pass"
            " save_strategy='no' (docs/trainer.md)"
        )


def check_equal(exchange: Exchange, own: dict[str, int]) -> None:
    """Raise ValueError on all ranks if the checksums of parameters differ between ranks. Collective."""
    with exchange.turn:
        every: list[dict[str, int]] = exchange.all_gather_object(own)
    for name in dict.fromkeys(name for one in every for name in one):
        sums = [one.get(name) for one in every]
        if len(set(sums)) > 1:
            others = [rank for rank, one in enumerate(sums) if one != sums[0]]
            raise ValueError(
                f"{name} differs between rank 0 and ranks {others}; spread_experts needs the same weights on all ranks:"
                " load a checkpoint, or set the same seed before the model is created"
            )


def checksum(weight: Tensor) -> int:
    """Return a number that depends on the bits of a tensor and on their order."""
    if weight.is_meta or weight.numel() == 0:
        return 0
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = weight.detach().contiguous().view(-1, weight.shape[-1] if weight.dim() else 1)
    bits = bits.view(kinds[weight.element_size()])
    total = 0
    for dim in (0, 1):
        sums = bits.sum(dim, dtype=torch.int64)
        places = torch.arange(1, len(sums) + 1, device=sums.device)
        total += int((sums * places * (2 * dim + 1)).sum())
    return total
