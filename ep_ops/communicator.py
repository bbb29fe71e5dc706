"""The class ``Communicator``: configuration, creation and destruction of the state that operators share."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import backends, checks, inputs, registry
from .arguments import device_of, group_of, large_rows
from .backends.base import Backend
from .backends.calls import CallCache
from .config import Config, ConfigOptions, configured, signature
from .creation import agreed_config, reserve_name
from .formats import exact_dtype
from .group import leaving, meeting
from .group.exchange import Exchange
from .group.survivors import ExpertIds, survivors_of
from .group.topology import multiprocessors, rails_of
from .memory import MemoryPlan, plan_of
from .methods import Methods
from .operators.rejection import of_two_threads, take
from .overflow import Overflow
from .records import Operation, whole
from .registry import reject_destroyed
from .statistics import Lateness, Statistics
from .statistics.counts import Counts
from .statistics.lateness import lateness

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("ep_ops")

_shared: dict[tuple[Any, ...], Communicator] = {}
_sharing = threading.RLock()  # held while one of a single process is looked up or created


class Communicator(Methods):
    """Expert-parallel dispatch and combine over the ranks of one process group.

    A communicator holds the configuration, the symmetric memory and the kernels that its operators use. It lives until
    :meth:`destroy` is called or its ``with`` block ends. A process can have several communicators, and any number of
    layers can share one.

    Creating a communicator, destroying it, and calling its operators are collective: every rank of the group does this
    in the same order. If one rank passes an argument with a wrong dtype, shape or value, every rank raises the same
    reason (on the cute backend the other ranks raise it in their next call), and the communicator remains usable.

    Shapes use these letters: T tokens of this rank, H hidden size, K experts for each token, R received rows, El
    experts of this rank.

    Args:
        group: process group or one-dimensional DeviceMesh. None: the default group, or this process alone if
            torch.distributed is not initialized.
        config: options, which must be equal on all ranks. They can also be passed as keyword arguments:
            ``Communicator(group, num_experts=64, hidden_size=2048, top_k=8, max_tokens_per_rank=4096)``. If both are
            given, keyword arguments replace fields of ``config``. :class:`ep_ops.Config` describes every option.
        device: device of this rank. None: the current CUDA device if there is one, else the CPU.

    Attributes:
        config (Config): the options, including the values on which the ranks agreed: backend, NVLink domains, and the
            number of experts on each rank.
        name (str): name by which operators find this communicator.
        group: the process group. None if the communicator consists of this process alone, or has been destroyed.
        rank (int): rank of this process in the group.
        world_size (int): number of ranks.
        device (torch.device): device of this rank.
        num_experts (int): number of experts of all ranks.
        experts_per_rank (tuple[int, ...]): number of experts of each rank.
        num_local_experts (int): number of experts of this rank.
        first_local_expert (int): global id of this rank's first expert. The ids of its experts are consecutive.
        hidden_size (int): H, the number of elements of a row.
        top_k (int): K, the number of experts for each token.
        max_tokens_per_rank (int): the largest number of tokens that a rank may pass in one call.
        dtype (torch.dtype): dtype of the rows.
        weights_dtype (torch.dtype): dtype of routing weights: float32, or float64 if ``dtype`` is float64.
        alignment (int): default alignment. The rows of each expert are padded to a multiple of this number.
        domains (tuple[tuple[int, ...], ...]): ranks of each NVLink domain.
        rails (tuple[tuple[int, ...], ...]): ranks with the same index in each NVLink domain.
        backend: the implementation of the operators. ``backend.name`` is "cute" or "reference".
        destroyed (bool): whether :meth:`destroy` has been called.

    Raises:
        TypeError: an option is unknown or missing, or ``group`` or ``config`` has the wrong type. A wrong ``group``
            raises an error on this rank alone, because ``group`` is what names the ranks to inform; ranks that passed a
            process group wait for this rank until the timeout of that group.
        ValueError: an option of some rank has a value that is not allowed, options differ between ranks, or backend
            "cute" cannot run. Every rank raises the same text, which names the option, its values and the ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        config: Config | None = None,
        *,
        device: torch.device | str | int | None = None,
        **options: Unpack[ConfigOptions],
    ) -> None:
        self._mesh = _mesh_of(group)
        self.group = group_of(group)
        self.device, self.multiprocessors = torch.device("cpu"), 0
        self.exchange = Exchange(self.group, self.device)
        self.rank, self.world_size = self.exchange.rank, self.exchange.world_size
        own, error = None, None
        try:
            given = configured("Communicator", config, options)
            self.device = device_of(device)
            self.multiprocessors = multiprocessors(self.device)  # before torch changes the context
            own = given.on(self.world_size, device_type=self.device.type)
        except Exception as caught:  # raised after the other ranks have been informed
            error = caught
        self.exchange = Exchange(self.group, self.device)
        with self.exchange.turn:
            meeting.meet(self.exchange, "create Communicator")
            agreed = agreed_config(self.exchange, own, error, self.multiprocessors)
            self.number, name = leaving.agreed_number(self.exchange), reserve_name(self.exchange, agreed.name)
            try:
                self._allocate(dataclasses.replace(agreed, name=name))
            finally:
                registry.release(name)

    def _allocate(self, config: Config) -> None:
        """Create the backend for the configuration on which the ranks have agreed."""
        self.config = config
        self._set_sizes()
        self.destroyed = False
        self.busy = threading.RLock()  # held by the thread that calls this communicator
        self.members = (0,) if self.group is None else tuple(dist.get_process_group_ranks(self.group))  # global ranks
        self.expert_ids: ExpertIds | None = None
        self.warned_rows = large_rows(self.device, self.hidden_size * self.dtype.itemsize)
        self.overflowed: Overflow | None = None
        if self.config.overflow == "raise":
            self.overflowed = Overflow(self.num_local_experts, self.first_local_expert, self.device)
        self.counts: Counts | None = None
        if self.config.statistics:
            sizes = self.hidden_size, self.dtype, self.num_local_experts, self.world_size
            self.counts = Counts(*sizes, self.device)
        self.backend: Backend = backends.make(self.config.backend, self)
        self.calls = CallCache()
        registry.add(self)
        held = sum(backends.held_bytes(self.config).values())
        logger.info(
            "communicator %s: rank %d of %d, backend %s, %d bytes of device memory",
            self.name, self.rank, self.world_size, self.backend.name, held,
        )  # fmt: skip

    __signature__: ClassVar[inspect.Signature] = signature(__init__)  # for help() and notebooks

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
        self.layers = itertools.count()  # numbers of the layers that use this communicator, in the order of creation

    @classmethod
    def shared(
        cls,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        config: Config | None = None,
        *,
        device: torch.device | str | int | None = None,
        **options: Unpack[ConfigOptions],
    ) -> Communicator:
        """Return the living communicator that this method created with equal arguments, or create one.

        Collective. Use it for models whose layers are created independently. Layers should share a communicator,
        because each one allocates memory, and functions are compiled again for it. The result lives until
        :meth:`destroy` is called.

        Args:
            group, config, device, options: as for :class:`Communicator`.

        Returns:
            A communicator, which other callers may share.

        Raises:
            TypeError, ValueError: as for :class:`Communicator`.
        """
        try:
            given = configured("Communicator.shared", config, options)
            members = group_of(group)
            key = members, _mesh_of(group), device, given
            found = _shared.get(key)
        except Exception:  # creation raises the error on all ranks
            return cls(group, config, device=device, **options)
        if found is None or found.destroyed:
            with _sharing if members is None else Exchange(members, torch.device("cpu")).turn:
                found = _shared.get(key)  # another thread may have created it
                if found is None or found.destroyed:
                    found = _shared[key] = cls(group, given, device=device)
        return found

    def __copy__(self) -> Communicator:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        """Return this communicator, so that copies of a model use the communicator of the original."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name: unpickling returns the living communicator of that name in that process."""
        return registry.get, (self.name,)

    def expert_mesh(self) -> DeviceMesh | None:
        """Return the one-dimensional DeviceMesh over which experts are sharded.

        Returns:
            The mesh that was passed as ``group``, if its dimension has a name (such as ``mesh["ep"]``). Otherwise a
            mesh over the ranks of the group, whose dimension is named "ep". None for a communicator of one rank.
        """
        if self._mesh is None and self.world_size > 1:
            assert self.group is not None
            self._mesh = DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("ep",))
        return self._mesh if self.world_size > 1 else None

    def empty_rows(self, num_rows: int) -> Tensor:
        """Return symmetric memory for the outputs of experts, to be passed to :meth:`combine_gathered`.

        Every call returns the same memory. You may write to it again as soon as you have called
        :meth:`combine_gathered` with it. A call of :meth:`combine_gathered` with rows in other memory overwrites it.
        Call this method in eager code, which CUDA graphs may capture. In compiled code, call :meth:`combine_gathered`
        with any rows; the compiler places them in symmetric memory.

        Args:
            num_rows: number of rows, 0 to ``symmetric_rows``. Ranks may pass different numbers.

        Returns:
            Tensor [num_rows, H] in the communicator's dtype, with undefined contents.

        Raises:
            ValueError: ``num_rows`` exceeds ``symmetric_rows``.
            RuntimeError: the communicator was destroyed.
        """
        reject_destroyed(self)
        checks.empty_rows(self, num_rows)
        return self.backend.empty_rows(num_rows)

    def sm_budget(
        self, *, dispatch: int | None = None, combine: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Limit the multiprocessors (SMs) of the operators that run inside a ``with`` block.

        Usage: ``with comm.sm_budget(dispatch=16, combine=32): ...``. Blocks can be nested; at the end of a block the
        previous limits apply again. To limit the operators of the backward pass too, call ``backward()`` inside a
        block. The backward of a dispatch is a combine, and vice versa.

        The limit applies to this process, and ranks may use different limits. A compiled function reads the limit when
        it runs, so put the block around the call. A CUDA graph uses the limit that was in effect during its capture.
        The limit also applies on a rank that receives more rows than others. Latency kernels and the reference backend
        ignore it.

        Args:
            dispatch: largest number of SMs for a dispatch, at least 1. None: unchanged.
            combine: largest number of SMs for a combine, at least 2. None: unchanged.

        Raises:
            ValueError: a value is out of range for this GPU.
            RuntimeError: the block is inside a function that is compiled with ``fullgraph=True``.
        """
        return self.backend.budget.changed(dispatch, combine)

    @contextlib.contextmanager
    def flights(self) -> Iterator[None]:
        """Finish the split operations that are in progress when an exception leaves the ``with`` block.

        Usage: ``with comm.flights(): ...``. Without this block, an exception between a start and its wait leaves the
        flight in use, and the next operation raises an error that names the wait to call. With it, the operations of
        this communicator are waited for, and their results are dropped. Put the block around the call of a compiled
        function and, if gradients are computed, around ``backward()``. docs/overlap.md explains flights.

        Raises:
            RuntimeError: the block is inside a function that is compiled with ``fullgraph=True``.
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
        """Return the bytes that this rank allocates, by purpose.

        Returns:
            See :func:`ep_ops.memory_plan`.
        """
        return plan_of(self.config, self.rank)

    def warmup(self, formats: Sequence[tuple[str, str]] = ()) -> None:
        """Compile and load every kernel. Collective. Call it before capturing a CUDA graph.

        Args:
            formats: quantized formats of rows that the program uses, as pairs (format, ``scales_as``), such as
                ``[("e4m3/128/pow2", "columns")]``. Kernels of other formats are compiled at their first call.

        Raises:
            ValueError: a format or layout of scales does not exist.
            RuntimeError: the communicator was destroyed.
        """
        with together(self, "warmup", checks.problem_of_formats(formats)):
            self.backend.compile(formats)
            self.exchange.barrier()  # compile times differ, and kernels wait for each other
            self.backend.warmup()
            self.exchange.barrier()

    def check_errors(self) -> None:
        """Raise an error if kernels have reported one so far. Does not wait for running kernels.

        Raises:
            RuntimeError: a wait has failed; the communicator must be destroyed.
            ValueError: an expert id was out of range, another rank rejected its arguments, or rows were dropped and
                ``overflow`` is "raise". With ``overflow="raise"`` the method waits for the device.
        """
        if not self.destroyed:
            self.backend.listen()
        if not self.destroyed or self.backend.has_failed():  # else the reports were freed with the memory
            self.backend.check_errors()
        if self.overflowed is not None:
            self.overflowed.check(self.name, self.rank)

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` if this communicator fails.

        Use it in servers that only replay CUDA graphs and therefore do not notice a failure. The callback runs in
        another thread, within a tenth of a second after the kernels report the failure. A rank that launches nothing
        notices a failure only when it calls :meth:`check_errors`. The next call of a method of this communicator raises
        the same text. The reference backend raises every error in the call that fails and does not use the callback.

        Args:
            callback: called once with the text of the failure. ``lambda text: os.abort()`` ends the process.
        """
        self.backend.call_on_failure(callback)

    def last_operations(self, rank: int | None = None) -> list[Operation]:
        """Return the last operations that a rank has begun, most recent first.

        Use it from another thread or a debugger to find out where a rank hangs. It does not wait for running kernels
        on either rank. A call that runs in rounds (``staging_bytes``) appears as one operation for its route and one
        for each round.

        Args:
            rank: rank whose operations are returned. None: this rank.

        Returns:
            At most 16 :class:`ep_ops.records.Operation`. The list is empty on the reference backend, which does not
            record operations.

        Raises:
            ValueError: ``rank`` is out of range.
            RuntimeError: the communicator was destroyed, or the memory of that rank cannot be read.
        """
        reject_destroyed(self)
        rank = self.rank if rank is None else rank
        if not 0 <= whole("rank", rank) < self.world_size:
            raise ValueError(f"rank is {rank}; allowed: 0..{self.world_size - 1}")
        return self.backend.last_operations(rank)

    def lateness(self) -> Lateness:
        """Return when all ranks began the last operations, and how long they waited for each other.

        It reads :meth:`last_operations` of every rank, and does not wait for running kernels.

        Returns:
            :class:`ep_ops.statistics.Lateness`. It has no operations on the reference backend.

        Raises:
            RuntimeError: the communicator was destroyed, or the memory of a rank cannot be read.
        """
        return lateness([self.last_operations(rank) for rank in range(self.world_size)])

    def statistics(self) -> Statistics:
        """Return this rank's counts since the creation of the communicator: operations, rows, bytes and waits.

        It does not wait for running kernels, so operations that are in progress may be counted in part. Replayed CUDA
        graphs are counted. Waits of the last operations are added later: of the last 4 on the cute backend, of the last
        one on the reference backend.

        Returns:
            :class:`ep_ops.statistics.Statistics`, whose method ``prometheus`` returns them as text.

        Raises:
            ValueError: the configuration has no ``statistics``.
            RuntimeError: the communicator was destroyed.
        """
        reject_destroyed(self)
        if self.counts is None:
            raise ValueError("statistics is False in the configuration, so nothing is counted; allowed: True")
        waited = torch.tensor(self.backend.waited(), dtype=torch.float64, device="cpu")
        counted = self.backend.operations(), *self.counts.read(), waited
        return Statistics(self.name, self.rank, self.first_local_expert, *counted)

    def shrink(self, group: dist.ProcessGroup, *, name: str | None = None) -> Communicator:
        """Return a communicator of the surviving ranks after other ranks have died.

        Collective over ``group``. Destroys this communicator without waiting for other ranks. Every rank keeps its
        experts. Methods of the new communicator take the same expert ids as before: they treat ids of lost experts as
        -1, and :meth:`lost_rows` counts these ids. Operators of ``torch.ops.ep`` take new ids, which number the
        remaining experts. Compiled functions and CUDA graphs refer to the old communicator, so compile and capture them
        again. docs/failures.md explains what else is needed.

        Args:
            group: some ranks of this communicator, in the same order. Each NVLink domain contributes the same number of
                ranks, or none. ``torch.distributed.new_group(ranks, use_local_synchronization=True)`` creates such a
                group without the dead ranks.
            name: name of the new communicator. None: a name made of the old name and the number of ranks, such as
                "ep0 of 7".

        Returns:
            The new communicator.

        Raises:
            ValueError: ``group`` contains other ranks, is in another order, holds no experts, or leaves NVLink domains
                with different numbers of ranks; or it spans several domains over NVSHMEM.
        """
        ranks, domain_size = survivors_of(self, self.members, dist.get_process_group_ranks(group_of(group)))
        config, held = self.config, [self.experts_per_rank[rank] for rank in ranks]
        self._destroy(meet=False)
        config = dataclasses.replace(
            config, num_experts=sum(held), experts_per_rank=tuple(held), domain_size=domain_size,
            lost_experts=config.lost_experts + self.num_experts - sum(held),
            name=f"{self.name} of {len(ranks)}" if name is None else name,
        )  # fmt: skip
        left = Communicator(group, config, device=self.device)
        left.expert_ids = ExpertIds.kept(self.experts_per_rank, ranks, self.expert_ids, self.device)
        return left

    def lost_rows(self, topk_idx: Tensor) -> Tensor:
        """Count the entries of ``topk_idx`` that name an expert lost by :meth:`shrink`.

        Args:
            topk_idx: int32 or int64 [T, K] or [..., K].

        Returns:
            int64 [], on the device of ``topk_idx``.
        """
        if self.expert_ids is None:
            return torch.zeros((), dtype=torch.int64, device=topk_idx.device)
        return self.expert_ids.lost(inputs.ids(topk_idx))

    def destroy(self) -> None:
        """Free the communicator's memory. Collective; calling it again does nothing.

        Waits at most ``timeout`` seconds for the other ranks. Does not wait if the communicator has failed, or if the
        process group or its store no longer exists.

        Raises:
            RuntimeError: the communicator has failed and no call has raised the error yet, or some ranks did not call
                ``destroy`` in time, or another thread is calling the communicator.
        """
        self._destroy(meet=True)

    def _destroy(self, meet: bool, why: str = "") -> None:
        """Destroy the communicator.

        Args:
            meet: whether to wait for the other ranks.
            why: if it does not wait, the reason for other ranks that wait for this one in an operation.
        """
        if self.destroyed:
            return
        unsaid = None
        taken = self.busy.acquire(blocking=False)  # and never released: other threads find it destroyed
        if not taken:
            unsaid = of_two_threads("destroy")
            self.backend.give_up(unsaid)
            taken = self.busy.acquire(timeout=min(self.config.timeout, threading.TIMEOUT_MAX))
        self.destroyed = True
        self.calls.forget()  # so that every later call asks the registry
        registry.remove(self.name)
        for key in [key for key, comm in _shared.items() if comm is self]:
            del _shared[key]  # it holds the process group
        missing: list[int] = []
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # kernels end by their deadlines
            if meet:
                if not self._has_failed():
                    missing = self._missing()
                elif self.world_size > 1:  # without waiting, because some rank may never arrive
                    leaving.end(self.group, self.number)
                unsaid = self.backend.unsaid() or unsaid
            elif self.world_size > 1:
                leaving.leave(self.group, self.number, self.rank, why)
        finally:
            self.backend.destroy(keep=bool(missing) or not taken)
            self.group = self.exchange.group = None
        if missing and unsaid is None:
            unsaid = (
                f"communicator {self.name!r}: rank {self.rank} destroyed it after waiting {self.config.timeout:g} s"
                f" for ranks {missing}, which did not call destroy"
            )
        if unsaid is not None:
            raise RuntimeError(unsaid)

    def _missing(self) -> list[int]:
        """Return the ranks that did not call ``destroy`` in time, as far as they can be reached."""
        if self.world_size == 1 or not dist.is_initialized():
            return []
        return leaving.meet(self.group, self.name, self.number, self.config.timeout, self._has_failed)

    def _has_failed(self) -> bool:
        """Return whether the communicator has failed on some rank, as far as is known here."""
        self.backend.listen()
        return self.backend.has_failed()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Destroy the communicator. After an exception, inform the other ranks and do not wait for them."""
        why = "" if kind is None else f"rank {self.rank} left the block of the communicator: {kind.__name__}: {error}"
        self._destroy(meet=kind is None, why=why)

    def __repr__(self) -> str:
        state = "destroyed" if self.destroyed else self.backend.name
        return f"<ep_ops.Communicator {self.name!r} rank {self.rank}/{self.world_size} {state} on {self.device}>"


def _mesh_of(group: Any) -> DeviceMesh | None:
    """Return ``group`` if it is a mesh whose dimension has a name, over which experts are then sharded."""
    return group if isinstance(group, DeviceMesh) and group.mesh_dim_names else None


@contextlib.contextmanager
def together(comm: Communicator, call: str, problem: str | None = None, values: Sequence[int] = ()) -> Iterator[Tensor]:
    """Run a collective method in a ``with`` block, in which ranks may exchange data over the process group.

    Args:
        call: name of the method.
        problem: why this rank rejects the call, or None.
        values: a few ints.

    Yields:
        ``values`` of all ranks, int64 [W, at least as many].

    Raises:
        ValueError: a rank rejects the call.
        RuntimeError: ranks make different calls, or the communicator was destroyed or has failed.
    """
    take(comm, call)
    try:
        with comm.backend.together(call, problem, values) as gathered:
            yield gathered
    finally:
        comm.busy.release()
