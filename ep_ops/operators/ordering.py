"""Keep the order in which compiled graphs communicate with other ranks.

All ranks must run the ep operators, and PyTorch's collectives in the same graph, in the order of the program. Inductor
treats them as functions without effects: it sorts them by the sizes of the rank's own tensors, and removes those whose
results are not used (on a rank without tokens). Ranks that compiled for different sizes, or one that runs eagerly,
would then communicate in different orders and wait for each other. Therefore each node of a graph that communicates,
whatever its communicator or process group, waits for the one before it and is never removed. This costs no time,
because the ep operators run on one stream. Each subgraph (a branch of torch.cond) has a sequence of its own, and its
call has a place in the sequence of the caller. Graphs without ep operators are not changed.

The program's work between the start and the wait of a split operation (``SPLIT``) stays between them; Inductor would
move it before the start or after the wait. The inputs of a start are not overwritten before the wait, which takes the
same tensors; if the wait is in another graph, they are never overwritten.

Inductor has no public interface for this. Its options for passes are context variables, which other threads and tasks
do not see and which a user may set; so functions of Inductor are wrapped instead, once for the process. On untested
versions of torch, nothing is changed, and a warning is issued.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _disable_current_modes

import meta_kernels

from . import collectives, gathered, partition, table

TRIED = ("2.11", "2.16")  # first supported torch release, and first untested one

OPERATORS = tuple(op.overload for op in table.OPERATORS)
SPLIT = {op.overload: getattr(torch.ops.ep, op.starts).default for op in table.OPERATORS if op.starts is not None}
"""The wait of each split operation -> its start. What the program does between them stays between them."""

SOURCES = (Path(__file__).parents[1], Path(meta_kernels.__file__).parent)
"""The folders whose Python files decide what is compiled: of ep_ops and of its fakes."""

_CAT = torch.ops.aten.cat.default
_POSITION = "ep_position"  # key in a node's meta: position in the program
_BETWEEN = "ep_between"  # key in a node's meta: tickets of the split operations in progress
_installing = threading.Lock()
_installed = False
_sequences: weakref.WeakKeyDictionary[Any, _Sequence] = weakref.WeakKeyDictionary()


def install() -> None:
    """Register the operators' order with Inductor, once. It is called when an operator is first traced, so that
    importing ep_ops does not import Inductor."""
    global _installed
    if _installed:
        return
    with _installing:
        if not _installed:
            _try_to_install()
        _installed = True


def _try_to_install() -> None:
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


def hooks() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return (owner, name, wrapper) of the functions of PyTorch that are wrapped. A wrapper takes the function and its
    arguments.

    Raises:
        AttributeError, ImportError: this version of PyTorch lacks something.
    """
    from torch._inductor import codecache, compile_fx, constant_folding, graph
    from torch._inductor.fx_passes import post_grad

    return [
        (codecache.FxGraphHashDetails, "__init__", _add_digest),
        (compile_fx, "_recursive_joint_graph_passes", _record_split),
        (compile_fx, "_recursive_post_grad_passes", _number),
        (post_grad, "reorder_for_locality", _keep_order),
        (graph.GraphLowering, "run_node", _in_sequence),
        (constant_folding.ConstantFolder, "_deduce_value", _fold),
        (Node, "is_impure", _is_impure),
        *partition.hooks(),
    ]


def _install() -> None:
    from torch._inductor import decomposition, lowering

    functions = [(owner, name, getattr(owner, name), wrapper) for owner, name, wrapper in hooks()]
    lowerings: dict[Any, Any] = {op: lowering.fallback_handler(op) for op in OPERATORS}
    gathering = torch.ops.ep.combine_gathered.default
    lowerings[gathering] = gathered.lowering(lowerings[gathering])
    partition.install()
    lowering.lowerings.update(lowerings)
    decomposition.decompositions[_CAT] = _keep_empty(decomposition.decompositions[_CAT])
    for owner, name, function, wrapper in functions:
        setattr(owner, name, _wrapped(function, wrapper))


