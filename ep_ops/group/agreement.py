"""Agreement of all ranks on one configuration and backend, before anything is allocated."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ..config import Config
from .exchange import Exchange
from .topology import GpuFacts, choose_backend, choose_wire, describe, divide, gpu_facts, pair_without_nvlink

Lack = Callable[[Config], "str | None"]
"""Function that returns what a rank lacks for the kernels of a communicator whose NVLink domains are known, or None."""


def agree(exchange: Exchange, own: Config | None, problem: str | None, unfit: str | None, lack: Lack) -> Config:
    """Return the configuration of all ranks, with "auto" and the NVLink domains resolved. Collective.

    Warns if "auto" selects the reference backend although there are GPUs.

    Args:
        own: this rank's configuration. None if it has a problem.
        problem: what is wrong with it, or None.
        unfit: why "auto" cannot use cute, as far as is known before the domains are, or None.
        lack: returns what this rank lacks for the kernels of a configuration.

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
        agreed, why = _with_wire(exchange, agreed, facts, lack)
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


def _with_wire(exchange: Exchange, agreed: Config, facts: Sequence[GpuFacts | None], lack: Lack) -> tuple[Config, str]:
    """Return the configuration with the wire between NVLink domains, if there are several, and why kernels cannot run
    ("" if they can). The result is equal on all ranks."""
    if len(agreed.domains) == 1:
        # No exchange is needed: what is not known yet follows from the configuration, which is equal on all ranks.
        return agreed, lack(agreed) or ""
    wire, why = choose_wire(facts, agreed.wire)
    agreed = dataclasses.replace(agreed, wire=wire)
    lacks = exchange.all_gather_object(why or lack(agreed))
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
