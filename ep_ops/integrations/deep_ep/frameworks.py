"""Lets low-latency dispatches of vLLM and SGLang send the weights with the tokens.

Methods of both frameworks have the weights, but do not pass them to DeepEP, whose dispatch takes none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ep_ops.integrations.deep_ep.low_latency import sending_weights


def _of_vllm(
    self: Any, a1: Any, topk_weights: Any, topk_ids: Any, num_experts: Any, expert_map: Any,
    apply_router_weight_on_input: bool, *_: Any, **__: Any,
) -> Any:  # fmt: skip
    return None if apply_router_weight_on_input else topk_weights


def _of_sglang(self: Any, hidden_states: Any, topk_output: Any) -> Any:
    return topk_output.topk_weights


_METHODS: tuple[tuple[str, str, str, Callable[..., Any]], ...] = (
    (
        "vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll",
        "DeepEPLLPrepareAndFinalize", "prepare_async", _of_vllm,
    ),
    (
        "sglang.srt.layers.moe.token_dispatcher.deepep",
        "_DeepEPDispatcherImplLowLatency", "dispatch_a", _of_sglang,
    ),
)  # fmt: skip
"""Module, class, method, and a function of its arguments that returns the weights of the combine, or None."""


def send_weights() -> None:
    """Wrap the methods of the frameworks that this process has imported. Repeated calls do nothing."""
    for module, name, method, weights_of in _METHODS:
        owner = getattr(sys.modules.get(module), name, None)
        theirs = getattr(owner, method, None)
        if theirs is not None and not getattr(theirs, "_sends_weights", False):
            setattr(owner, method, _sending(theirs, weights_of))


def _sending(theirs: Callable[..., Any], weights_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def sending(*args: Any, **kwargs: Any) -> Any:
        with sending_weights(weights_of(*args, **kwargs)):
            return theirs(*args, **kwargs)

    sending._sends_weights = True  # type: ignore[attr-defined]
    return sending
