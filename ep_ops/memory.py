"""Memory that a communicator and its calls need, computed before anything is allocated."""

from __future__ import annotations

import dataclasses
from typing import Any

from . import arrivals, backends
from .config import Config, configured, consecutive_domains, is_int, most_token_rows, worst_case_rows
from .formats import exact_dtype
from .records import GROUPED, TOKEN_MAJOR, check_rows_of_experts, wrong_type


class MemoryPlan(dict[str, int]):
    """Bytes by purpose. ``str()`` returns them as a table."""

    def __str__(self) -> str:
        width = max(map(len, self), default=5)
        lines = [f"{purpose:<{width}} {_readable(size):>12}" for purpose, size in self.items()]
        return "\n".join(lines)


def _readable(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size} B"


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """A layer of SwiGLU experts whose memory is planned. The fields are arguments of :class:`ep_ops.nn.Experts`."""

    intermediate_size: int
    rows: str = GROUPED
    places: int | None = None
    redispatch: bool = False
    gemms: str = "torch"
    """"torch" or "quack"."""

    def check(self, alignment: int) -> None:
        """Raise ValueError if a value is not allowed. ``alignment``: the communicator's."""
        if not is_int(self.intermediate_size) or self.intermediate_size < 1:
            raise ValueError(f"intermediate_size is {self.intermediate_size!r}; allowed: an int of at least 1")
        if self.gemms not in ("torch", "quack"):
            raise ValueError(f"gemms is {self.gemms!r}; allowed: 'torch', 'quack'")
        check_rows_of_experts(self.rows, self.places, self.redispatch, alignment)


def memory_plan(
    config: Config | None = None, *, world_size: int, rank: int = 0, capacity: int | None = None,
    layer: LayerPlan | dict[str, Any] | None = None, **options: Any,
) -> MemoryPlan:  # fmt: skip
    """Return the bytes that one rank of a communicator needs. Allocates nothing and needs no GPU.

    Entries named ``call: ...`` are the outputs of one ``dispatch`` and one ``combine`` of ``max_tokens_per_rank``
    tokens. Entries named ``layer: ...`` describe one layer of experts in eager mode: its weights, what it keeps for
    backward, and the largest number of bytes that its forward and backward allocate at any time, which includes what
    is kept, the output, and all gradients, but neither the weights, nor x, nor the gradient of the output. The
    communicator holds all others.

    Args:
        config: the communicator's options. They can also be passed as keyword arguments, as for
            :class:`ep_ops.Communicator`. Backend "auto" means "cute" here. NVLink domains are ``domain_size``
            consecutive ranks; None: one domain.
        world_size: number of ranks, at least 1.
        rank: the rank whose memory is returned, 0..world_size - 1.
        capacity: rows of the receive buffer. None: the worst case, without drops.
        layer: a dict of these arguments of :class:`ep_ops.nn.Experts`: ``intermediate_size`` (required), ``rows``,
            ``places``, ``redispatch``, and ``gemms`` ("torch" or "quack"). None: no layer, and grouped rows.

    Returns:
        MemoryPlan: bytes by purpose.

    Raises:
        TypeError: options or keys of ``layer`` are unknown or missing, or ``layer`` has another type.
        ValueError: no communicator or layer accepts a value.
    """
    config = planned(configured("memory_plan", config, options), world_size)
    if not is_int(rank) or not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank!r}; allowed: 0..{world_size - 1}")
    if capacity is not None and (not is_int(capacity) or capacity < 0):
        raise ValueError(f"capacity is {capacity!r}; allowed: None or an int of at least 0")
    planned_layer = _layer_of(layer)
    if planned_layer is not None:
        planned_layer.check(config.alignment)
    return plan_of(config, rank, capacity, planned_layer)


def _layer_of(given: object) -> LayerPlan | None:
    """Return the argument ``layer`` as a record. TypeError for another type, and for unknown or missing keys."""
    if given is None or isinstance(given, LayerPlan):
        return given
    if not isinstance(given, dict):
        raise wrong_type("layer", given, "a dict of arguments of ep_ops.nn.Experts")
    first, *others = names = [field.name for field in dataclasses.fields(LayerPlan)]
    if first not in given or not set(given) <= set(names):
        keys = ", ".join(map(str, given)) or "none"
        raise TypeError(f"layer has the keys {keys}; allowed: {first}, which is required, {', '.join(others)}")
    return LayerPlan(**given)


def planned(config: Config, world_size: int) -> Config:
    """Return the configuration that ``world_size`` ranks would agree on, with "auto" as cute and NVSHMEM.

    Raises:
        ValueError: no communicator accepts a value.
    """
    if not is_int(world_size) or world_size < 1:
        raise ValueError(f"world_size is {world_size!r}; allowed: an int of at least 1")
    backend = "cute" if config.backend == "auto" else config.backend
    wire = "nvshmem" if config.wire == "auto" else config.wire
    device = "cpu" if backend == "reference" else "cuda"
    config = config.on(world_size, backend=backend, wire=wire, device_type=device, name=config.name or "planned")
    problem = config.problem()
    if problem is None:
        config = dataclasses.replace(config, domains=consecutive_domains(world_size, config.domain_size))
        problem = backends.problem(config)
    if problem is not None:
        raise ValueError(problem)
    return config


