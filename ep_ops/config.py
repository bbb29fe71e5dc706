"""`Config`: every option of a communicator, with its default and the values that it may have.

This is the only list of options. Validation, the comparison between ranks, the arguments of `Communicator` and
`memory_plan`, and the options of `ep-ops compile` are derived from the fields of the dataclass. To add an option, add a
field here, describe it in the docstring, and read it where it takes effect.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol, TypedDict

import torch

from .records import INT32_LIMIT, MAX_ALIGNMENT
from .version import __version__

MAX_TOP_K = 32
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BACKENDS = ("auto", "reference", "cute")
WIRES = ("auto", "nvlink", "nvshmem")

Rule = dict[str, Any]
"""Metadata of a field. ``holds``: whether a value is allowed, ``words``: what is allowed, ``parse``: from the text of a
command line option, ``variable``: the environment variable that gives the default, ``hint``: what to do where ranks
disagree. A field without metadata is no option: a communicator fills it in."""


def is_int(value: object) -> bool:
    """Return whether a value is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def patience(timeout: float) -> float:
    """Return the seconds after which a wait with this deadline logs a warning."""
    return min(timeout / 10, 60.0)


# ---------------------------------------------------------------------- rules of fields


def _int(least: int, most: int | None = None, optional: bool = False) -> Rule:
    """Allow an int of at least ``least`` and at most ``most``, or None if ``optional``."""
    bound = f"of at least {least}" if most is None else f"from {least} to {most}"

    def holds(value: Any) -> bool:
        if value is None:
            return optional
        return is_int(value) and least <= value <= (value if most is None else most)

    return {"holds": holds, "words": f"{'None or ' * optional}an int {bound}", "parse": int}


def _one_of(*values: Any, **more: Any) -> Rule:
    """Allow some values."""
    words = ", ".join(repr(value) if isinstance(value, str) else str(value) for value in values)

    def holds(value: Any) -> bool:  # comparing with an array gives an array
        return any(isinstance(value, type(one)) and value == one for one in values)

    return {"holds": holds, "words": f"one of {words}", **more}


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _bool(text: str) -> Any:
    return {"True": True, "False": False}.get(text, text)


def _dtype(text: str) -> Any:
    return getattr(torch, text, text)


_SECONDS: Rule = {
    "holds": lambda value: isinstance(value, (int, float)) and 0 < value < math.inf,
    "words": "a positive number of seconds",
    "parse": float,
}
_WIRE = _one_of(
    *WIRES, parse=str, variable="EP_OPS_WIRE", hint="set EP_OPS_WIRE to the same value on all ranks"
)  # fmt: skip
_CHECK = _one_of(
    "0", "1", variable="EP_OPS_CHECK", hint="set EP_OPS_CHECK in the environment of all ranks or of none"
)  # fmt: skip
_BUNDLE = _one_of(
    "0", "1", variable="EP_OPS_BUNDLE",
    hint="set EP_OPS_BUNDLE and NVSHMEM_REMOTE_TRANSPORT to the same values on all ranks",
)  # fmt: skip
_SWITCH = _one_of(True, False, parse=_bool)
_NAME: Rule = {"holds": lambda value: isinstance(value, str), "words": "a str"}


def _bundle() -> str:
    """Return the default of ``bundle``: EP_OPS_BUNDLE, or "1" over libfabric, where each put is expensive."""
    costly = os.environ.get("NVSHMEM_REMOTE_TRANSPORT") == "libfabric"
    return os.environ.get("EP_OPS_BUNDLE") or str(int(costly))


