"""Keep AOT autograd from removing, merging or repeating ep operators.

Every operator is a collective, so all ranks must run the same ones. To AOT autograd they are functions without side
effects: it removes those whose results are unused, merges those with identical arguments, and lets its partitioner run
some of them again in the backward pass, depending on the sizes of this rank's tensors. A rank that compiled for other
sizes, or that runs eagerly, would then run other operators. Here the operators are declared to have side effects, and
before a joint graph is divided they are marked, together with PyTorch's collectives in the same graph:

- An operator of the forward pass runs in the forward graph only, and its results are saved for backward.
- Exceptions are operators that activation checkpointing is to run again, and all operators if
  ``activation_memory_budget`` is 0. They run again if the backward pass needs their results. This must not depend on
  sizes, so a tensor that is computed from a repeated operator is saved where the partitioner is free to choose.

None of these interfaces of PyTorch is public; ordering.py decides for which releases they are used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from . import collectives

_MARKED = "ep_marked"  # key in the meta of nodes that communicate


def install() -> None:
    """Declare the operators' side effects. PyTorch's waits for collectives have theirs."""
    from torch._functorch import compile_utils
    from torch.fx.node import has_side_effect

    compile_utils.rand_ops.extend(collectives.packets())  # never merged
    for op in collectives.EP_OPERATORS:
        has_side_effect(op)


def hooks() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return the functions of the partitioner that are wrapped, as :func:`ordering.hooks` does."""
    from torch._functorch import partitioners

    return [(partitioners, "force_save_effectful_ops", _save_and_mark), (partitioners, "is_not_collective", _is_kept)]


def _save_and_mark(save: Callable[..., None], joint_module: torch.fx.GraphModule) -> None:
    save(joint_module)
    mark(joint_module.graph)


def _is_kept(is_not_collective: Callable[[Node], bool], node: Node) -> bool:
    """Return whether a node without users stays in a forward or backward graph."""
    return is_not_collective(node) or _MARKED in node.meta or collectives.calls_operators(node)


def mark(graph: Graph) -> None:
    """Decide for each operator of a joint graph whether backward runs it again. Sizes have no influence."""
    if not any(node.target in collectives.EP_OPERATORS or collectives.calls_operators(node) for node in graph.nodes):
        return
    from torch.utils.checkpoint import CheckpointPolicy as Policy

    backward: set[Node] = set()
    for node in graph.nodes:
        if node.op != "output" and (_starts_backward(node) or not backward.isdisjoint(node.all_input_nodes)):
            backward.add(node)
    forward = [node for node in graph.nodes if node.op != "output" and node not in backward]

    everything = _memory_budget(graph) == 0
    repeated = {
        node
        for node in forward
        if everything or _maker(node).meta.get("recompute") in (Policy.MUST_RECOMPUTE, Policy.PREFER_RECOMPUTE)
    }

    def save(node: Node) -> None:
        """Save a repeated node instead. Each result of an operator with several results is a node."""
        for result in (node, *(user for user in node.users if _maker(user) is node)):
            result.meta["recompute"] = Policy.MUST_SAVE
            repeated.discard(result)

    if not everything:
        for node in _exposed(forward, repeated, Policy.MUST_SAVE):
            save(node)
    needed: set[Node] = set()
    for node in reversed(forward):
        if any(user in backward or user in repeated and user in needed for user in node.users):
            needed.add(node)
    for node in graph.nodes:
        if not collectives.communicates(node):
            continue
        node.meta[_MARKED] = True
        if node in backward:
            node.meta["partitioner_tag"] = "must_be_in_backward"
        elif node not in repeated or node not in needed:
            node.meta["partitioner_tag"] = "must_be_in_forward"
            save(node)


def _starts_backward(node: Node) -> bool:
    if node.op == "placeholder":  # in a region's graph, those of the forward pass have tags of the graph around it
        return "tangents" in str(node.target)
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _maker(node: Node) -> Node:
    """Return the node, or the operator whose result it takes out of a tuple."""
    while node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _exposed(forward: list[Node], repeated: set[Node], saved: Any) -> set[Node]:
    """Return repeated nodes that depend on a repeated ep operator and are read by nodes that may be saved or
    recomputed.

    The partitioner decides about those by their sizes. A view is not saved; the tensor that it is a view of is exposed.
    """
    computed: set[Node] = set()
    for node in forward:
        if node in repeated and (collectives.is_collective(node) or not computed.isdisjoint(node.all_input_nodes)):
            computed.add(node)
    free = {node for node in forward if node not in repeated and node.meta.get("recompute") != saved}
    exposed: set[Node] = set()
    for node in reversed(forward):
        if node in computed and (node in exposed or not free.isdisjoint(node.users)):
            exposed.discard(node)
            exposed.add(node.all_input_nodes[0] if _is_view(node) else _maker(node))
    return exposed & computed


def _is_view(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and bool(getattr(node.target, "is_view", False))


def _memory_budget(graph: Graph) -> float:
    """Return the memory budget as the partitioner determines it: of a region, of the model, or the default."""
    from torch._functorch import config, partitioners

    of_region = getattr(partitioners, "_get_memory_budget_annotation", lambda node: None)
    budgets = [of_region(node) for node in graph.nodes] + [node.meta.get("memory_budget") for node in graph.nodes]
    return next((budget for budget in budgets if budget is not None), config.activation_memory_budget)
