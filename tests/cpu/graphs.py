"""The ep operators of a compiled program, printed so that every torch release prints the same."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd


def captured_graphs(fn: Callable[..., Any], *args: Any, dynamic: bool = False) -> list[str]:
    """``fn`` compiled as one graph, run (with a backward pass if its result has a gradient): [forward, backward]."""
    printed: list[str] = []
    labels: dict[str, str] = {}  # of the forward graph's nodes, which its results bear as inputs of the backward graph

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        printed.append(ep_operators(graph.graph, labels))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    out = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    if out.requires_grad:
        out.sum().backward()
    return printed


def ep_operators(graph: torch.fx.Graph, labels: dict[str, str]) -> str:
    """One line an operator, with its arguments: numbers and names; what another operator gave, as ``it.output``;
    ``it.route`` for the last four tensors of a route; ``size``, ``input`` of the program, ``grad`` of its result, or
    ``computed``.
    """
    lines = []
    for node in graph.nodes:
        target = node.target
        if getattr(target, "namespace", None) == "ep":
            name = target._opname
            name += "'" * sum(line.startswith((name + "(", name + "'")) for line in lines)
            labels[node.name] = name
            given = ", ".join(labels[a.name] if isinstance(a, torch.fx.Node) else str(a) for a in node.args)
            for source in labels.values():
                four = (f"{source}.{part}" for part in ("send_rows", "arrivals", "offs", "counts"))
                given = given.replace(", ".join(four), f"{source}.route")
            lines.append(f"{name}({given})")
        elif target is operator.getitem and getattr(node.args[0].target, "namespace", None) == "ep":
            source, index = node.args
            labels[node.name] = f"{labels[source.name]}.{source.target._schema.returns[index].name}"
        elif node.op == "placeholder" and node.name in labels:
            pass
        elif isinstance(node.meta.get("val"), torch.SymInt):
            labels[node.name] = "size"
        elif node.op == "placeholder":
            labels[node.name] = "grad" if "tangent" in node.name else "input"
        else:
            labels[node.name] = "computed"
    return "\n".join(lines) + "\n"
