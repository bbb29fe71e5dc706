"""`Communicator`: configuration, backend and lifetime of what the operators of a process group share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import backends, checks, inputs, registry
from .arguments import device_of, group_of, large_rows, mesh_of, next_name
from .backends.base import Backend
from .config import Config, configured
from .formats import exact_dtype, format_of, layout_of
from .group import leaving
from .group.agreement import agree
from .group.exchange import Exchange
from .group.survivors import ExpertIds
from .group.topology import gpu_problem, multiprocessors, rails_of
from .memory import MemoryPlan, plan_of
from .methods import Methods
from .overflow import Overflow
from .records import Operation

_shared: dict[tuple[Any, ...], Communicator] = {}


class Communicator(Methods):
    """Expert-parallel dispatch and combine over the ranks of one process group.

    A communicator holds the configuration, the symmetric memory and the kernels that its operators use. It lives until
    :meth:`destroy` is called or its ``with`` block ends. Several may live at once; one serves any number of layers.

    Creating and destroying a communicator and calling its operators are collective: every rank of the group does so in
    the same order. If one rank passes an argument with a wrong dtype, shape or value, every rank raises the same reason
    (on the cute backend the other ranks raise it at their next call) and the communicator stays usable.

    Args:
        group: process group or one-dimensional DeviceMesh. None: the default group, or this process alone if
            torch.distributed is not initialized.
        config: the options, which must be equal on all ranks. They can also be passed as keyword arguments:
            ``Communicator(group, num_experts=64, hidden_size=2048, top_k=8, max_tokens_per_rank=4096)``. Given both,
            keyword arguments replace fields of ``config``. :class:`ep_ops.Config` describes every option.
        device: device of this rank. None: the current CUDA device if there is one, else the CPU.

    Attributes:
        config (Config): the options, with what the ranks agreed on: backend, NVLink domains, experts of each rank.
        name (str): name by which operators find this communicator.
        group: the process group; None for this process alone, and once destroyed.
        rank (int): rank of this process in the group.
        world_size (int): number of ranks.
        device (torch.device): device of this rank.
        num_experts (int): number of experts of all ranks.
        experts_per_rank (tuple[int, ...]): number of experts of each rank.
        num_local_experts (int): number of experts of this rank.
        first_local_expert (int): global id of this rank's first expert. Its others follow.
        hidden_size (int): elements of a row.
        top_k (int): number of experts that a token names.
        max_tokens_per_rank (int): the largest number of tokens that a rank passes in one call.
        dtype (torch.dtype): dtype of the rows.
        weights_dtype (torch.dtype): dtype of routing weights: float32, or float64 if ``dtype`` is float64.
        alignment (int): default for the number of rows that each expert's segment is padded to a multiple of.
        domains (tuple[tuple[int, ...], ...]): ranks of each NVLink domain.
        rails (tuple[tuple[int, ...], ...]): ranks with the same index in each NVLink domain.
        backend: what runs the operators; ``backend.name`` is "cute" or "reference".
        destroyed (bool): whether :meth:`destroy` has been called.

    Raises:
        TypeError: options are unknown or missing, or ``group`` or ``config`` has another type.
        ValueError: a value is not allowed on some rank, options differ between ranks, or backend "cute" cannot run.
            Every rank raises the same text, which names the option, its values and the ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        config: Config | None = None,
        *,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> None:
        given = configured("Communicator", config, options)
        self._mesh = mesh_of(group)
        self.group = group_of(group)
        self.device, unusable = device_of(device)
        self.multiprocessors = multiprocessors(self.device)  # before torch changes contexts
        self._exchange = Exchange(self.group, self.device)
        self.rank, self.world_size = self._exchange.rank, self._exchange.world_size
        own = given.on(self.world_size, device_type=self.device.type, name=given.name or next_name(self.group))
        self.config = self._agree(own, unusable)
        self._set_sizes()
        self.destroyed = False
        self.members = (0,) if self.group is None else tuple(dist.get_process_group_ranks(self.group))  # global ranks
        self.expert_ids: ExpertIds | None = None
        self.warned_rows = large_rows(self.device, self.hidden_size * self.dtype.itemsize)
        self.overflowed: Overflow | None = None
        if self.config.overflow == "raise":
            self.overflowed = Overflow(self.num_local_experts, self.first_local_expert, self.device)
        self.number = leaving.agreed_number(self._exchange)
        self.backend: Backend = backends.make(self.config.backend, self)
        registry.add(self)

    def _agree(self, own: Config, unusable: str | None) -> Config:
        """Compare configurations with the other ranks and return what was agreed on (``ep_ops.group.agreement``)."""
        problem = unusable or _problem_of(own, self.device, self.multiprocessors)
        unfit = _unfit(own, self.device, self.multiprocessors) if problem is None else None
        lack = functools.partial(backends.lack, multiprocessors=self.multiprocessors)
        return agree(self._exchange, own, problem, unfit, lack)

    def _set_sizes(self) -> None:
        """Copy what calls read to attributes of this object, where they are found fastest."""
        config = self.config
        self.name = config.name
        self.num_experts, self.experts_per_rank = config.num_experts, config.experts_per_rank
        self.first_expert = tuple(itertools.accumulate((0, *self.experts_per_rank)))[:-1]  # of each rank
        self.num_local_experts = self.experts_per_rank[self.rank]
        self.first_local_expert = self.first_expert[self.rank]
        self.hidden_size, self.top_k = config.hidden_size, config.top_k
        self.max_tokens_per_rank, self.alignment = config.max_tokens_per_rank, config.alignment
        self.dtype, self.weights_dtype = config.dtype, exact_dtype(config.dtype)
        self.symmetric_rows, self.strict = config.symmetric_rows, config.strict
        self.domains, self.rails = config.domains, rails_of(config.domains)
        self.plan_args = self.num_local_experts, self.world_size, self.name  # arguments of operators that plan
        self.accepted: set[tuple[int, ...]] = set()

    @classmethod
    def shared(
        cls,
        group: dist.ProcessGroup | None = None,
        config: Config | None = None,
        *,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> Communicator:
        """Return the living communicator that this method made with equal arguments, or a new one.

        For models of many layers, which should share one communicator: each holds memory, and functions are compiled
        anew for each. It lives until it is destroyed.

        Args:
            group, config, device, options: as for :class:`Communicator`.
        """
        key = group_of(group), configured("Communicator.shared", config, options), device
        found = _shared.get(key)
        if found is None or found.destroyed:
            found = _shared[key] = cls(group, key[1], device=device)
        return found

    def __copy__(self) -> Communicator:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Copies of a model (for an average of its weights, say) use the communicator that it uses."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """In the process that reads it: the living communicator of that name."""
        return registry.get, (self.name,)

    def expert_mesh(self) -> DeviceMesh | None:
        """Return the one-dimensional DeviceMesh over which experts are sharded, None for a communicator of one rank.

        It is the mesh that was given as ``group`` (``mesh["ep"]``), or one over the ranks of the group whose dimension
        is named "ep".
        """
        if self._mesh is None and self.world_size > 1:
            assert self.group is not None
            self._mesh = DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("ep",))
        return self._mesh if self.world_size > 1 else None

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

    @contextlib.contextmanager
    def flights(self) -> Iterator[None]:
        """``with comm.flights(): ...``: a block that leaves no split operation under way if it raises.

        An exception between a start and its wait leaves the flight taken, and the next operation raises, naming the
        wait to call. When an exception leaves this block, the split operations of this communicator that are under way
        are waited for and their results dropped. Put the block around the call of a compiled function and, if gradients
        are computed, around ``backward()``.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError("flights cannot be used inside a compiled function; put the block around its call")
        try:
            yield
        except BaseException:
            if not self.destroyed:
                self.backend.end_flights()
            raise

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
                f"group has global ranks {members}; allowed: some of {list(self.members)}, the ranks of communicator"
                f" {self.name!r}, in that order"
            )
        config, held = self.config, [self.experts_per_rank[rank] for rank in ranks]
        if not sum(held):
            raise ValueError(
                f"group has global ranks {members}, which hold no experts; allowed: at least one rank with experts"
            )
        domain_size = self._domain_size_of(ranks)
        if config.backend == "cute" and config.wire == "nvshmem" and domain_size < len(ranks) < self.world_size:
            raise ValueError(
                f"communicator {self.name!r} uses NVSHMEM, which cannot continue with fewer than"
                f" {self.world_size} ranks; allowed: a group of ranks of one NVLink domain"
            )
        self._destroy(meet=False)
        config = dataclasses.replace(
            config, num_experts=sum(held), experts_per_rank=tuple(held), domain_size=domain_size,
            lost_experts=config.lost_experts + self.num_experts - sum(held),
            name=f"{self.name} of {len(ranks)}" if name is None else name,
        )  # fmt: skip
        left = Communicator(group, config, device=self.device)
        left.expert_ids = ExpertIds.kept(self.experts_per_rank, ranks, self.expert_ids, self.device)
        return left

    def _domain_size_of(self, ranks: Sequence[int]) -> int:
        """The `domain_size` of a communicator of these ranks of this one."""
        left = [sum(rank in ranks for rank in domain) for domain in self.domains]
        sizes = {size for size in left if size}
        if len(sizes) > 1:
            raise ValueError(
                f"group leaves {left} ranks of the NVLink domains {self.domains} of communicator {self.name!r};"
                " allowed: the same number of each, or none"
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
                if not self._has_failed():  # else somebody may never come
                    missing = self._missing()
                unsaid = self.backend.unsaid()
        finally:
            self.backend.destroy(keep=bool(missing))
            self.group = self._exchange.group = None
        if missing and unsaid is None:
            unsaid = (
                f"communicator {self.name!r}: rank {self.rank} destroyed it after waiting {self.config.timeout:g} s"
                f" for ranks {missing}, which did not call destroy"
            )
        if unsaid is not None:
            raise RuntimeError(unsaid)

    def _missing(self) -> list[int]:
        """Ranks that do not come, of those that there still is a way to hear of."""
        if self.world_size == 1 or not dist.is_initialized():
            return []
        return leaving.meet(self.group, self.name, self.number, self.config.timeout, self._has_failed)

    def _has_failed(self) -> bool:
        """Whether the communicator has failed on some rank, as far as is known here."""
        self.backend.listen()
        return self.backend.has_failed()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._destroy(meet=kind is None)  # after an error the other ranks may never come

    def __repr__(self) -> str:
        state = "destroyed" if self.destroyed else self.backend.name
        return f"<ep_ops.Communicator {self.name!r} rank {self.rank}/{self.world_size} {state} on {self.device}>"


def _problem_of(own: Config, device: torch.device, multiprocessors: int) -> str | None:
    """What is wrong with what this rank was given for a communicator; None: nothing."""
    problem = own.problem() or backends.problem(own)
    if problem is None and own.backend == "cute":
        problem = gpu_problem(device) or backends.too_small(own, multiprocessors)
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
