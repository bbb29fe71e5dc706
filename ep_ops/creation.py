"""What the ranks agree on before a communicator is created: its configuration and its name."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from . import backends, registry
from .config import Config
from .group.agreement import agree
from .group.exchange import Exchange
from .group.topology import gpu_problem


def agreed_config(exchange: Exchange, own: Config | None, error: Exception | None, multiprocessors: int) -> Config:
    """Compare configurations with the other ranks and return the one of all ranks. Collective.

    Args:
        exchange: exchange over the ranks, on the device of this rank.
        own: this rank's configuration. None: it could not be made because of ``error``.
        error: the exception that this rank raises after the other ranks have been informed, or None.
        multiprocessors: number of multiprocessors of the device; 0 on CPUs.

    Raises:
        TypeError: ``error``, if it is a TypeError.
        ValueError: as for :func:`ep_ops.group.agreement.agree`.
    """
    problem, unfit = None if error is None else str(error), None
    try:
        if own is not None:
            problem = _problem_of(own, exchange.device, multiprocessors)
            if problem is None and own.backend == "auto":
                unfit = _unfit(own, exchange.device, multiprocessors)
    except Exception as caught:
        problem, error = str(caught), caught
    lack = functools.partial(backends.lack, multiprocessors=multiprocessors)
    try:
        return agree(exchange, own, problem, unfit, lack)
    except ValueError:
        if isinstance(error, TypeError):
            raise error from None
        raise


def reserve_name(exchange: Exchange, given: str) -> str:
    """Reserve a name on all ranks and return it. Collective. :func:`ep_ops.registry.release` ends the reservation.

    Args:
        given: the name. Empty: "epN", with a number N that no rank has used.

    Raises:
        ValueError: a rank has a communicator of that name.
    """
    while True:
        name = given or f"ep{int(_gathered(exchange, registry.next_number()).max())}"
        free = registry.reserve(name)
        missing = None
        try:
            missing = (_gathered(exchange, free) == 0).nonzero().flatten().tolist()
        finally:  # ranks may not be reachable
            if free and missing != []:
                registry.release(name)
        if not missing:
            return name
        if given:
            raise ValueError(f"rank {missing[0]}: {_exists(name)}")


def _gathered(exchange: Exchange, number: int) -> Tensor:
    """Return a number of each rank, [W]. Collective."""
    return exchange.all_gather(torch.tensor(int(number), device="cpu"))


def _problem_of(own: Config, device: torch.device, multiprocessors: int) -> str | None:
    """Return what is wrong with this rank's configuration, its table of choices included, or None."""
    problem = own.problem() or (_unfit(own, device, multiprocessors) if own.backend == "cute" else None)
    return problem or (_exists(own.name) if own.name in registry.living else None) or backends.tuning_problem()


def _exists(name: str) -> str:
    return f"communicator {name!r} exists already; destroy it first or choose another name"


def _unfit(own: Config, device: torch.device, multiprocessors: int) -> str | None:
    """Return why the cute backend cannot run this configuration on this device, or None."""
    unfit = backends.problem(dataclasses.replace(own, backend="cute"))
    if unfit is None and device.type == "cuda":
        unfit = gpu_problem(device) or backends.too_small(own, multiprocessors)
    return unfit
