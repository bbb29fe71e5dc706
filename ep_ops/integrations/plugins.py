"""Entry points that vLLM and SGLang call in each process, including workers, before they import models."""

from __future__ import annotations

import os


def stand_in_for_deep_ep() -> None:
    """Call :func:`ep_ops.integrations.deep_ep.install` if the environment variable ``EP_OPS_DEEP_EP`` is 1.

    Raises:
        ValueError: the variable is neither 0, 1 nor empty.
    """
    asked = os.environ.get("EP_OPS_DEEP_EP", "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"EP_OPS_DEEP_EP is {asked!r}; allowed: 0, or 1 (ep_ops replaces DeepEP)")
    if asked == "1":
        from ep_ops.integrations import deep_ep

        deep_ep.install()