def _wrapped(function: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    return run


def _add_digest(init: Callable[..., None], details: Any, *args: Any, **kwargs: Any) -> None:
    """Make all sources part of the key of compiled graphs in caches. What is cached depends on these hooks, and on
    lowerings, gradients and fakes."""
    init(details, *args, **kwargs)
    details.ep_ops = digest_of(SOURCES)


def _fold(deduce: Callable[..., Any], folder: Any, node: Node) -> Any:
    """Let Inductor compute constants, except results of nodes that communicate (``freezing``)."""
    return folder.unknown_value if collectives.communicates(node) else deduce(folder, node)


def _is_impure(is_impure: Callable[..., bool], node: Node, *args: Any, **kwargs: Any) -> bool:
    """Keep calls of subgraphs with ep operators, also if their results are not used."""
    return is_impure(node, *args, **kwargs) or collectives.calls_operators(node)


def _record_split(passes: Callable[..., Any], module: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Record which nodes are between the start and the wait of a split operation, before passes move them."""
    for graph in collectives.graphs_of(module):
        started: list[str] = []
        for node in graph.nodes:
            if node.target in SPLIT and node.args[0].name in started:
                started.remove(node.args[0].name)
            if started and node.op == "call_function":
                node.meta[_BETWEEN] = tuple(started)
            if node.target in SPLIT.values():
                started.append(node.name)
    return passes(module, *args, **kwargs)


def _number(passes: Callable[..., None], module: GraphModule, *args: Any, **kwargs: Any) -> None:
    """Record the order of the program in the nodes that communicate, before passes move them."""
    graphs = collectives.graphs_of(module)
    if collectives.has_operators(graphs):
        for graph in graphs:
            _restore_split(graph)
            for position, node in enumerate(filter(collectives.communicates, graph.nodes)):
                node.meta[_POSITION] = position
    passes(module, *args, **kwargs)


def _keep_order(reorder: Callable[[Graph], None], graph: Graph) -> None:
    """Let Inductor move nodes of a graph for inference towards their users, except nodes that communicate."""
    numbered = [node for node in graph.nodes if _POSITION in node.meta]
    reorder(graph)
    _restore(graph, numbered)
    _restore_split(graph)


def _restore(graph: Graph, order: list[Node]) -> None:
    """Put nodes back into their order, each behind the nodes that it needs."""
    arranged: dict[Node, None] = {}

    def arrange(node: Node) -> None:
        pending = [node]
        while pending:
            needed = [given for given in pending[-1].all_input_nodes if given not in arranged]
            pending.extend(needed)
            if not needed:
                arranged[pending.pop()] = None

    ordered, remaining = set(order), iter(order)
    for node in graph.nodes:
        if node in ordered and node not in arranged:
            for earlier in remaining:
                arrange(earlier)
                if earlier is node:
                    break
        arrange(node)
    nodes = list(arranged)
    for before, node in zip(nodes[:-1], nodes[1:], strict=True):
        if before.next is not node:
            before.append(node)


def _restore_split(graph: Graph) -> None:
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


class _Sequence:
    """What communicates in a graph that is being lowered."""

    def __init__(self) -> None:
        self.positions: dict[Graph, int] = {}  # of the last node
        self.last: str | None = None  # buffer of the last kernel
        self.starts: dict[str, int] = {}  # ticket of a split operation -> number of operations before


def _in_sequence(run: Callable[..., Any], graph: Any, node: Node) -> Any:
    """Lower a node. If it communicates, make its kernels wait for those of its predecessor, and never remove them."""
    from torch._inductor import ir

    known = len(graph.operations)
    result = run(graph, node)
    if not collectives.communicates(node):
        return result
    sequence = _sequences.setdefault(graph, _Sequence())
    position = node.meta.get(_POSITION)
    if position is None and not collectives.has_operators([node.graph]):
        return result
    if position is None or position < sequence.positions.get(node.graph, 0):
        raise RuntimeError(
            f"a compiler pass has {'inserted' if position is None else 'moved'} {node.name} ({node.target}) in a graph"
            " with ep_ops operators, whose order among collectives must be that of the program on every rank; allowed:"
            " passes that neither merge nor move collectives"
        )
    sequence.positions[node.graph] = position
    called = ir.InvokeSubgraph, ir.Conditional, ir.WhileLoop
    kinds = (ir.FallbackKernel,) if isinstance(node.target, torch._ops.OpOverload) else called
    kernels: list[Any] = [made for made in graph.operations[known:] if isinstance(made, kinds)]
    for kernel in kernels:
        kernel.has_side_effects = lambda: True
        if sequence.last is not None:
            graph.additional_buffer_deps[kernel.get_operation_name()].add(sequence.last)
        sequence.last = kernel.get_name()
    if node.target in SPLIT.values():
        if not any(user.target in SPLIT for user in node.users):
            # The wait is not in this graph.
            graph.never_reuse_buffers.update(given.get_name() for given in kernels[-1].inputs)
        sequence.starts[result.get_name()] = len(graph.operations)
    if node.target in SPLIT:
        ticket = graph.env[node.args[0]].get_name()
        first = sequence.starts.pop(ticket, None)
        if first is not None:
            _keep_between(graph, ticket, graph.operations[first:known], kernels[-1])
    return result


def _keep_between(graph: Any, ticket: str, between: list[Any], wait: Any) -> None:
    """Make operations between a start and its wait run after the start and before the wait. A product that is merged
    into a later addition (addmm) is no longer between them."""
    for made in between:
        graph.additional_buffer_deps[made.get_operation_name()].add(ticket)
        for buffer in made.get_outputs():
            graph.additional_buffer_deps[wait.get_operation_name()].add(buffer.get_name())
