"""What data parallelism must not average or replace: the names of a module's experts, and a check of FSDP2.

Modules of experts are :class:`ExpertModule`, or modules with its attributes ``comm``, ``gradient_divisor`` and
``expert_names``.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

try:  # FSDP2 has no public way from a module to the modules around it
    from torch.distributed._composable_state import _module_state_mapping as _states
except ImportError:  # then FSDP2 is not checked
    _states = weakref.WeakKeyDictionary()

_checked: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any]] = weakref.WeakKeyDictionary()
"""Modules of experts that were checked: FSDP2's groups of parameters around each one, and the `_state_of` it then."""
_warned: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules of experts whose users were warned of casts."""


def names_apart(module: Any) -> list[str]:
    """Return the names of the parameters and buffers of ``module`` of which each rank holds different values, including
    second names of tied parameters.

    Raises:
        ValueError: ``expert_names`` contains a name that the module does not have.
    """
    named = itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )
    every = [name for name, _ in named]
    if module.expert_names is None:
        return every
    found: list[str] = []
    for wanted in module.expert_names:
        path, _, last = wanted.rpartition(".")
        inside = f"{wanted}.", f"{path}.parametrizations.{last}.".removeprefix(".")
        matching = [name for name in every if name == wanted or name.startswith(inside)]
        if not matching:
            raise ValueError(
                f"expert_names of {type(module).__name__} contains {wanted!r}; allowed: names of its parameters,"
                " buffers and submodules"
            )
        found += matching
    return found


def parameters_apart(module: Any) -> list[nn.Parameter]:
    """Return the parameters of ``module`` of which each rank holds a different part, each once."""
    apart = set(names_apart(module))
    return list({id(p): p for name, p in module.named_parameters(remove_duplicate=False) if name in apart}.values())


def check_shards(module: Any) -> None:
    """Check that the DTensors of a module of experts are shards of this rank.

    They are not in a module that another rank has pickled.

    Raises:
        ValueError: a parameter is the shard of another rank.
    """
    if not dist.is_initialized():
        return
    for name, parameter in _own_parameters(module).values():
        if not isinstance(parameter, DTensor):
            continue
        mesh = parameter.device_mesh
        with _disable_current_modes():  # torch.export may be tracing
            here = (mesh.mesh == dist.get_rank()).nonzero().tolist()
        created = list(mesh.get_coordinate() or ())
        if here and here[0] != created:
            raise ValueError(
                f"{name} is the shard of the rank with coordinate {created}, which created it; this rank has coordinate"
                f" {here[0]}. torch.save stores the experts of one rank; save with torch.distributed.checkpoint"
            )


def check_averaging(module: Any, weights_given: bool = False) -> None:
    """Check how FSDP2 treats a module of experts: at its first forward pass with gradients, and again once FSDP2 has
    sharded more modules, or the module's divisor or a divide factor of FSDP2 has changed. Warns if FSDP2 rounds routing
    weights.

    Args:
        module: the module.
        weights_given: whether its forward takes routing weights.

    Raises:
        ValueError: FSDP2 averages the gradients of other parameters around the module, but nothing divides those of
            the experts, or both the module and FSDP2 do; or FSDP2 shards ordinary tensors that differ between ranks; or
            a parameter is the shard of another rank.
    """
    groups, state = _checked.get(module, ((), None))
    if state == _state_of(module, groups):
        return
    own = _own_parameters(module)
    if not any(p.requires_grad for _, p in own.values()):
        return
    check_shards(module)
    groups = ()
    if module.comm.world_size > 1:
        with contextlib.suppress(AttributeError):  # a version of PyTorch with other internals is not checked
            around = list(_groups_around(module))
            _check_sharding(module, own, around)
            groups = tuple(map(weakref.ref, around))
    if weights_given:
        _warn_of_casts(module)
    _checked[module] = groups, _state_of(module, groups)


def _state_of(module: Any, groups: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what the result of the check depends on: the number of modules that FSDP2 has sharded, the divisor, and
    the divide factors of FSDP2's groups of parameters."""
    factors = tuple(getattr(group(), "gradient_divide_factor", None) for group in groups)
    return len(_states), module.gradient_divisor, factors


