"""Shapes, dtypes and devices of what every ``ep`` operator returns: all that tracing and compilation need.

Nothing here knows a communicator: sizes come from the arguments alone, so that a compiled graph that is loaded from
a cache is right for whatever communicator bears the name later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .combine import combine, combine_backward, combine_gathered
from .dispatch import dispatch, dispatch_backward, dispatch_dynamic, dispatch_planned
from .halves import combine_start, combine_wait, dispatch_start, dispatch_wait
from .plan import plan

FAKES: dict[str, Callable[..., Any]] = {
    "plan": plan,
    "dispatch": dispatch,
    "dispatch_dynamic": dispatch_dynamic,
    "dispatch_planned": dispatch_planned,
    "combine": combine,
    "combine_gathered": combine_gathered,
    "dispatch_backward": dispatch_backward,
    "combine_backward": combine_backward,
    "dispatch_start": dispatch_start,
    "dispatch_wait": dispatch_wait,
    "combine_start": combine_start,
    "combine_wait": combine_wait,
}
"""Operator name -> fake implementation, which takes the operator's arguments in schema order."""

__all__ = ["FAKES"]
