"""Which nodes of a traced graph communicate with other ranks.

All ranks must run these nodes in the same order: the ep operators, PyTorch's collectives, and calls of subgraphs
(torch.cond, nested_compile_region) that contain them.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from .table import OPERATORS

EP_OPERATORS = frozenset(op.overload for op in OPERATORS)
NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"})
"""Namespaces of PyTorch's collectives in traced graphs."""

_CALLS = "ep_calls"  # key in the meta of nodes that call a subgraph with ep operators


def packets() -> list[torch._ops.OpOverloadPacket]:
    """Return ``torch.ops.<namespace>.<name>`` of all operators that communicate."""
    names = (name.partition(".")[0].split("::") for name in torch._C._dispatch_get_all_op_names())
    found = {getattr(getattr(torch.ops, space), name) for space, name in names if space in NAMESPACES}
    return [*(op.overloadpacket for op in EP_OPERATORS), *found]


def is_collective(node: Node) -> bool:
    """Return whether a node is an operator that communicates."""
    return node.target in EP_OPERATORS or getattr(node.target, "namespace", None) in NAMESPACES


def communicates(node: Node) -> bool:
    """Return whether a node is an operator that communicates, or the call of a subgraph that contains one."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return any(is_collective(inner) for graph in _subgraphs(node) for inner in graph.nodes)
    return is_collective(node)


def calls_operators(node: Node) -> bool:
    """Return whether a node is the call of a subgraph that contains an ep operator.

    The node keeps the answer, because partitioners copy it to graphs that do not hold the subgraphs yet.
    """
    if isinstance(node.target, torch._ops.HigherOrderOperator) and has_operators(_subgraphs(node)):
        node.meta[_CALLS] = True
    return _CALLS in node.meta


def has_operators(graphs: list[Graph]) -> bool:
    """Return whether any of the graphs contains an ep operator."""
    return any(node.target in EP_OPERATORS for graph in graphs for node in graph.nodes)


def graphs_of(module: GraphModule) -> list[Graph]:
    """Return the graph of a module and those of its subgraphs."""
    return [part.graph for part in module.modules() if isinstance(part, GraphModule)]


def _subgraphs(node: Node) -> list[Graph]:
    owner = node.graph.owning_module
    names = [given.target for given in node.all_input_nodes if given.op == "get_attr"]
    modules = [getattr(owner, name, None) for name in names if isinstance(name, str)]
    return [graph for module in modules if isinstance(module, GraphModule) for graph in graphs_of(module)]
