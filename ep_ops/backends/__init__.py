"""Backends, which run the operators: ``reference`` on any device, ``cute`` on NVIDIA GPUs, and ``checked``, which
compares another backend with the reference. They are imported when they are needed."""

from __future__ import annotations

import dataclasses
from typing import cast

from ..config import Config, Member
from ..group.exchange import Exchange
from .base import Backend


def make(kind: str, member: Member) -> Backend:
    """Return the backend of that name for one rank of a communicator, in checking mode if it is configured.
    Collective."""
    if member.config.check == "1":
        from .checked import CheckedBackend

        return cast(Backend, CheckedBackend(member, _plain(kind, member)))
    return _plain(kind, member)


def _plain(kind: str, member: Member) -> Backend:
    if kind == "cute":
        return _cute(member)
    from .reference import ReferenceBackend

    return ReferenceBackend(member)


def _cute(member: Member) -> Backend:
    """Return the cute backend. If one rank cannot create its own, every rank raises that rank's reason."""
    from .cute.backend import CuteBackend

    made, error = None, None
    try:
        made = CuteBackend(member)
    except Exception as caught:
        error = caught
    try:
        Exchange(member.group, member.device).raise_together(f"creating communicator {member.name!r}", error)
    except Exception:
        if made is not None:
            made.destroy(keep=False)  # nobody has used it
        raise
    return cast(Backend, made)


def problem(config: Config) -> str | None:
    """Return why the backend of a valid configuration does not support it, or None."""
    if config.backend != "cute":
        return None
    from .cute.sizing import problem_with

    return problem_with(config)


def tuning_problem() -> str | None:
    """Return what is wrong with the file that EP_OPS_TUNING names, or None."""
    from .cute.tuning import rows_given

    try:
        rows_given()
    except ValueError as error:
        return str(error)
    return None


def too_small(config: Config, multiprocessors: int) -> str | None:
    """Return why the cute backend needs more than this number of multiprocessors, or None."""
    from .cute import residency
    from .cute.sizing import sizes_of

    return residency.too_small(sizes_of(config), multiprocessors)


def lack(config: Config, multiprocessors: int) -> str | None:
    """Return what this rank lacks for the cute backend, given the NVLink domains and the wire between them, or None."""
    from .cute.sizing import across, problem_with

    found = problem_with(config) or too_small(config, multiprocessors)
    if found is not None or not across(config) or config.wire != "nvshmem":
        return found
    return lack_across()


def lack_across() -> str | None:
    """Return what this process lacks for NVSHMEM between NVLink domains, or None."""
    from ..symmetric import nvshmem

    return nvshmem.problem() or no_device_library()


def no_device_library() -> str | None:
    """Return the error text if NVSHMEM's device library is not found, else None."""
    from ..symmetric import nvshmem

    try:
        from cute_kernels.internode.wire import find_library
    except ImportError as error:  # of the CuTe DSL
        return f"{error}: pip install 'ep_ops[cu12]' or 'ep_ops[cu13]'"
    if find_library() is not None:
        return None
    return f"NVSHMEM's device library is not installed, or too old: {nvshmem.install()}"


def held_bytes(config: Config) -> dict[str, int]:
    """Return the bytes that the backend holds as long as the communicator lives, by purpose."""
    if config.backend != "cute":
        return {}
    from .cute.sizing import memory_plan

    return memory_plan(config)


def latency_tokens(config: Config) -> int:
    """Return the largest ``max_tokens`` that the latency kernels support for this configuration, 0 for none."""
    if problem(dataclasses.replace(config, backend="cute")) is not None:
        return 0
    from .cute.sizing import problem_of, token_bound

    return token_bound(config, problem_of(config))
