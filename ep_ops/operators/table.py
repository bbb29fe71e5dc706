"""The table of operators. Registration, test cases and the documentation are derived from it.

All operators are functional: they mutate nothing, and every output is newly allocated. The communicator is passed by
name (``comm``), and each int that sets the size of an output is an argument, so compiled graphs, their caches and
exported programs depend on nothing else.

T tokens of this rank, K top_k, H hidden size, R rows, W ranks, El local experts. x, y, out, residual and their
gradients are [., H] in the communicator's dtype; weights and their gradients are float32 (float64 with float64 rows);
all other tensors are int32 (``ep_ops.backends.reference`` defines their values). Optional results that were not
requested have shape [0]. A dispatch with a ``format`` takes and returns quantized rows and their scales
(docs/formats.md). With ``layout`` "token_major" (docs/token-major.md) R counts copies, and recv_weights, its gradient
and recv_idx are [R, K]. Combines do not depend on the layout.

``*_start`` and ``*_wait``, called with the same arguments, form a split operation. The ticket between them is an empty
tensor, float32 [0]. It orders the two operators, and autograd passes through it, so that the gradient of a wait starts
and the gradient of a start waits. The wait of a gradient takes sizes only; ``given`` keeps the inputs of its start
alive. ``flight`` distinguishes split operations that are in progress at the same time (docs/overlap.md).
"""

from __future__ import annotations

from meta_kernels.arguments import (
    CombineArgs,
    CombineGatheredArgs,
    CombineStartArgs,
    CombineWaitArgs,
    DispatchArgs,
    DispatchDynamicArgs,
    DispatchStartArgs,
    DispatchWaitArgs,
    PlanArgs,
)

from .. import checks
from ..records import DispatchTensors, Placed
from . import gradients
from .gradients import (
    COMBINE_BACKWARD,
    COMBINE_BACKWARD_START,
    COMBINE_BACKWARD_WAIT,
    DISPATCH_BACKWARD,
    DISPATCH_BACKWARD_START,
    DISPATCH_BACKWARD_WAIT,
    DISPATCH_PLANNED,
)
from .operator import Operator

PLAN = Operator("plan", PlanArgs, Placed, "compute a route, without sending rows", checks.plan)
DISPATCH = Operator(
    "dispatch",
    DispatchArgs,
    DispatchTensors,
    "send tokens [T, H] and weights [T, K] to the ranks of their experts; return the received rows [R, H]. The"
    " caller sets R. Does not synchronize the host on GPUs",
    checks.dispatch,
    gradients.OF_DISPATCH,
)
DISPATCH_DYNAMIC = Operator(
    "dispatch_dynamic",
    DispatchDynamicArgs,
    DispatchTensors,
    "`dispatch` with R equal to the number of rows that arrive; synchronizes the host once",
    checks.dispatch_dynamic,
    gradients.OF_DISPATCH,
    exact=True,
)
COMBINE = Operator(
    "combine",
    CombineArgs,
    "out",
    "return the outputs of the experts, rows [R, H], to the ranks of their tokens, and return the weighted sum for"
    " each token [T, H], plus an optional residual. The order of summation is fixed. Sums and gradients can be sent"
    " [quantized](formats.md#sums-on-the-wire)",
    checks.combine,
    gradients.OF_COMBINE,
)
COMBINE_GATHERED = Operator(
    "combine_gathered",
    CombineGatheredArgs,
    "out",
    "`combine` without weights. The rank of each token reads the token's rows from symmetric memory"
    " (`Communicator.empty_rows`) on the other ranks",
    checks.combine_gathered,
    gradients.OF_GATHERED,
)
DISPATCH_START = Operator(
    "dispatch_start",
    DispatchStartArgs,
    "ticket",
    "start a dispatch, which then runs concurrently with the current stream",
    checks.dispatch,
    gradients.OF_DISPATCH_START,
)
DISPATCH_WAIT = Operator(
    "dispatch_wait",
    DispatchWaitArgs,
    DispatchTensors,
    "finish a started dispatch; return what `dispatch` returns",
    checks.dispatch,
    gradients.OF_DISPATCH_WAIT,
)
COMBINE_START = Operator(
    "combine_start",
    CombineStartArgs,
    "ticket",
    "start a combine, which then runs concurrently with the current stream",
    checks.combine,
    gradients.OF_COMBINE_START,
)
COMBINE_WAIT = Operator(
    "combine_wait",
    CombineWaitArgs,
    "out",
    "finish a started combine; return what `combine` returns",
    checks.combine,
    gradients.OF_COMBINE_WAIT,
)

OPERATORS: tuple[Operator, ...] = (
    PLAN, DISPATCH, DISPATCH_DYNAMIC, DISPATCH_PLANNED, COMBINE, COMBINE_GATHERED, DISPATCH_BACKWARD, COMBINE_BACKWARD,
    DISPATCH_START, DISPATCH_WAIT, DISPATCH_BACKWARD_START, DISPATCH_BACKWARD_WAIT, COMBINE_START, COMBINE_WAIT,
    COMBINE_BACKWARD_START, COMBINE_BACKWARD_WAIT,
)  # fmt: skip


def markdown() -> str:
    """Return the table of operators of docs/operators.md."""
    lines = ["| operator (`torch.ops.ep`) | purpose | gradient |", "|---|---|---|"]
    for op in OPERATORS:
        gradient = "none" if op.gradient is None else " or ".join(f"`{name}`" for name in op.gradient.operators)
        lines.append(f"| `{op.name}` | {op.does} | {gradient} |")
    return "\n".join(lines)
