"""Shapes, dtypes and devices of what every ``ep`` operator returns: all that tracing and compilation need.

Nothing here knows a communicator: sizes come from the arguments alone, so that a compiled graph that is loaded from
a cache is right for whatever communicator bears the name later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .combine import combine, combine_backward
from .dispatch import dispatch, dispatch_backward, dispatch_dynamic, dispatch_planned
from .plan import plan

FAKES: dict[str, Callable[..., Any]] = {
    "plan": plan,
    "dispatch": dispatch,
    "dispatch_dynamic": dispatch_dynamic,
    "dispatch_planned": dispatch_planned,
    "combine": combine,
    "dispatch_backward": dispatch_backward,
    "combine_backward": combine_backward,
}
"""Operator name -> fake implementation, which takes the operator's arguments in schema order."""

__all__ = ["FAKES"]
