"""Host time that does not depend on the machine: how many functions are called."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def counted(run: Callable[[], Any]) -> tuple[int, int]:
    """How many Python functions and how many C functions ``run()`` calls; ``run`` itself does not count."""
    python = c = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal python, c
        python += event == "call"
        c += event == "c_call"

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # a collection may call functions of objects that others have left
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return python - 1, c - 1  # without run, and without the setprofile that ends it
