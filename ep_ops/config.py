"""What all ranks of a communicator have to agree on."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import torch

from .records import INT32_LIMIT, MAX_ALIGNMENT

MAX_TOP_K = 32
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
BACKENDS = ("auto", "reference", "cute")
WIRES = ("auto", "nvlink", "nvshmem")


def is_int(value: object) -> bool:
    """True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def even_experts(num_experts: int, world_size: int) -> tuple[int, ...]:
    """Experts of each rank, as even as possible: the first ``num_experts % world_size`` ranks hold one more."""
    each, more = divmod(num_experts, world_size)
    return tuple(each + (rank < more) for rank in range(world_size))


def consecutive_domains(world_size: int, domain_size: int | None) -> tuple[tuple[int, ...], ...]:
    """NVLink domains of so many ranks (None: one domain), if ranks are numbered domain by domain."""
    size = domain_size or world_size
    return tuple(tuple(range(first, first + size)) for first in range(0, world_size, size))


def worst_case_rows(world_size: int, max_tokens: int, top_k: int, num_local_experts: int, alignment: int) -> int:
    """Rows that hold whatever the ranks may route here, padding included, rounded up to ``alignment``.

    Assumes that a token names an expert at most once; naming one twice takes a row each time.
    """
    rows = world_size * max_tokens * min(top_k, num_local_experts) + num_local_experts * (alignment - 1)
    return (rows + alignment - 1) // alignment * alignment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The fields of a communicator that must be equal on all ranks (see :class:`ep_ops.Communicator`)."""

    name: str
    world_size: int
    num_experts: int
    hidden_size: int
    top_k: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    experts_per_rank: tuple[int, ...]
    alignment: int
    backend: str
    device_type: str
    timeout: float
    dispatch_sms: int | None = None
    combine_sms: int | None = None
    latency_max_tokens: int | None = None
    symmetric_rows: int = 0
    strict: bool = True
    version: str = ""  # of ep_ops
    check: str = "0"  # EP_OPS_CHECK
    domain_size: int | None = None  # ranks of an NVLink domain; None: as they are found
    wire: str = "auto"  # EP_OPS_WIRE: by what kernels reach other NVLink domains; resolved where there are several
    staging_bytes: int | None = None  # the most bytes of symmetric memory; None: no bound
    domains: tuple[tuple[int, ...], ...] = ()  # ranks of each NVLink domain, once they are known (topology.Domains)
    bundle: str = "0"  # EP_OPS_BUNDLE: whether rows of few tokens for one rank of another domain go in one put

    def problem(self) -> str | None:
        """What is wrong with these values, or None."""
        for field in ("num_experts", "hidden_size", "top_k", "max_tokens_per_rank", "alignment"):
            value = getattr(self, field)
            if not is_int(value) or value < 1:
                return f"{field} is {value!r}; it must be an int of at least 1"
        if not isinstance(self.name, str) or not self.name:
            return f"name is {self.name!r}; it must be a non-empty str"
        if self.dtype not in DTYPES:
            return f"dtype is {self.dtype!r}; it must be one of {', '.join(map(str, DTYPES))}"
        row_bytes = self.hidden_size * self.dtype.itemsize
        if row_bytes % 16:
            return (
                f"hidden_size {self.hidden_size} of {self.dtype} makes rows of {row_bytes} bytes; need a multiple of 16"
            )
        if self.top_k > MAX_TOP_K:
            return f"top_k is {self.top_k}; at most {MAX_TOP_K} is supported"
        if self.alignment > MAX_ALIGNMENT:
            return f"alignment is {self.alignment}; at most {MAX_ALIGNMENT} is supported"
        return self._experts_problem() or self._resources_problem()

    def _experts_problem(self) -> str | None:
        given = self.experts_per_rank
        if len(given) != self.world_size or not all(is_int(n) and n >= 0 for n in given):
            return f"experts_per_rank is {given}; it must hold one int >= 0 for each of {self.world_size} ranks"
        if sum(given) != self.num_experts:
            return f"experts_per_rank {given} adds up to {sum(given)}, but num_experts is {self.num_experts}"
        routed = self.world_size * self.max_tokens_per_rank * self.top_k + max(given) * (self.alignment - 1)
        if routed + self.alignment >= INT32_LIMIT:
            return (
                f"world_size {self.world_size} x max_tokens_per_rank {self.max_tokens_per_rank} x top_k {self.top_k}"
                " exceeds the 2**31 rows that an int32 can number"
            )
        return None

    def _resources_problem(self) -> str | None:
        if self.backend not in BACKENDS:
            return f"backend is {self.backend!r}; it must be one of {', '.join(map(repr, BACKENDS))}"
        if self.backend == "cute" and self.device_type != "cuda":
            return f"backend 'cute' runs on CUDA devices; the device is {self.device_type!r}"
        if not isinstance(self.timeout, (int, float)) or not 0 < self.timeout < math.inf:
            return f"timeout is {self.timeout!r}; it must be a positive number of seconds"
        for field in ("dispatch_sms", "combine_sms"):
            value = getattr(self, field)
            if value is not None and (not is_int(value) or value < 1):
                return f"{field} is {value!r}; it must be None or an int of at least 1"
        value = self.latency_max_tokens
        if value is not None and (not is_int(value) or value < 0):
            return f"latency_max_tokens is {value!r}; it must be None or an int of at least 0"
        if not is_int(self.symmetric_rows) or not 0 <= self.symmetric_rows < INT32_LIMIT:
            return f"symmetric_rows is {self.symmetric_rows!r}; it must be an int from 0 to 2**31 - 1"
        value = self.domain_size
        if value is not None and (not is_int(value) or value < 1 or self.world_size % value):
            return f"domain_size is {value!r}; it must be None or an int that divides the {self.world_size} ranks"
        value = self.staging_bytes
        if value is not None and (not is_int(value) or value < 1):
            return f"staging_bytes is {value!r}; it must be None or an int of at least 1"
        if self.check not in ("0", "1"):
            return f"EP_OPS_CHECK is {self.check!r} in the environment; it must be 0 or 1"
        if self.wire not in WIRES:
            return f"EP_OPS_WIRE is {self.wire!r} in the environment; it must be one of {', '.join(WIRES)}"
        if self.bundle not in ("0", "1"):
            return f"EP_OPS_BUNDLE is {self.bundle!r} in the environment; it must be 0 or 1"
        return None


class Member(Protocol):
    """What checks and backends know of a communicator: its configuration, and this rank's place in it."""

    config: Config
    group: Any  # process group; None: this process alone
    rank: int
    device: torch.device
    name: str
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
    accepted: set[tuple[int, ...]]  # ints of operators that plan, as far as they have passed their checks
