"""What the ranks agree on before a communicator is created: its configuration and its name."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import backends, registry
from .config import Config
from .group.exchange import Exchange
from .group.topology import (
    GpuFacts,
    choose_backend,
    choose_wire,
    describe,
    divide,
    gpu_facts,
    gpu_problem,
    pair_without_nvlink,
)


def agreed_config(exchange: Exchange, own: Config | None, error: Exception | None, multiprocessors: int) -> Config:
    """Compare configurations with the other ranks and return the one of all ranks. Collective.

    Args:
        exchange: exchange over the ranks, on the device of this rank.
        own: this rank's configuration. None: it could not be made because of ``error``.
        error: the exception that this rank raises after the other ranks have been informed, or None.
        multiprocessors: number of multiprocessors of the device; 0 on CPUs.

    Raises:
        TypeError: ``error``, if it is a TypeError.
        ValueError: as for :func:`agree`.
    """
    problem, unfit = None if error is None else str(error), None
    try:
        if own is not None:
            problem = _problem_of(own, exchange.device, multiprocessors)
            if problem is None and own.backend == "auto":
                unfit = _unfit(own, exchange.device, multiprocessors)
    except Exception as caught:
        problem, error = str(caught), caught
    try:
        return agree(exchange, own, problem, unfit, multiprocessors)
    except ValueError:
        if isinstance(error, TypeError):
            raise error from None
        raise


def _problem_of(own: Config, device: torch.device, multiprocessors: int) -> str | None:
    """Return what is wrong with this rank's configuration, its table of choices included, or None."""
    problem = own.problem() or (_unfit(own, device, multiprocessors) if own.backend == "cute" else None)
    return problem or (_exists(own.name) if own.name in registry.living else None) or backends.tuning_problem()


def _unfit(own: Config, device: torch.device, multiprocessors: int) -> str | None:
    """Return why the cute backend cannot run this configuration on this device, or None."""
    unfit = backends.problem(dataclasses.replace(own, backend="cute"))
    if unfit is None and device.type == "cuda":
        unfit = gpu_problem(device) or backends.too_small(own, multiprocessors)
    return unfit


def agree(
    exchange: Exchange, own: Config | None, problem: str | None, unfit: str | None, multiprocessors: int
) -> Config:
    """Return the configuration of all ranks, with "auto" and the NVLink domains resolved. Collective.

    Warns if "auto" selects the reference backend although there are GPUs.

    Args:
        own: this rank's configuration. None if it has a problem.
        problem: what is wrong with it, or None.
        unfit: why "auto" cannot use cute, as far as is known before the domains are, or None.
        multiprocessors: as for :func:`agreed_config`.

    Raises:
        ValueError: a rank has a problem, configurations or sizes of domains differ, or "cute" or latency kernels were
            requested and some ranks cannot run them. Every rank raises it.
    """
    if problem is not None:
        own = None  # its values can be anything, including what cannot be pickled
    words = exchange.all_gather_object((own, problem, gpu_facts(exchange.device), unfit))
    problems = [f"rank {rank}: {problem}" for rank, (_, problem, *_) in enumerate(words) if problem is not None]
    if problems or own is None:
        raise ValueError("; ".join(problems))
    if difference := disagreement([config for config, *_ in words]):
        raise ValueError(difference)
    facts = [facts for _, _, facts, _ in words]
    domains = divide(facts, own.domain_size)
    agreed = dataclasses.replace(own, domain_size=len(domains[0]), domains=domains)
    backend, why = own.backend, ""
    if backend == "auto":
        why = next((text for *_, text in words if text), "")
        backend, why = ("reference", why) if why else choose_backend(facts)
    if backend == "cute":
        agreed, why = _with_wire(exchange, agreed, facts, multiprocessors)
        if why and own.backend == "cute":
            raise ValueError(why)
    if why:
        backend = "reference"
        if None not in facts and exchange.rank == 0:
            warnings.warn(f"backend 'auto' selects 'reference', which is slow: {why}", RuntimeWarning, stacklevel=3)
    elif backend == "cute":
        agreed = _with_latency_kernels(exchange, agreed, facts)
    return dataclasses.replace(agreed, backend=backend)


def _with_latency_kernels(exchange: Exchange, agreed: Config, facts: Sequence[GpuFacts | None]) -> Config:
    """Return the configuration, without latency kernels if ranks reach each other over PCIe. Latency kernels need
    128-byte lines to arrive as a unit, which is known of NVLink only. Raises ValueError if they were requested."""
    asked, pair = agreed.latency_max_tokens, pair_without_nvlink(facts)
    if pair is not None:
        if asked:
            raise ValueError(
                f"latency_max_tokens is {asked}, but there is no NVLink between the GPUs of ranks {pair[0]} and"
                f" {pair[1]}, which latency kernels need; allowed: None, 0"
            )
        return dataclasses.replace(agreed, latency_max_tokens=0)
    gpus = {(fact.host, fact.gpu) for fact in facts if fact is not None}
    unknown = any(fact is not None and fact.no_nvlink is None for fact in facts)
    if unknown and len(gpus) > 1 and asked != 0 and exchange.rank == 0:
        warnings.warn(
            "NVML cannot tell whether NVLink joins the GPUs of all ranks, which latency kernels need; pass"
            " latency_max_tokens=0 if it does not",
            RuntimeWarning,
            stacklevel=3,
        )
    return agreed


def _with_wire(
    exchange: Exchange, agreed: Config, facts: Sequence[GpuFacts | None], multiprocessors: int
) -> tuple[Config, str]:
    """Return the configuration with the wire between NVLink domains, if there are several, and why kernels cannot run
    ("" if they can). The result is equal on all ranks."""
    if len(agreed.domains) == 1:
        # No exchange is needed: what is not known yet follows from the configuration, which is equal on all ranks.
        return agreed, backends.lack(agreed, multiprocessors) or ""
    wire, why = choose_wire(facts, agreed.wire)
    agreed = dataclasses.replace(agreed, wire=wire)
    lacks = exchange.all_gather_object(why or backends.lack(agreed, multiprocessors))
    for rank, text in enumerate(lacks):
        if text:
            where = describe(facts, agreed.domains)
            return agreed, f"{where}; backend 'cute' cannot run across them: rank {rank}: {text}"
    return agreed, ""


def disagreement(configs: Sequence[Config]) -> str | None:
    """Return a description of the first field that differs between ranks, with its values and ranks, or None."""
    for field in dataclasses.fields(Config):
        ranks_by_value: dict[Any, list[int]] = {}
        for rank, config in enumerate(configs):
            ranks_by_value.setdefault(getattr(config, field.name), []).append(rank)
        if len(ranks_by_value) > 1:
            given = "; ".join(f"{value!r} on ranks {ranks}" for value, ranks in ranks_by_value.items())
            hint = field.metadata.get("hint")
            return f"ranks disagree on {field.name}: {given}{f'; {hint}' if hint else ''}"
    return None


# ---------------------------------------------------------------------- names


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


def _exists(name: str) -> str:
    return f"communicator {name!r} exists already; destroy it first or choose another name"
