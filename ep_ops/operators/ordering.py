"""Keep the order in which compiled graphs run the ep operators.

All ranks must run the operators in the order of the program. Inductor treats them as functions without effects: it
sorts them by the sizes of the rank's own tensors, and removes those whose results are not used (on a rank without
tokens). Ranks that compiled for different sizes, or one that runs eagerly, would then call different operators at the
same time. Therefore each operator of a graph, whatever its communicator, waits for the one before it and is never
removed. This costs no time, because they run on one stream. Subgraphs (branches of torch.cond) have sequences of their
own.

The program's work between the start and the wait of a split operation (``SPLIT``) stays between them; Inductor would
move it before the start or after the wait. The inputs of a start are not overwritten before the wait, which takes the
same tensors; if the wait is in another graph, they are never overwritten.

Inductor has no public interface for this. On untested versions of torch, nothing is changed, and a warning is issued.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _disable_current_modes

import meta_kernels

from . import gathered, partition, table

TRIED = ("2.11", "2.16")  # first supported torch release, and first untested one

OPERATORS = tuple(op.overload for op in table.OPERATORS)
SPLIT = {op.overload: getattr(torch.ops.ep, op.starts).default for op in table.OPERATORS if op.starts is not None}
"""The wait of each split operation -> its start. What the program does between them stays between them."""

SOURCES = (Path(__file__).parents[1], Path(meta_kernels.__file__).parent)
"""The folders whose Python files decide what is compiled: of ep_ops and of its fakes."""

_CAT = torch.ops.aten.cat.default
_POSITION = "ep_position"  # key in a node's meta: position in the program
_BETWEEN = "ep_between"  # key in a node's meta: tickets of the split operations in progress
_installed = False
_starts: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
_sequences: weakref.WeakKeyDictionary[Any, list[tuple[float, str, str]]] = weakref.WeakKeyDictionary()


def install() -> None:
    """Register the operators' order with Inductor, once. It is called when an operator is first traced, so that
    importing ep_ops does not import Inductor."""
    global _installed
    if _installed:
        return
    _installed = True
    version = TorchVersion(torch.__version__)
    if version < TRIED[0] or version >= TRIED[1]:
        _warn(f"this is torch {version}; supported: {TRIED[0]} up to, not including, {TRIED[1]}")
        return
    try:
        with _disable_current_modes():  # called during tracing
            _install()
    except (ImportError, AttributeError, TypeError) as error:
        _warn(str(error))


def _warn(why: str) -> None:
    warnings.warn(
        f"ep_ops cannot make Inductor keep the order of its operators ({why}). Graphs with several independent"
        " dispatches or combines may hang, or return wrong results, if ranks have different numbers of tokens.",
        stacklevel=3,
    )


@functools.cache
def digest_of(folders: tuple[Path, ...]) -> str:
    """Return the SHA-256 of all Python files in these folders, including their names."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            source = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(source)} ".encode() + source)
    return digest.hexdigest()


def _install() -> None:
    from torch._inductor import config, decomposition, lowering
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.virtualized import V

    partition.install()

    class Pass(CustomGraphPass):
        """``run``, after the passes that are there already (``earlier``)."""

        def __init__(self, run: Callable[[torch.fx.Graph], None], earlier: Any) -> None:
            self.run = run
            self.earlier = earlier if isinstance(earlier, (list, tuple)) else [earlier] if earlier else []

        def __call__(self, graph: torch.fx.Graph) -> None:
            for other in self.earlier:
                other(graph)
            self.run(graph)

        def uuid(self) -> Any:
            """Part of the key of compiled graphs in caches; None (not cacheable) if ``earlier`` has none. What is
            cached depends on this pass, on lowerings, gradients and fakes, so the key follows from all sources."""
            others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in self.earlier]
            return None if None in others else (f"ep_ops.{self.run.__name__} {digest_of(SOURCES)}", *others)

    for op in OPERATORS:
        default = lowering.fallback_handler(op)
        if op is torch.ops.ep.combine_gathered.default:
            default = gathered.lowering(default, lambda kernel: _place(V.graph, kernel, before=0.5))
        lowering.lowerings[op] = _in_sequence(op, default)
    decomposition.decompositions[_CAT] = _keep_empty(decomposition.decompositions[_CAT])
    config.joint_custom_pre_pass = Pass(_number, config.joint_custom_pre_pass)
    config.post_grad_custom_pre_pass = Pass(_restore_split, config.post_grad_custom_pre_pass)


