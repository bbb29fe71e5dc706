"""Ranks compare their configurations and choose one backend, before anything is allocated."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..config import Config
from .exchange import Exchange
from .topology import GpuFacts, choose_backend, choose_wire, describe, divide, gpu_facts, pair_without_nvlink

Lack = Callable[[Config], "str | None"]
"""What a rank lacks for the kernels of a communicator whose NVLink domains are known; None: nothing."""


def agree(exchange: Exchange, own: Config, problem: str | None, unfit: str | None, lack: Lack) -> Config:
    """The configuration of all ranks, with "auto" and the NVLink domains resolved. Collective.

    ``problem``: what is wrong with this rank's; ``unfit``: what of the values "cute" does not take where "auto" was
    asked for, as far as that is known before the domains are. ValueError on every rank if one has a problem, if they
    differ, if domains have unequally many ranks, if "cute" was asked for and is out of reach for some, or if latency
    kernels were asked for and some ranks lack NVLink. A warning where "auto" leaves GPUs to the reference backend.
    """
    words = _gather_words(exchange, (own, problem, gpu_facts(exchange.device), unfit))
    problems = [f"rank {rank}: {problem}" for rank, (_, problem, *_) in enumerate(words) if problem]
    if problems:
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
            warnings.warn(f"backend 'auto' takes 'reference', which is slow: {why}", RuntimeWarning, stacklevel=3)
    elif backend == "cute":
        agreed = _with_latency_kernels(exchange, agreed, facts)
    return dataclasses.replace(agreed, backend=backend)


def _with_latency_kernels(exchange: Exchange, agreed: Config, facts: Sequence[GpuFacts | None]) -> Config:
    """The configuration without latency kernels if ranks reach each other over PCIe: these kernels need 128-byte lines
    that arrive whole, which only NVLink is known to do. ValueError if they were asked for."""
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
    """The configuration with what kernels reach other domains by, where there are several, and what speaks against
    kernels ("": nothing); the same on all ranks."""
    if len(agreed.domains) == 1:
        # Nobody has to be asked: what is not known already follows from the configuration.
        return agreed, lack(agreed) or ""
    wire, why = choose_wire(facts, agreed.wire)
    agreed = dataclasses.replace(agreed, wire=wire)
    lacks = _gather_words(exchange, why or lack(agreed))
    for rank, text in enumerate(lacks):
        if text:
            where = describe(facts, agreed.domains)
            return agreed, f"{where}; backend 'cute' cannot run across them: rank {rank}: {text}"
    return agreed, ""


def _gather_words(exchange: Exchange, word: Any) -> list[Any]:
    """What each rank says, by rank. Collective."""
    words: list[Any] = [word]
    if exchange.world_size > 1:
        words = [None] * exchange.world_size
        on_gpu = exchange.device.type == "cuda"
        with torch.cuda.device(exchange.device) if on_gpu else contextlib.nullcontext():
            dist.all_gather_object(words, word, group=exchange.group)
    return words


def disagreement(configs: Sequence[Config]) -> str | None:
    """The first field that differs between ranks, with every value and the ranks that gave it; None if all agree."""
    for field in dataclasses.fields(Config):
        ranks_by_value: dict[Any, list[int]] = {}
        for rank, config in enumerate(configs):
            ranks_by_value.setdefault(getattr(config, field.name), []).append(rank)
        if len(ranks_by_value) > 1:
            given = "; ".join(f"{value!r} on ranks {ranks}" for value, ranks in ranks_by_value.items())
            hint = field.metadata.get("hint")
            return f"ranks disagree on {field.name}: {given}{f'; {hint}' if hint else ''}"
    return None
