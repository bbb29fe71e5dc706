"""Fake kernels: shapes, dtypes and devices of what every ``ep`` operator returns, for tracing and compilation.

Each function takes its operator's arguments as a record with the schema's names. Sizes come from the arguments alone
and not from a communicator, so a compiled graph that is loaded from a cache is valid for any communicator of that name.
"""

from .combine import combine, combine_backward
from .dispatch import dispatch, dispatch_backward, dispatch_dynamic, dispatch_planned
from .plan import plan
from .split import (
    combine_backward_start,
    combine_backward_wait,
    combine_start,
    dispatch_backward_start,
    dispatch_backward_wait,
    dispatch_start,
)

__all__ = [
    "combine",
    "combine_backward",
    "combine_backward_start",
    "combine_backward_wait",
    "combine_gathered",
    "combine_start",
    "combine_wait",
    "dispatch",
    "dispatch_backward",
    "dispatch_backward_start",
    "dispatch_backward_wait",
    "dispatch_dynamic",
    "dispatch_planned",
    "dispatch_start",
    "dispatch_wait",
    "plan",
]

combine_gathered = combine_wait = combine
dispatch_wait = dispatch