def _number(graph: torch.fx.Graph) -> None:
    """Record the order of the program in the nodes, before passes move them."""
    position = 0
    started: list[str] = []
    for node in graph.nodes:
        if node.target in SPLIT and node.args[0].name in started:
            started.remove(node.args[0].name)
        if started and node.op == "call_function":
            node.meta[_BETWEEN] = tuple(started)
        if node.target in SPLIT.values():
            started.append(node.name)
        if node.target in OPERATORS:
            node.meta[_POSITION] = position
            position += 1


def _restore_split(graph: torch.fx.Graph) -> None:
    """Restore the nodes between the start and the wait of each split operation. Passes only move nodes towards their
    users."""
    for wait in [node for node in graph.nodes if node.target in SPLIT]:
        start = wait.args[0]
        order = {node: place for place, node in enumerate(graph.nodes)}
        kept = {node for node in order if start.name in node.meta.get(_BETWEEN, ()) and order[node] > order[start]}
        pending = [*kept, wait]
        while pending:
            for needed in pending.pop().all_input_nodes:
                if order[needed] > order[start] and needed not in kept:
                    kept.add(needed)
                    pending.append(needed)
        if wait in kept:
            continue  # a pass has made a node in between depend on the wait
        for node in sorted(kept, key=order.__getitem__):
            wait.prepend(node)
        others = [node for node in order if order[start] < order[node] < order[wait] and node not in kept]
        for node in reversed(others):
            wait.append(node)


def _keep_empty(default: Callable[..., Any]) -> Callable[..., Any]:
    """Return Inductor's decomposition of torch.cat without its removal of empty tensors. It would remove operators
    whose results are empty, such as the combine of a rank without tokens."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    def cat(tensors: list[Tensor], dim: int = 0) -> Any:
        if any(t.ndim > 1 and guard_or_false(t.shape[dim] == 0) for t in tensors):
            return NotImplemented  # no decomposition
        return default(tensors, dim)

    return cat


def _in_sequence(op: torch._ops.OpOverload, default: Callable[..., Any]) -> Callable[..., Any]:
    """Return Inductor's default lowering of ``op``, followed by :func:`_place`."""
    from torch._inductor.virtualized import V

    def lower(*args: Any, **kwargs: Any) -> Any:
        known = len(V.graph.operations)
        result = default(*args, **kwargs)
        kernel: Any
        (kernel,) = (made for made in V.graph.operations[known:] if getattr(made, "op_overload", None) is op)
        kernel.has_side_effects = lambda: True
        _place(V.graph, kernel)
        if op in SPLIT.values():
            if not any(user.target in SPLIT for user in V.graph.current_node.users):
                # The wait is not in this graph.
                V.graph.never_reuse_buffers.update(given.get_name() for given in kernel.inputs)
            _starts.setdefault(V.graph, {})[result.get_name()] = len(V.graph.operations)
        if op in SPLIT:
            ticket = args[0].get_name()
            first = _starts.get(V.graph, {}).pop(ticket, None)
            if first is not None:
                _keep_between(V.graph, ticket, V.graph.operations[first:known], kernel)
        return result

    lower._is_fallback_handler = True  # type: ignore[attr-defined]
    return lower


def _place(graph: Any, kernel: Any, before: float = 0) -> None:
    """Make the kernel wait for its predecessor in the program, and its successor wait for the kernel. ``before``:
    distance of the kernel from the operator that is being lowered."""
    sequence = _sequences.setdefault(graph, [])
    # Only graphs for inference have their nodes moved; in backward graphs, recomputed nodes have an older number.
    position = graph.current_node.meta.get(_POSITION) if graph.is_inference else None
    if position is not None:
        position -= before
    place = len(sequence) if position is None else bisect.bisect(sequence, (position,))
    sequence.insert(place, (place if position is None else position, kernel.get_operation_name(), kernel.get_name()))
    for (_, _, earlier), (_, later, _) in zip(sequence[:-1], sequence[1:], strict=True):
        graph.additional_buffer_deps[later].add(earlier)


def _keep_between(graph: Any, ticket: str, between: list[Any], wait: Any) -> None:
    """Make operations between a start and its wait run after the start and before the wait. A product that is merged
    into a later addition (addmm) is no longer between them."""
    for made in between:
        graph.additional_buffer_deps[made.get_operation_name()].add(ticket)
        for buffer in made.get_outputs():
            graph.additional_buffer_deps[wait.get_operation_name()].add(buffer.get_name())