# ---------------------------------------------------------------------- the options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of a :class:`ep_ops.Communicator`. They must be equal on all ranks.

    ``Communicator(group, num_experts=64, ...)`` is short for ``Communicator(group, Config(num_experts=64, ...))``.
    ``dataclasses.replace(comm.config, ...)`` derives the configuration of another communicator.

    Args:
        num_experts: number of experts on all ranks together, at least 1. The largest numbers that the cute
            backend supports (8188 on 2 ranks, 8070 on 72) need the same number of experts on each rank.
        hidden_size: number of elements of a row, at least 1. A row's size in bytes must be a multiple of 16.
        top_k: number of experts for each token, 1..32 and at most ``num_experts``.
        max_tokens_per_rank: the largest number of tokens that any rank passes in one call, at least 1.
        dtype: dtype of the rows: bfloat16, float16, float32, or float64 (reference backend only).
        experts_per_rank: number of experts on each rank, one int for each rank. Ranks hold contiguous blocks of
            experts. Empty: as ``torch.chunk`` splits them (5 over 4 ranks: 2, 2, 1, 0).
        alignment: default alignment, 1..1024. The rows of each expert are padded to a multiple of this number.
        backend: "reference" (any device), "cute" (NVIDIA GPUs of capability 9.0 or newer; at most 72 ranks of one
            NVLink domain, at most 1024 of several), or "auto" (cute where it can run, else reference).
        timeout: seconds that an operation waits for a peer, more than 0. After this time all ranks raise an error
            that says which rank waited for which. A warning names a peer that is late by a tenth of this time or by one
            minute, whichever is less. On the reference backend this holds for process groups whose tensors lie on the
            host (gloo); over NCCL its operations follow the timeout of the process group.
        dispatch_sms: multiprocessors (SMs) that a dispatch may take, at least 1. None: chosen by a model of the bytes
            moved, and more on ranks that receive more rows. :meth:`Communicator.sm_budget` changes it temporarily.
        combine_sms: multiprocessors (SMs) that a combine may take, at least 2. None: five sixths of the GPU, and in
            split operations as many as a model of the bytes moved computes.
        latency_max_tokens: calls whose ``max_tokens`` is at most this run on the latency kernels of the cute backend,
            with bit-identical results, at least 0. 0: never. None: 256, or fewer if the sizes require it.
        symmetric_rows: the largest number of rows that :meth:`Communicator.empty_rows` returns and
            :meth:`Communicator.combine_gathered` takes, at least 0. The cute backend allocates memory for them.
        strict: True: the reference backend behaves as a GPU would. Undefined rows hold NaN, ``combine_gathered`` needs
            ``symmetric_rows``, and waits must follow their starts. False: for tools that compare or copy undefined
            values (``torch.library.opcheck``, ``torch.export``). The cute backend is always strict.
        domain_size: number of ranks of each NVLink domain, a divisor of the number of ranks. It declares domains that
            are smaller than the detected domains and consist of consecutive ranks of one. None: the detected domains.
            All domains must have the same number of ranks. The order of summation depends on the domains
            (docs/domains.md).
        staging_bytes: the most bytes of symmetric memory that the kernels may allocate, at least 1, not counting
            ``symmetric_rows`` (cute backend). Larger calls run in up to 64 rounds, with bit-identical results. None:
            enough for ``max_tokens_per_rank`` in one round (:func:`ep_ops.memory_plan` prints how much).
        overflow: what happens when rows exceed ``capacity`` or ``slots``. "count": they are dropped and counted
            (``Dispatched.dropped``). "raise": the next :meth:`Communicator.check_errors` raises as well; it then waits
            for the device.
        statistics: True counts operations, rows, bytes and waits for :meth:`Communicator.statistics`. It adds two
            small kernels to each dispatch, one to each combine, and a few instructions to the cute backend's kernels.
        name: name by which operators find the communicator. Empty: "ep0", "ep1", ..., a number that no rank has used.
        check: "1" compares every operation with the reference backend (docs/failures.md), "0" does not. Default:
            ``EP_OPS_CHECK`` in the environment.
        wire: transport between NVLink domains: "nvlink", "nvshmem" or "auto". Default: ``EP_OPS_WIRE``.
        bundle: "1" sends the latency kernels' rows for one rank of another domain in one put, "0" in one put each.
            Default: ``EP_OPS_BUNDLE``.

    Fields that a communicator fills in: ``world_size``, ``device_type``, ``domains`` (the ranks of each NVLink domain),
    ``lost_experts`` (how many experts :meth:`Communicator.shrink` has removed) and ``version`` (of ep_ops).
    """

    num_experts: int = field(metadata=_int(1))
    hidden_size: int = field(metadata=_int(1))
    top_k: int = field(metadata=_int(1, MAX_TOP_K))
    max_tokens_per_rank: int = field(metadata=_int(1))
    dtype: torch.dtype = field(default=torch.bfloat16, metadata=_one_of(*DTYPES, parse=_dtype))
    experts_per_rank: tuple[int, ...] = field(default=(), metadata={"parse": _ints})
    alignment: int = field(default=16, metadata=_int(1, MAX_ALIGNMENT))
    backend: str = field(default="auto", metadata=_one_of(*BACKENDS))
    timeout: float = field(default=900.0, metadata=_SECONDS)
    dispatch_sms: int | None = field(default=None, metadata=_int(1, optional=True))
    combine_sms: int | None = field(default=None, metadata=_int(2, optional=True))
    latency_max_tokens: int | None = field(default=None, metadata=_int(0, optional=True))
    symmetric_rows: int = field(default=0, metadata=_int(0, INT32_LIMIT - 1))
    strict: bool = field(default=True, metadata=_one_of(True, False))
    domain_size: int | None = field(default=None, metadata=_int(1, optional=True))
    staging_bytes: int | None = field(default=None, metadata=_int(1, optional=True))
    overflow: str = field(default="count", metadata=_one_of("count", "raise"))
    statistics: bool = field(default=False, metadata=_SWITCH)
    name: str = field(default="", metadata=_NAME)
    check: str = field(default_factory=lambda: os.environ.get("EP_OPS_CHECK") or "0", metadata=_CHECK)
    wire: str = field(default_factory=lambda: os.environ.get("EP_OPS_WIRE") or "auto", metadata=_WIRE)
    bundle: str = field(default_factory=_bundle, metadata=_BUNDLE)
    world_size: int = 0
    device_type: str = ""
    domains: tuple[tuple[int, ...], ...] = ()
    lost_experts: int = 0
    version: str = __version__

    def __post_init__(self) -> None:
        held = self.experts_per_rank
        if held is None or (isinstance(held, Sequence) and not isinstance(held, str)):
            object.__setattr__(self, "experts_per_rank", tuple(held or ()))  # hashable, as the other options are
        if self.name is None:
            object.__setattr__(self, "name", "")

    def on(self, world_size: int, **found: Any) -> Config:
        """Return this configuration for ``world_size`` ranks, with the fields in ``found`` replaced."""
        held = self.experts_per_rank
        if isinstance(held, tuple) and not held and is_int(self.num_experts):
            held = default_experts(self.num_experts, world_size)
        return dataclasses.replace(self, world_size=world_size, experts_per_rank=held, domains=(), **found)

    def problem(self) -> str | None:
        """Return what is wrong with the values for ``world_size`` ranks, or None."""
        for option in dataclasses.fields(Config):
            value = getattr(self, option.name)
            if "holds" in option.metadata and not option.metadata["holds"](value):
                variable = option.metadata.get("variable")
                source = f" (default: {variable} in the environment)" if variable else ""
                return f"{option.name} is {value!r}; allowed: {option.metadata['words']}{source}"
        return self._sizes_problem() or self._experts_problem()

    def _sizes_problem(self) -> str | None:
        size = self.hidden_size * self.dtype.itemsize
        if size % 16:
            made = f"rows of {size} bytes in {self.dtype}; allowed: a multiple of 16 bytes"
            return f"hidden_size is {self.hidden_size}, which makes {made}"
        if self.domain_size is not None and self.world_size % self.domain_size:
            return f"domain_size is {self.domain_size}; allowed: a divisor of the {self.world_size} ranks"
        if self.backend == "cute" and self.device_type != "cuda":
            return f"backend 'cute' runs on CUDA devices; the device is {self.device_type!r}"
        return None

    def _experts_problem(self) -> str | None:
        held = self.experts_per_rank
        whole = isinstance(held, tuple) and len(held) == self.world_size
        if not whole or not all(is_int(n) and n >= 0 for n in held):
            return f"experts_per_rank is {held!r}; allowed: one int >= 0 for each of {self.world_size} ranks"
        if sum(held) != self.num_experts:
            return f"experts_per_rank {held} adds up to {sum(held)}, but num_experts is {self.num_experts}"
        if self.top_k > self.num_experts + self.lost_experts:
            return f"top_k is {self.top_k}; allowed: at most num_experts, which is {self.num_experts}"
        sizes = self.world_size, self.max_tokens_per_rank, self.top_k, max(held), self.alignment
        if most_rows(*sizes, repeats=True) + self.alignment >= INT32_LIMIT:
            return (
                f"world_size {self.world_size} x max_tokens_per_rank {self.max_tokens_per_rank} x top_k {self.top_k}"
                " exceeds the 2**31 rows that an int32 can number"
            )
        return None


class ConfigOptions(TypedDict, total=False):
    """The options of :class:`Config` as keyword arguments, so that editors complete them. A test compares both."""

    num_experts: int
    hidden_size: int
    top_k: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    experts_per_rank: Sequence[int]
    alignment: int
    backend: str
    timeout: float
    dispatch_sms: int | None
    combine_sms: int | None
    latency_max_tokens: int | None
    symmetric_rows: int
    strict: bool
    domain_size: int | None
    staging_bytes: int | None
    overflow: str
    statistics: bool
    name: str
    check: str
    wire: str
    bundle: str


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function that takes ``**options``, with the options of :class:`Config` by name."""
    parameters = inspect.signature(function).parameters.values()
    own = [p for p in parameters if p.name != "self" and p.kind is not inspect.Parameter.VAR_KEYWORD]
    given = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(option), annotation=option.type)
        for name, option in options().items()
    ]
    return inspect.Signature([*own, *given])


