"""Compilation and launch of kernels. Only this module knows what kernels get in addition to their tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_kernels import jit
from cute_kernels.domains import position_words
from cute_kernels.heap import Problem
from cute_kernels.launch import Kernel, RankArgs, names
from cute_kernels.prepare import cores, prepare_all, share_of_cores

from ...group.exchange import Exchange
from ...group.topology import others_of_host
from ...symmetric import SymmetricBuffer, nvshmem
from .call_state import CallState
from .tuning import Tuning

Launch = Callable[..., None]
"""Launches a kernel on tensors, passed in the order of `kernel.Args`, which is fastest, or by name. None or left out if
there is none."""
Bind = Callable[..., Launch]
"""Returns the launch of a kernel with (terms, **numbers): all numbers of `kernel.Args`, by name."""


def processes_of_rank(exchange: Exchange) -> int:
    """Return the number of processes in which this rank compiles while all ranks do: its share of the host's cores.
    Collective.

    Ranks of other groups may compile at the same time. At least as many ranks as visible GPUs are assumed; those that
    are not in this group, on this rank's cores.
    """
    own = cores()
    others = others_of_host(exchange, own)
    return share_of_cores([*others, *[own] * (torch.cuda.device_count() - 1 - len(others))])


class Launcher:
    """Launches the kernels of one rank of a communicator, on its device."""

    def __init__(
        self, problem: Problem, heap: SymmetricBuffer, multiprocessors: int, rest: tuple[int, int, int],
        stream: Callable[[int], int] | None = None, state: CallState | None = None, tuning: Tuning | None = None,
    ) -> None:  # fmt: skip
        """Create the launcher of a rank. `heap`: its address; `rest`: rank, address of the report, deadline of waits in
        ns. `stream`: function from device index to the stream; None: the current stream. `state`: progress of the
        communicator's calls. `tuning`: knobs of its calls; None: those of any GPU."""
        self.state = state or CallState()
        self.tuning = tuning or Tuning("", problem.world_size)
        self.problem, self.device = problem, heap.local.device
        device = self.device
        properties = torch.cuda.get_device_properties(device)
        self.multiprocessors = multiprocessors
        self._arch = f"sm_{properties.major}{properties.minor}a"
        self._table = heap.table
        if problem.domains:
            words = [*heap.addresses, *position_words(problem.domains)]
            self._table = torch.tensor(words, dtype=torch.int64, device=device)
        self._ranks = (self._table.data_ptr(), heap.addresses[rest[0]], *rest)
        self._launches: dict[Any, Bind] = {}
        self._stream = stream or torch._C._cuda_getCurrentRawStream

    def get(self, kernel: type[Kernel], **variant: Any) -> Bind:
        """Return what binds launches of `kernel(problem, **variant)`, which is compiled at its first use."""
        key = kernel, *variant.items()
        found = self._launches.get(key)
        if found is None:
            function = self._compiled(kernel(self.problem, **variant))
            found = _template(kernel.Args)(function, self._ranks, self.device.index, self._stream)
            self._launches[key] = found
        return found

    def compile(self, kernels: Sequence[Kernel], processes: int) -> None:
        """Compile kernels, in at most so many processes, and load them, so that `get` does not have to."""
        prepare_all(kernels, self._arch, processes)
        for kernel in kernels:
            self._compiled(kernel)

    def _compiled(self, kernel: Kernel) -> Callable[..., None]:
        if not kernel.linked:
            return jit.get(kernel, self._arch, torch.cuda.is_current_stream_capturing)
        with torch.cuda.device(self.device):
            return jit.get(kernel, self._arch, torch.cuda.is_current_stream_capturing, nvshmem.register)


@functools.cache
def _template(args: type[Any]) -> Callable[..., Bind]:
    """Return a function from (compiled function, values of `RankArgs` before the terms, device index, its stream) to
    the :data:`Bind` of a kernel. It is generated as text, as namedtuple does, because launching is most of the host
    time of an operator: numbers are bound once, and a call by position costs half of a call by keyword."""
    tensors, numbers = names(args)
    ranks = [f"_{name}" for name in RankArgs._fields[:-1]]
    addresses = [f"0 if {name} is None else {name}.data_ptr()" for name in tensors]
    given = ", ".join([*ranks, "terms", *addresses, *numbers])
    scope: dict[str, Any] = {"_device": torch._C._cuda_getDevice, "_on": torch.cuda.device}
    text = f"""
def binds(_function, _ranks, _index, _stream):
    {", ".join(ranks)} = _ranks
    def bind(terms, *, {", ".join(numbers)}):
        def launch({", ".join(f"{name}=None" for name in tensors)}):
            if _device() != _index:
                with _on(_index):
                    _function({given}, _stream(_index))
            else:
                _function({given}, _stream(_index))
        return launch
    return bind
"""
    exec(text, scope)
    return scope["binds"]
