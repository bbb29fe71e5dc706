"""Compiles kernels and launches them: the one place that knows what they are handed besides their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from cute_kernels import jit
from cute_kernels.heap import Problem
from cute_kernels.launch import Kernel, names


class Launcher:
    """Launches on the current stream of one device, for one rank of a communicator."""

    def __init__(self, problem: Problem, device: torch.device, ranks: tuple[tuple[int, ...], int, int, int]) -> None:
        """`ranks`: addresses of all ranks' heaps, this rank, address of the report, deadline of waits in ns."""
        self.problem, self.device = problem, device
        properties = torch.cuda.get_device_properties(device)
        self.multiprocessors: int = properties.multi_processor_count
        self._arch = f"sm_{properties.major}{properties.minor}a"
        self._index = device.index
        self._ranks = ranks
        self._prepared: dict[Any, tuple[Callable[..., None], tuple[str, ...], tuple[str, ...]]] = {}

    def launch(self, kernel: type[Kernel], variant: tuple[int, ...], terms: int, **values: Any) -> None:
        """Launches `kernel(problem, *variant)`. Its arguments (`kernel.Args`) by name: tensors, None or left out where
        there is none; numbers as they are."""
        prepared = self._prepared.get((kernel, variant))
        if prepared is None:
            prepared = self._prepared[kernel, variant] = self._prepare(kernel, variant, values)
        function, tensors, numbers = prepared
        given = [0 if (tensor := values.get(name)) is None else tensor.data_ptr() for name in tensors]
        given += [values[name] for name in numbers]
        index = self._index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                function(*self._ranks, terms, *given, torch._C._cuda_getCurrentRawStream(index))
        else:
            function(*self._ranks, terms, *given, torch._C._cuda_getCurrentRawStream(index))

    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Compiles and loads them, so that a launch does not."""
        for kernel in kernels:
            jit.get(kernel, self._arch, torch.cuda.is_current_stream_capturing)

    def clear(self) -> None:
        """Forgets what was loaded."""
        self._prepared.clear()

    def _prepare(
        self, kernel: type[Kernel], variant: tuple[int, ...], values: dict[str, Any]
    ) -> tuple[Callable[..., None], tuple[str, ...], tuple[str, ...]]:
        """The compiled function, and the names of what it takes: tensors, then numbers."""
        tensors, numbers = names(kernel.Args)
        unknown, missing = values.keys() - {*tensors, *numbers}, set(numbers) - values.keys()
        if unknown or missing:
            raise TypeError(f"{kernel.__name__}: unknown arguments {sorted(unknown)}, missing {sorted(missing)}")
        made = kernel(self.problem, *variant)
        return jit.get(made, self._arch, torch.cuda.is_current_stream_capturing), tensors, numbers