def _default(option: dataclasses.Field[Any]) -> Any:
    if option.default_factory is not dataclasses.MISSING:
        return option.default_factory()
    return inspect.Parameter.empty if option.default is dataclasses.MISSING else option.default


def options() -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of :class:`Config` that users give, by name."""
    return {option.name: option for option in dataclasses.fields(Config) if option.metadata}


def configured(who: str, config: Config | None, given: Mapping[str, Any]) -> Config:
    """Return the configuration of a function that takes a :class:`Config` or its fields as keyword arguments.

    Args:
        who: name of the function, for error messages.
        config: the configuration, or None.
        given: keyword arguments. With a ``config`` they replace its fields.

    Raises:
        TypeError: ``config`` has another type, or keyword arguments are unknown or missing.
    """
    known = options()
    if unknown := [name for name in given if name not in known]:
        raise TypeError(f"{who} got unknown arguments {', '.join(unknown)}; allowed: {', '.join(known)}")
    if config is None:
        required = {name for name, option in known.items() if option.default is option.default_factory}
        if missing := [name for name in known if name in required and name not in given]:
            raise TypeError(f"{who} needs {', '.join(missing)}, or an ep_ops.Config")
        return Config(**given)
    if not isinstance(config, Config):
        raise TypeError(f"{who}: config is {config!r}; expected an ep_ops.Config, or options by name")
    if type(config) is not Config:
        raise TypeError(
            f"{who}: config is a {type(config).__name__}, whose other options it would ignore; expected an"
            " ep_ops.Config, such as config.of_communicator()"
        )
    return dataclasses.replace(config, **given)


# ---------------------------------------------------------------------- what follows from options


def default_experts(num_experts: int, world_size: int) -> tuple[int, ...]:
    """Return the number of experts on each rank if ``experts_per_rank`` is not given: the split of ``torch.chunk``.

    Every rank holds ceil(num_experts / world_size) experts until none are left: 5 experts over 4 ranks are 2, 2, 1, 0.
    DTensors with the placement ``Shard(0)`` are split in the same way, so one DTensor can hold a parameter of all
    experts, and its checkpoint can be loaded on any number of ranks. The busiest rank holds as many experts as in the
    most even split (2, 1, 1, 1).
    """
    each = -(-num_experts // world_size)
    return tuple(max(0, min(each, num_experts - rank * each)) for rank in range(world_size))


def consecutive_domains(world_size: int, domain_size: int | None) -> tuple[tuple[int, ...], ...]:
    """Return NVLink domains of ``domain_size`` consecutive ranks each (None: one domain)."""
    size = domain_size or world_size
    return tuple(tuple(range(first, first + size)) for first in range(0, world_size, size))


def most_rows(
    world_size: int, max_tokens: int, top_k: int, num_local_experts: int, alignment: int, *, repeats: bool = False
) -> int:
    """Return the most rows that can arrive at a rank, grouped by expert, padding included.

    Args:
        repeats: whether a token may name one expert several times; each time takes a row.
    """
    each = top_k if repeats else min(top_k, num_local_experts)
    return world_size * max_tokens * each + num_local_experts * (alignment - 1)


def most_token_rows(world_size: int, max_tokens: int, num_local_experts: int) -> int:
    """Return the most token-major rows that can arrive at a rank: one per token of each rank, if it has experts."""
    return world_size * max_tokens if num_local_experts else 0


def worst_case_rows(world_size: int, max_tokens: int, top_k: int, num_local_experts: int, alignment: int) -> int:
    """Return :func:`most_rows` (without repeats), rounded up to ``alignment``: the default ``capacity``."""
    rows = most_rows(world_size, max_tokens, top_k, num_local_experts, alignment)
    return (rows + alignment - 1) // alignment * alignment


class Member(Protocol):
    """The attributes of a communicator that checks and backends use."""

    config: Config
    group: Any  # process group; None: this process alone
    rank: int
    device: torch.device
    name: str
    number: int  # the same on all ranks, and another one for each communicator
    world_size: int
    num_experts: int
    experts_per_rank: tuple[int, ...]
    num_local_experts: int
    hidden_size: int
    top_k: int
    max_tokens_per_rank: int
    dtype: torch.dtype  # of rows
    weights_dtype: torch.dtype
    symmetric_rows: int
    strict: bool
    multiprocessors: int  # of the GPU that this process has; 0: there is no GPU
