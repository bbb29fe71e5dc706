"""The communicator: sizes, backend and lifetime of everything that the operators of a process group share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import backends, checks, inputs, registry
from .arguments import bundle, checking, device_of, group_of, hashable, large_rows, next_name, wire
from .backends.base import Backend
from .config import Config, even_experts
from .formats import format_of, layout_of
from .group import leaving
from .group.agreement import agree
from .group.exchange import Exchange
from .group.survivors import ExpertIds
from .group.topology import gpu_problem, multiprocessors, rails_of
from .memory import MemoryPlan, plan_of
from .methods import Methods
from .overflow import POLICIES, Overflow
from .records import Operation
from .token_major import TokenMajor
from .version import __version__

_shared: dict[tuple[Any, ...], Communicator] = {}


class Communicator(Methods, TokenMajor):
    """Sizes, backend and symmetric memory that the ``ep`` operators of one process group use.

    Collective: all ranks of ``group`` create it with equal arguments (ValueError on every rank otherwise, naming the
    field, its values and the ranks), call its operators in the same order, and destroy it together. It lives until
    :meth:`destroy` or the end of a ``with`` block; several may live at once. What one rank refuses (a wrong dtype,
    shape or value) is raised there at once and ends that operation on all ranks: the others raise the same reason, on
    the cute backend at their next call, and the communicator can be used as before.

    With ``EP_OPS_CHECK=1`` in the environment of all ranks when it is made, every operation also runs on the reference
    backend over the same group, and a RuntimeError on all ranks names the first number that differs: the operator, how
    many operations there have been, the output and the index in it, both values and the rank. Every operator then waits
    for the device, and CUDA graphs cannot be captured (docs/failures.md).

    Args:
        group: process group, or a DeviceMesh of one dimension. None: the default group, or this process alone if
            torch.distributed is not initialised.
        num_experts: experts of all ranks together (cute: spread evenly, at most 8188 on 2 ranks, 8070 on 72).
        hidden_size: elements of a row; its bytes must be a multiple of 16.
        top_k: experts that a token names, at most 32.
        max_tokens_per_rank: the most tokens that any rank passes in one call.
        dtype: of the rows: bfloat16, float16, float32, or (reference only) float64.
        experts_per_rank: experts of each rank, in contiguous blocks. None: as even as possible, first ranks more.
        alignment: default for the rows that each expert's segment is padded to a multiple of, 1..1024.
        device: None: the current CUDA device if there is one, else the CPU.
        backend: "reference" (any device), "cute" (NVIDIA GPUs: at most 72 of one NVLink domain, which is a host, or
            hosts that an NVLink fabric joins; at most 1024 of several, see docs/domains.md for what they need), or
            "auto": cute where it can run.
        timeout: seconds that a kernel waits for a peer before it gives up and reports; then all ranks give up, and all
            raise who waited for whom. Whoever waits for a tenth of it, or for a minute, is warned of the peer that is
            late. torch.distributed calls of the reference backend follow their process group's timeout instead.
        dispatch_sms, combine_sms: multiprocessors that the kernels may take, as far as the GPU has them (a dispatch
            leaves some to the blocks that work beside it); None: what a model of the bytes says, and more where more
            rows come than to an average rank (``ep_ops.backends.cute.sm_model``). :meth:`sm_budget` changes them for a
            while.
        latency_max_tokens: calls whose ``max_tokens`` is at most this run on the latency kernels (same results to
            the bit; cute backend); 0: never; None: the backend's choice.
        symmetric_rows: the most rows of a :meth:`combine_gathered`, and that :meth:`empty_rows` hands out; their memory
            is held (cute backend).
        strict: the reference backend shows what a GPU would: rows that are undefined hold NaN, and
            :meth:`combine_gathered` needs ``symmetric_rows``. False: zeros, any rows, and starts and
            waits in any order, for tools that compare or copy what is undefined (``torch.library.opcheck``,
            ``torch.export``). The cute backend is always strict.
        domain_size: ranks of each NVLink domain, where domains are to be smaller than what is found: so many
            consecutive ranks of a found one. None: as they are found (GPUs: a host, or hosts that an NVLink fabric
            joins; CPUs: one domain). All domains must have as many ranks. Sums are defined by the domains
            (``ep_ops.backends.reference``).
        staging_bytes: the most bytes of symmetric memory that the kernels may hold (cute backend; ``symmetric_rows``
            are besides), in one NVLink domain as in several. Calls of more tokens than such memory moves at a time go
            in several rounds, at most 64: rows, order and results are the same, to the bit. The latency kernels take no
            more tokens than a round has. None: as many bytes as all of ``max_tokens_per_rank`` take in one round
            (:func:`ep_ops.memory_plan` says how many).
        overflow: what becomes of rows that find no place within ``capacity`` or ``slots``. "count": they are counted
            (``Dispatched.dropped``) and left out. "raise": besides, the next :meth:`check_errors` says how many, and of
            which experts; it then waits for the device.
        name: how operators find this communicator; None: "ep0", "ep1", ... in order of creation.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_experts: int,
        hidden_size: int,
        top_k: int,
        max_tokens_per_rank: int,
        dtype: torch.dtype = torch.bfloat16,
        experts_per_rank: Sequence[int] | None = None,
        alignment: int = 16,
        device: torch.device | str | int | None = None,
        backend: str = "auto",
        timeout: float = 900.0,
        dispatch_sms: int | None = None,
        combine_sms: int | None = None,
        latency_max_tokens: int | None = None,
        symmetric_rows: int = 0,
        strict: bool = True,
        domain_size: int | None = None,
        staging_bytes: int | None = None,
        overflow: str = "count",
        name: str | None = None,
    ) -> None:
        self.group = group = group_of(group)
        self.device, unusable = device_of(device)
        self.multiprocessors = multiprocessors(self.device)  # before torch changes contexts
        exchange = Exchange(group, self.device)
        self.rank, self.world_size = exchange.rank, exchange.world_size
        if experts_per_rank is None:
            experts_per_rank = even_experts(num_experts, self.world_size) if isinstance(num_experts, int) else ()
        self.name = next_name(group) if name is None else name
        sequence = isinstance(experts_per_rank, Sequence)
        own = Config(
            name=self.name, world_size=self.world_size, num_experts=num_experts, hidden_size=hidden_size, top_k=top_k,
            max_tokens_per_rank=max_tokens_per_rank, dtype=dtype,
            experts_per_rank=tuple(experts_per_rank) if sequence else (), alignment=alignment, backend=backend,
            device_type=self.device.type, timeout=timeout, dispatch_sms=dispatch_sms, combine_sms=combine_sms,
            latency_max_tokens=latency_max_tokens, symmetric_rows=symmetric_rows, strict=bool(strict),
            version=__version__, check=checking(), domain_size=domain_size, wire=wire(), staging_bytes=staging_bytes,
            bundle=bundle(),
        )  # fmt: skip
        if sequence:
            problem = unusable or _problem_of(own, self.device, self.multiprocessors, overflow)
        else:
            problem = (
                f"experts_per_rank is {experts_per_rank!r}; it must hold one int for each rank, as [4] * world_size"
            )
        unfit = _unfit(own, self.device, self.multiprocessors) if problem is None else None
        lack = functools.partial(backends.lack, multiprocessors=self.multiprocessors)
        resolved = agree(exchange, own, problem, unfit, lack)

        self.num_experts = num_experts
        self.experts_per_rank = own.experts_per_rank
        self.first_expert = tuple(itertools.accumulate((0, *self.experts_per_rank)))[:-1]  # of each rank
        self.num_local_experts = self.experts_per_rank[self.rank]
        self.first_local_expert = self.first_expert[self.rank]
        self.hidden_size = hidden_size
        self.top_k = top_k
        self.max_tokens_per_rank = max_tokens_per_rank
        self.dtype = dtype
        self.weights_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.alignment = alignment
        self.timeout = float(timeout)
        self.dispatch_sms = dispatch_sms
        self.combine_sms = combine_sms
        self.symmetric_rows = symmetric_rows
        self.staging_bytes = staging_bytes
        self.strict = bool(strict)
        self.domains = resolved.domains  # the ranks of each NVLink domain
        self.rails = rails_of(resolved.domains)  # the ranks with the same index in each
        self.place = self.num_local_experts, self.world_size, self.name  # what operators that plan are told
        self.accepted: set[tuple[int, ...]] = set()
        self.config = resolved
        self.destroyed = False
        self.members = (0,) if group is None else tuple(dist.get_process_group_ranks(group))  # as global ranks
        self.expert_ids: ExpertIds | None = None
        self.warned_rows = large_rows(self.device, hidden_size * dtype.itemsize)
        self.overflow = overflow
        self.overflowed: Overflow | None = None
        if overflow == "raise":
            self.overflowed = Overflow(self.num_local_experts, self.first_local_expert, self.device)
        self._exchange = exchange
        self._leaving = leaving.agreed_number(exchange)
        self.backend: Backend = backends.make(resolved.backend, self)
        registry.add(self)

    @classmethod
    def shared(cls, group: dist.ProcessGroup | None = None, **sizes: Any) -> Communicator:
        """The living communicator that was made by this method with the same arguments, or a new one, which lives until
        it is destroyed. For models of many layers: they need one communicator, not one a layer (each has memory, and
        compiled functions are made anew for each)."""
        key = (group_of(group), *sorted((name, hashable(value)) for name, value in sizes.items()))
        found = _shared.get(key)
        if found is None or found.destroyed:
            found = _shared[key] = cls(group, **sizes)
        return found

    def __copy__(self) -> Communicator:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Copies of a model (for an average of its weights, say) use the communicator that it uses."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """In the process that reads it: the living communicator of that name."""
        return registry.get, (self.name,)

    def empty_rows(self, num_rows: int) -> Tensor:
        """[num_rows, H] to write experts' outputs to, for :meth:`combine_gathered`; what it holds is undefined.

        Every call hands out the same memory, and every combine_gathered of other rows overwrites it. It may be written
        again as soon as a combine_gathered of it has been called. Call it in eager code (CUDA graphs may be captured);
        in compiled code combine_gathered takes the rows, and the compiler sees to where they are written.
        ValueError if there are not so many ``symmetric_rows``; ranks may ask for different numbers.
        """
        refuse_destroyed(self)
        checks.empty_rows(self, num_rows)
        return self.backend.empty_rows(num_rows)

    def sm_budget(
        self, *, dispatch: int | None = None, combine: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """``with comm.sm_budget(dispatch=16, combine=32): ...``: multiprocessors for the operators that run inside.

        None leaves that one as it is. The backward of a dispatch is a combine, and the other way round: put
        ``backward()`` inside as well if it is meant. Blocks nest; what was before comes back at the end. It is
        state of this process, not part of the program: ranks may differ, a compiled function reads it when it runs
        (so put the block around the call; inside a function that is compiled with ``fullgraph=True`` it is an error),
        and a captured CUDA graph replays with what held during the capture. The latency kernels follow no budget,
        the reference backend ignores it. ValueError for less than 1 (dispatch) or 2 (combine), and for more than the
        GPU has to give. What is set is a limit: a rank with more rows than others takes no more either.
        """
        return self.backend.budget.changed(dispatch, combine)

    # ------------------------------------------------------------------ lifetime

    def memory_plan(self) -> MemoryPlan:
        """Bytes that this rank takes (see :func:`ep_ops.memory_plan`)."""
        return plan_of(self.config, self.rank)

    def warmup(self, formats: Sequence[tuple[str, str]] = ()) -> None:
        """Compile and load every kernel. Collective; call it before capturing a CUDA graph.

        ``formats``: those that dispatches will name besides, each with its ``scales_as``, such as ("e4m3/128/pow2",
        "columns"); kernels of others are compiled when they are first called. ValueError for a name that is none.
        """
        for one in formats:
            if isinstance(one, str) or len(one) != 2:
                raise ValueError(
                    f"formats has {one!r}; allowed: pairs of format and scales_as, as ('e4m3/128/pow2', 'columns')"
                )
        for name, scales_as in formats:
            layout_of(format_of(name), scales_as)
        refuse_destroyed(self)
        self.backend.compile(formats)
        self._exchange.barrier()  # compiling takes ranks unequally long, and kernels wait for each other
        self.backend.warmup()
        self._exchange.barrier()

    def check_errors(self) -> None:
        """Raises what kernels have reported; does not wait for running ones.

        RuntimeError: a wait that failed (destroy the communicator then). ValueError: an expert id out of range, or rows
        that did not fit where ``overflow`` is "raise" (this one looks at what has run, hence waits for the device).
        """
        if not self.destroyed:
            self.backend.listen()
        if not self.destroyed or self.backend.has_failed():  # else what would be told has gone with the memory
            self.backend.check_errors()
        if self.overflowed is not None:
            self.overflowed.check(self.name, self.rank)

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Has ``callback`` called with the text of the failure that ends this communicator, if there is one, within a
        tenth of a second and from another thread: for servers that replay CUDA graphs and call nothing else. (A rank
        that launches nothing is called when it calls :meth:`check_errors`.) The next call raises that text all the
        same. ``lambda text: os.abort()`` ends the process. (cute backend; the reference backend raises at once.)"""
        self.backend.call_on_failure(callback)

    def last_operations(self, rank: int | None = None) -> list[Operation]:
        """The last 16 operations that a rank (this one by default) has begun, the last one first: to see where it is
        when something hangs. A call that goes in rounds (``staging_bytes``) is an operation for each of them, and one
        more where it tells the route. Does not wait for what runs, here or there. (cute backend; the reference backend
        notes none.) The text of a failure has the last three of the ranks concerned."""
        refuse_destroyed(self)
        rank = self.rank if rank is None else rank
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank is {rank}; allowed: 0..{self.world_size - 1}")
        return self.backend.last_operations(rank)

    def shrink(self, group: dist.ProcessGroup, *, name: str | None = None) -> Communicator:
        """A communicator of those ranks that are left, where others have died. Collective over ``group``, which has
        some ranks of this one's, in their order, equally many of each NVLink domain that has any left;
        ``torch.distributed.new_group(ranks, use_local_synchronization=True)`` makes one without the dead, as long as
        the store lives (torchrun's lies with rank 0's host).

        Every rank keeps its experts, and its methods take the ids that this one's take: those of experts that are gone
        count as -1, and :meth:`lost_rows` says how many. Operators that are called by their names take its own ids,
        which number what is left. Compiled functions and CUDA graphs hold on to this communicator, which is destroyed
        here, without waiting for anybody: compile and capture anew. ``name``: by default this one's, and the number of
        ranks ("ep0 of 7").
        """
        members = dist.get_process_group_ranks(group_of(group))
        ranks = [self.members.index(member) for member in members if member in self.members]
        if len(ranks) != len(members) or ranks != sorted(ranks):
            raise ValueError(
                f"group has global ranks {members}; allowed are some of {list(self.members)}, the ranks of communicator"
                f" {self.name!r}, in that order"
            )
        config, held = self.config, [self.experts_per_rank[rank] for rank in ranks]
        if not sum(held):
            raise ValueError(f"no experts are left: ranks {members} hold none")
        domain_size = self._domain_size_of(ranks)
        if config.backend == "cute" and config.wire == "nvshmem" and domain_size < len(ranks) < self.world_size:
            raise ValueError(
                f"communicator {self.name!r} reaches other NVLink domains through NVSHMEM, of which a process has one,"
                f" of {self.world_size} ranks; allowed: a group of ranks of one domain"
            )
        self._destroy(meet=False)
        left = Communicator(
            group, num_experts=sum(held), experts_per_rank=held, hidden_size=self.hidden_size, top_k=self.top_k,
            max_tokens_per_rank=self.max_tokens_per_rank, dtype=self.dtype, alignment=self.alignment,
            device=self.device, backend=config.backend, timeout=self.timeout, dispatch_sms=self.dispatch_sms,
            combine_sms=self.combine_sms, latency_max_tokens=config.latency_max_tokens,
            symmetric_rows=self.symmetric_rows, strict=self.strict, domain_size=domain_size,
            staging_bytes=self.staging_bytes, overflow=self.overflow,
            name=f"{self.name} of {len(ranks)}" if name is None else name,
        )  # fmt: skip
        left.expert_ids = ExpertIds.kept(self.experts_per_rank, ranks, self.expert_ids, self.device)
        return left

    def _domain_size_of(self, ranks: Sequence[int]) -> int:
        """The `domain_size` of a communicator of these ranks of this one."""
        left = [sum(rank in ranks for rank in domain) for domain in self.domains]
        sizes = {size for size in left if size}
        if len(sizes) > 1:
            raise ValueError(
                f"group leaves {left} ranks of the NVLink domains {self.domains} of communicator {self.name!r}; it must"
                " leave equally many of each, or none"
            )
        return sizes.pop()

    def lost_rows(self, topk_idx: Tensor) -> Tensor:
        """How many entries of ``topk_idx`` name an expert that is gone (:meth:`shrink`): int64 [], on the device."""
        if self.expert_ids is None:
            return torch.zeros((), dtype=torch.int64, device=topk_idx.device)
        return self.expert_ids.lost(inputs.ids(topk_idx))

    def destroy(self) -> None:
        """Free everything. Collective: waits for the other ranks first, for ``timeout`` seconds at most. Calling it
        again does nothing.

        Does not wait when the communicator has failed, or when the process group or its store is gone already.
        RuntimeError with what it failed of, if nothing has raised that yet, or with the ranks that did not come.
        """
        self._destroy(meet=True)

    def _destroy(self, meet: bool) -> None:
        if self.destroyed:
            return
        self.destroyed = True
        registry.remove(self.name)
        unsaid = None
        missing: list[int] = []
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # our own kernels have ended: their waits have deadlines
            if meet:
                self.backend.listen()
                unsaid = self.backend.unsaid()
                if not self.backend.has_failed():  # else somebody may never come
                    missing = self._missing()
        finally:
            self.backend.destroy(keep=bool(missing))
            self.group = self._exchange.group = None
        if missing:
            unsaid = (
                f"communicator {self.name!r}: rank {self.rank} destroyed it, and waited {self.timeout:g} s for ranks"
                f" {missing}, which did not come"
            )
        if unsaid is not None:
            raise RuntimeError(unsaid)

    def _missing(self) -> list[int]:
        """Ranks that do not come, of those that there still is a way to hear of."""
        if self.world_size == 1 or not dist.is_initialized():
            return []
        return leaving.meet(self.group, self.name, self._leaving, self.timeout)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._destroy(meet=kind is None)  # after an error the other ranks may never come

    def __repr__(self) -> str:
        state = "destroyed" if self.destroyed else self.backend.name
        return f"<ep_ops.Communicator {self.name!r} rank {self.rank}/{self.world_size} {state} on {self.device}>"


def _problem_of(own: Config, device: torch.device, multiprocessors: int, overflow: str) -> str | None:
    """What is wrong with what this rank was given for a communicator; None: nothing."""
    problem = own.problem() or backends.problem(own)
    if problem is None and own.backend == "cute":
        problem = gpu_problem(device) or backends.too_small(own, multiprocessors)
    if problem is None and overflow not in POLICIES:
        problem = f"overflow is {overflow!r}; it must be one of {', '.join(map(repr, POLICIES))}"
    if problem is None and registry.taken(own.name):
        problem = f"communicator {own.name!r} exists already; destroy it first or choose another name"
    return problem


def _unfit(own: Config, device: torch.device, multiprocessors: int) -> str | None:
    """What of right values "cute" does not take where "auto" was asked for; None: nothing."""
    if own.backend != "auto":
        return None
    unfit = backends.problem(dataclasses.replace(own, backend="cute"))
    if unfit is None and device.type == "cuda":
        unfit = backends.too_small(own, multiprocessors)
    return unfit


def refuse_destroyed(comm: Communicator) -> None:
    """RuntimeError for a communicator that was destroyed, whose ranks no longer meet."""
    if comm.destroyed:
        raise RuntimeError(f"communicator {comm.name!r} was destroyed")