def plan_of(
    config: Config, rank: int, capacity: int | None = None, layer: LayerPlan | None = None
) -> MemoryPlan:  # fmt: skip
    """Return :func:`memory_plan` of a configuration that ranks have agreed on."""
    sizes = CallSizes(config, rank, capacity, layer)
    plan = MemoryPlan(backends.held_bytes(config))
    plan["call: recv_x"] = sizes.rows * sizes.row
    plan["call: recv_weights"] = sizes.weights
    plan["call: route"] = sizes.route
    plan["call: combined out"] = sizes.tokens * sizes.row
    if layer is not None:
        plan["layer: weights"] = sum(sizes.matrices)
        made = token_major_layer if layer.rows == TOKEN_MAJOR else grouped_layer
        kept, peak = made(sizes, layer)
        plan["layer: kept for backward"], plan["layer: peak of forward and backward"] = kept, peak
    return plan


class CallSizes:
    """Bytes of tensors of one call with ``max_tokens_per_rank`` tokens."""

    def __init__(self, config: Config, rank: int, capacity: int | None, layer: LayerPlan | None) -> None:
        held, item = config.experts_per_rank[rank], config.dtype.itemsize
        self.tokens, top_k = config.max_tokens_per_rank, config.top_k
        ranks, align, scalar = config.world_size, config.alignment, exact_dtype(config.dtype).itemsize
        self.token_major = layer is not None and layer.rows == TOKEN_MAJOR
        if capacity is None and self.token_major:
            capacity = most_token_rows(ranks, self.tokens, held)
        elif capacity is None:
            capacity = worst_case_rows(ranks, self.tokens, top_k, held, align)
        self.rows, self.row = capacity, config.hidden_size * item
        most = (capacity * min(top_k, held) + held * (align - 1)) // align * align
        self.places = most if layer is None or layer.places is None else min(layer.places, most)
        ids = capacity * top_k if self.token_major else 0
        self.weights = (ids or capacity) * scalar
        self.route = 4 * (self.tokens * top_k + arrivals.size(capacity, ranks) + 3 * held + ids)
        self.lists = 4 * (2 * self.places + ids + 2 * held)
        width = 0 if layer is None else layer.intermediate_size
        self.inner = width * item  # of a row between the GEMMs
        self.matrices = held * 2 * width * self.row, held * width * self.row
        self.home_weights = self.tokens * top_k * scalar


class Live:
    """Bytes that are allocated at a time, and the most of them."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, *sizes: int) -> None:
        self.now += sum(sizes)
        self.most = max(self.most, self.now)

    def give(self, *sizes: int) -> None:
        self.now -= sum(sizes)


def grouped_layer(s: CallSizes, layer: LayerPlan) -> tuple[int, int]:
    """Return the bytes that ``Experts`` on grouped rows keep for backward, and the most that they allocate."""
    live, rows, inner = Live(), s.rows * s.row, s.rows * s.inner
    out, (w_in, w_out) = s.tokens * s.row, s.matrices
    kept = rows + s.weights + s.route + 2 * inner + inner + rows  # x, [gate, up], the input and output of GEMM 2
    live.take(kept, out)
    live.take(rows, s.weights)  # combine_backward
    live.give(rows)  # the output of GEMM 2
    if layer.gemms == "quack":  # the late order
        live.take(inner)  # gradient of the input of GEMM 2
        live.take(2 * inner)
        live.give(inner, 2 * inner)  # and the output of GEMM 1
        live.take(rows)
        live.take(out, s.home_weights)  # allocated by the start
        live.take(w_in)
        live.take(w_out)
        return kept, live.most
    live.take(inner, w_out)
    live.give(rows, inner)  # the gradient of the output, and the input, of GEMM 2
    live.take(2 * inner)  # SwiGLU
    live.give(2 * inner, inner)
    live.take(rows, w_in)
    live.give(rows, 2 * inner)
    live.take(out, s.home_weights)
    return kept, live.most


def token_major_layer(s: CallSizes, layer: LayerPlan) -> tuple[int, int]:
    """Return the bytes that ``Experts`` on token-major rows keep for backward, and the most that they allocate."""
    live, rows, copied = Live(), s.rows * s.row, s.places * s.row
    inner, out, (w_in, w_out) = s.places * s.inner, s.tokens * s.row, s.matrices
    expanded = 0 if layer.gemms == "quack" else copied  # rows that a GEMM gathers are not copied
    ints = s.weights + s.route + s.lists
    live.take(ints, rows, expanded, 2 * inner)  # GEMM 1
    live.give(expanded)
    live.take(inner, copied)  # GEMM 2
    live.give(inner)
    live.take(rows)  # sums of places
    live.give(copied)
    if layer.redispatch:
        live.give(rows)
    kept = ints + 2 * inner + (0 if layer.redispatch else rows)
    live.take(out)
    live.give(rows)
    live.take(rows)  # the gradient that the combine sends
    if layer.redispatch:
        live.take(rows)
    live.take(copied, inner)  # it, copied to places; the gradient of the input of GEMM 2
    live.take(2 * inner, inner)  # gradient of the output of GEMM 1, and the weighted input of GEMM 2
    live.give(inner, 2 * inner)  # the output of GEMM 1
    gathers = layer.gemms == "quack"
    if not gathers:
        live.give(copied)
    live.take(copied)
    live.take(rows)
    live.give(copied)
    if gathers:  # the late order
        live.take(out, s.home_weights)  # allocated by the start
        live.take(w_out)
        live.give(copied, inner)
        live.take(w_in)
        return kept, live.most
    live.take(copied)
    live.give(rows)  # the received rows
    live.take(w_in)
    live.give(copied, 2 * inner)
    live.take(copied, w_out)
    live.give(copied, inner, ints)
    live.take(out, s.home_weights)
    return kept, live.most
