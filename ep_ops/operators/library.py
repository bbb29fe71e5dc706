"""Registration of one operator of the library ``ep``, and of its gradient, with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import eager
from .once import once

LIBRARY = torch.library.Library("ep", "DEF")
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
CONTIGUOUS = torch.Tag.needs_contiguous_strides


def define(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = (CONTIGUOUS,),
    made: Callable[[str, Callable[..., Any]], eager.Op] = eager.Op,
) -> Any:  # fmt: skip
    """Define an operator for CPUs and GPUs.

    Args:
        schema: name, arguments and results.
        run: its implementation.
        fake: returns empty results, for tracing.
        tags: tags besides ``pt2_compliant_tag``.
        made: makes what is returned.

    Returns:
        The operator as it is called in eager code.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    # Opaque to Dynamo, which must not trace a backend's Python after a graph break.
    # (torch.compiler.disable would import Dynamo immediately; this function imports it in the first call.)
    opaque = torch._disable_dynamo(run)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, opaque, key)
    torch.library.register_fake(f"ep::{name}", fake, lib=LIBRARY)
    return made(name, run)


def differentiate(op: eager.Op, backward: Callable[..., Any], save: Callable[..., Any]) -> None:
    """Register the gradient of an operator. ``save`` (ctx, inputs, output) keeps what ``backward`` needs."""
    opaque = torch._disable_dynamo(once(f"ep::{op.name}", backward))
    torch.library.register_autograd(f"ep::{op.name}", opaque, setup_context=torch._disable_dynamo(save), lib=LIBRARY)
    run = op.run

    def forward(ctx: Any, *args: Any) -> Any:
        output = run(*args)
        save(ctx, args, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(opaque)}
    function: Any = type(f"ep_{op.name}", (torch.autograd.Function,), members)
    plainly: Any = super(torch.autograd.Function, function).apply
    tensors = [i for i, argument in enumerate(op.schema.arguments) if "Tensor" in str(argument.type)]

    def apply(*args: Any) -> Any:
        # The method of Function first unwraps tensors that ended transforms of torch.func have left, for which it calls
        # two functions for each argument.
        for i in tensors:
            if args[i] is not None and _is_wrapped(args[i]):
                return function.apply(*args)
        return plainly(*args)

    op.differentiable = apply