def _warn_of_casts(module: Any) -> None:
    """Warn once if FSDP2 rounds the routing weights that are passed to a module of experts, which it shards separately
    with mixed precision."""
    reference: Any = _states.get(module)
    policy = getattr(reference() if reference is not None else None, "_mp_policy", None)
    exact, given = module.comm.weights_dtype, getattr(policy, "param_dtype", None)
    casts = given not in (None, exact, torch.float64) and getattr(policy, "cast_forward_inputs", False)
    if casts and module not in _warned:
        _warned.add(module)
        warnings.warn(
            f"FSDP2 casts the inputs of {type(module).__name__} to {given}, which rounds the routing weights; pass"
            " MixedPrecisionPolicy(cast_forward_inputs=False) to fully_shard of this module",
            RuntimeWarning,
            stacklevel=2,
        )


def _own_parameters(module: nn.Module) -> dict[tuple[int, str], tuple[str, Any]]:
    """Return the experts' parameters: id of the module that has one, and its name there -> full name, parameter."""
    apart = set(names_apart(module))
    every = (
        ((id(part), last), (f"{path}.{last}" if path else last, parameter))
        for path, part in module.named_modules()
        for last, parameter in part._parameters.items()
    )
    return {key: (name, parameter) for key, (name, parameter) in every if name in apart}


def _check_sharding(module: Any, own: dict[tuple[int, str], tuple[str, Any]], groups: list[Any]) -> None:
    """Raise ValueError if FSDP2 averages parameters around ``module``, but the gradients of ``own`` are divided by
    nobody or twice, and for ordinary tensors of which FSDP2 would take a piece from every rank."""
    divisor, kind = module.gradient_divisor, type(module).__name__
    averaged: float = 1  # by how much FSDP2 divides the gradients of other parameters
    factors = set()  # by how much it divides those of the experts; None: its default
    replicas = 1
    for group in groups:
        mesh, factor = group.mesh_info.mesh, group.gradient_divide_factor
        for sharded in group.fsdp_params:
            at = sharded._module_info
            tied = zip(at.shared_modules, at.shared_param_names, strict=True)
            keys = {(id(part), name) for part, name in ((at.module, at.param_name), *tied)}
            mine = [own[key] for key in keys if key in own]
            if not mine:
                averaged = max(averaged, factor or mesh.size())
                continue
            factors.add(factor)
            replicas = mesh.size()
            together = set(mesh.mesh.flatten().tolist()) & set(module.comm.members)
            plain = [name for name, parameter in mine if not isinstance(parameter, DTensor)]
            if plain and len(together) > 1:
                raise ValueError(
                    f"FSDP2 shards {plain[0]} of {kind}, an ordinary tensor of which each rank holds different experts;"
                    " create it with from_local, or pass it to fully_shard in ignored_params"
                )
    if averaged == 1:
        return
    if divisor is None and not factors - {None}:
        raise ValueError(
            f"FSDP2 averages the gradients of parameters around {kind} over {averaged:g} ranks, but those of its"
            " experts would remain sums over ranks; call ep_ops.nn.keep_experts_apart(model, ranks=...) before"
            " training. If FSDP2 shards the experts too, call set_gradient_divide_factor of the module that it shards"
            " instead"
        )
    by_fsdp = next(iter(factors), 1) or replicas
    if divisor is not None and factors and divisor * by_fsdp > averaged:
        raise ValueError(
            f"the gradients of {kind} are divided by {divisor} (gradient_divisor, which keep_experts_apart sets) and by"
            f" FSDP2, which shards its parameters, by {by_fsdp:g}, but FSDP2 divides those of other parameters by"
            f" {averaged:g}; set gradient_divisor to None, or set_gradient_divide_factor to 1"
        )


def _groups_around(module: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's groups of parameters of all modules that contain ``module`` or are part of it."""
    parts = set(module.modules())
    for sharded, reference in list(_states.items()):
        if sharded in parts or any(part is module for part in sharded.modules()):
            state: Any = reference()
            one = getattr(state, "_fsdp_param_group", None) if not hasattr(state, "_fsdp_param_groups") else None
            yield from getattr(state, "_fsdp_param_groups", [one] if one is not None else [])
