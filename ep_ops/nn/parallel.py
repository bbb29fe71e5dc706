"""Experts under data parallelism: DistributedDataParallel, FSDP2, gradient clipping.

A model has two kinds of parameters: those that all ranks hold (router, attention), whose gradients data parallelism
averages, and experts, each held by one rank of the communicator, whose gradients include the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ep_ops.nn.apart import names_apart
from ep_ops.nn.experts import check_size


def expert_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of all experts in ``model``, each once.

    These are the parameters that the method ``expert_parameters`` of its modules returns, as
    :class:`ep_ops.nn.ExpertModule` and the modules of ``spread_experts`` have it.
    """
    return list({id(p): p for _, layer in expert_layers(model) for p in layer.expert_parameters()}.values())  # type: ignore[operator]


def keep_experts_apart(model: nn.Module, ranks: int) -> nn.Module:
    """Prepare ``model`` for DistributedDataParallel or FSDP2, and return it.

    The gradients of the experts are sums over ranks. This function sets ``gradient_divisor`` of all modules with
    experts to ``ranks``, because data parallelism averages the other gradients. The divisor stays when parameters are
    moved, converted or replaced, and when the model is copied or pickled; another call replaces it.

    Call it before DistributedDataParallel (DDP), and compile the module that DDP returns. DDP then does not broadcast
    or average what :class:`ep_ops.nn.ExpertModule` names in ``expert_names``. For FSDP2, call
    ``fully_shard(model, ignored_params=set(expert_parameters(model)))`` before or after this function. If several ranks
    hold the same experts (``ranks`` is a multiple of the communicator's), sum their gradients over these ranks after
    backward.

    Args:
        model: the model, changed in place.
        ranks: number of ranks of data parallelism, at least 1.

    Returns:
        ``model``.

    Raises:
        ValueError: ``ranks`` is less than 1; or ``model`` has no experts; or a module has the method
            ``expert_parameters`` but no ``gradient_divisor``.
    """
    check_size("ranks", ranks, 1)
    layers = list(expert_layers(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} contains no experts, which are modules that derive from ep_ops.nn.ExpertModule; a"
            " pipeline stage without them needs no call of keep_experts_apart, so make it conditional on"
            " expert_parameters(stage)"
        )
    dividing = [(prefix, layer) for prefix, layer in layers if hasattr(layer, "gradient_divisor")]
    divided = {id(p) for _, layer in dividing for p in layer.expert_parameters()}  # type: ignore[operator]
    for prefix, layer in layers:
        if any(id(p) not in divided for p in layer.expert_parameters()):  # type: ignore[operator]
            raise ValueError(
                f"{prefix.removesuffix('.') or 'model'} ({type(layer).__name__}) has expert_parameters, but nothing"
                " divides their gradients; derive it from ep_ops.nn.ExpertModule and read its weights with local_weight"
            )
    # DDP uses both kinds of names, which differ if the model itself is a wrapped layer.
    apart = [name for name, p in model.named_parameters() if id(p) in divided]
    for prefix, layer in dividing:
        names = names_apart(layer)
        apart += [f"{prefix}{name}" for name in names]
        apart += [f".{name}" for name in names if not prefix]  # so DDP names parameters of the model itself
        layer.gradient_divisor = ranks  # type: ignore[assignment]
    known = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(dict.fromkeys([*known, *apart])))
    return model


def _raise_for_ddp(wrapper: nn.Module, name: str, model: Any) -> None:
    """Raise ValueError if DistributedDataParallel is about to take over experts of a model that is not prepared for it.
    Called whenever a module is assigned to an attribute of another one, which DDP does before it sends anything."""
    if name != "module" or not isinstance(wrapper, DistributedDataParallel):
        return
    layers = [layer for _, layer in expert_layers(model)]
    spread = [layer for layer in layers if getattr(getattr(layer, "comm", None), "world_size", 2) > 1]
    experts = {id(p) for layer in spread for p in layer.expert_parameters()}  # type: ignore[operator]
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    if taken := [name for name, p in model.named_parameters() if id(p) in experts and name not in ignored]:
        raise ValueError(
            f"DistributedDataParallel would replace the experts of all ranks by those of rank 0: {', '.join(taken)};"
            " call ep_ops.nn.keep_experts_apart(model, ranks=...) first, on the module that DistributedDataParallel"
            " gets, and compile the module that it returns"
        )


register_module_module_registration_hook(_raise_for_ddp)


def clip_grad_norm_(model: nn.Module | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients of a model so that their 2-norm is at most ``max_norm``. Collective.

    Like ``torch.nn.utils.clip_grad_norm_``, but for parameters on different meshes: experts that are sharded over
    expert-parallel ranks, and other parameters that FSDP2 shards or that are ordinary tensors. Every parameter counts
    once, so the norm is that of the model with all experts, and equal on all ranks.

    Args:
        model: the model, or its parameters, whose gradients are changed in place.
        max_norm: the largest norm.

    Returns:
        The norm before scaling, [].

    Raises:
        ValueError: a module with experts, on several ranks, has parameters that differ between ranks and are no
            DTensors (``model`` is a module).
    """
    if isinstance(model, nn.Module) and (named := ordinary_experts(model)):
        raise ValueError(
            f"model has ordinary tensors of which each rank holds different experts, {', '.join(named)}, so that ranks"
            " would get different norms; allowed: DTensors, which ep_ops.nn.ExpertModule.from_local makes"
        )
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    kinds: dict[Any, list[Tensor]] = {}  # by mesh
    for p in parameters:
        if p.grad is not None:
            kinds.setdefault(p.grad.device_mesh if isinstance(p.grad, DTensor) else None, []).append(p)
    total = torch.zeros((), device=parameters[0].device if parameters else None)
    for held in kinds.values():
        norm = torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])
        total = total + (norm.full_tensor() if isinstance(norm, DTensor) else norm).float() ** 2
    total = total.sqrt()
    for held in kinds.values():
        torch.nn.utils.clip_grads_with_norm_(held, max_norm, total)
    return total


def ordinary_experts(model: nn.Module) -> list[str]:
    """Return the names of the experts' parameters that are trained, differ between ranks and are no DTensors."""
    spread = (layer for _, layer in expert_layers(model) if getattr(getattr(layer, "comm", None), "world_size", 1) > 1)
    experts = {id(p) for layer in spread for p in layer.expert_parameters()}  # type: ignore[operator]
    named = ((name, p) for name, p in model.named_parameters() if id(p) in experts)
    return [name for name, p in named if p.requires_grad and not isinstance(p, DTensor)]


def dropped_rows(model: nn.Module, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the number of rows that the experts of a model have dropped since it was created: the sum of the buffers
    ``dropped`` of its modules with experts, over the ranks of ``group``. Collective.

    Args:
        model: the model.
        group: ranks whose experts count; None: the default group, or this process if torch.distributed is not
            initialized.

    Returns:
        Tensor: int64 [], equal on all ranks.
    """
    named: list[Any] = [getattr(layer, "dropped", None) for _, layer in expert_layers(model)]
    counts = [dropped for dropped in named if isinstance(dropped, Tensor)]
    device = counts[0].device if counts else next(model.parameters()).device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for dropped in counts:
        total += dropped.sum()
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
    return total


def expert_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that have experts, with the prefix of their parameters' names.

    Modules that wrap such a layer and forward its attributes (``torch.compile``, ``checkpoint_wrapper``) are not
    included.
    """
    for name, layer in model.named_modules():
        if "expert_parameters" in vars(layer) or hasattr(type(layer), "expert_parameters"):
            yield f"{name}." if name else "", layer
