"""Ranks compare their configurations and choose one backend, before anything is allocated."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .config import Config
from .exchange import Exchange
from .topology import choose_backend, divide, gpu_facts, told

_HINTS = {
    "name": "; pass name= where ranks have made different numbers of them",
    "check": "; set EP_OPS_CHECK in the environment of all ranks or of none",
}


def agree(exchange: Exchange, own: Config, problem: str | None, cute: bool) -> Config:
    """The configuration of all ranks, with "auto" and the NVLink domains resolved. Collective.

    ``problem``: what is wrong with this rank's; ``cute``: whether that backend takes the values. ValueError on every
    rank if one has a problem, if they differ, if domains have unequally many ranks, or if "cute" was asked for and is
    out of reach for some. A warning where "auto" leaves GPUs to the reference backend.
    """
    word = (own, problem, gpu_facts(exchange.device))
    words: list[Any] = [word]
    if exchange.world_size > 1:
        words = [None] * exchange.world_size
        on_gpu = exchange.device.type == "cuda"
        with torch.cuda.device(exchange.device) if on_gpu else contextlib.nullcontext():
            dist.all_gather_object(words, word, group=exchange.group)
    problems = [f"rank {rank}: {problem}" for rank, (_, problem, _) in enumerate(words) if problem]
    if problems:
        raise ValueError("; ".join(problems))
    if difference := disagreement([config for config, _, _ in words]):
        raise ValueError(difference)
    facts = [facts for _, _, facts in words]
    domains = divide(facts, own.domain_size)
    agreed = dataclasses.replace(own, domain_size=len(domains[0]), domains=domains)
    if own.backend == "cute" and len(domains) > 1:
        raise ValueError(f"{told(facts, domains)}; backend 'cute' needs all in one")
    if own.backend != "auto":
        return agreed
    backend, why = choose_backend(facts, domains) if cute else ("reference", "")
    if why and None not in facts and exchange.rank == 0:
        warnings.warn(f"backend 'auto' takes 'reference', which is slow: {why}", RuntimeWarning, stacklevel=3)
    return dataclasses.replace(agreed, backend=backend)


def disagreement(configs: Sequence[Config]) -> str | None:
    """The first field that differs between ranks, with every value and the ranks that gave it; None if all agree."""
    for field in dataclasses.fields(Config):
        ranks_by_value: dict[Any, list[int]] = {}
        for rank, config in enumerate(configs):
            ranks_by_value.setdefault(getattr(config, field.name), []).append(rank)
        if len(ranks_by_value) > 1:
            given = "; ".join(f"{value!r} on ranks {ranks}" for value, ranks in ranks_by_value.items())
            return f"ranks disagree on {field.name}: {given}{_HINTS.get(field.name, '')}"
    return None
