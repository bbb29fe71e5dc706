"""The plugin that vLLM and SGLang call: in vLLM before models are imported, in SGLang's schedulers afterwards."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

_SGLANG = "sglang.srt.layers.moe.token_dispatcher"
_VLLM = "vllm.model_executor.layers.fused_moe.all2all_utils"


def stand_in_for_deep_ep() -> None:
    """Replace DeepEP by :mod:`ep_ops.integrations.deep_ep` if the environment variable ``EP_OPS_DEEP_EP`` is 1.

    DeepEP may be installed, as SGLang requires. A spawned scheduler of SGLang imports its dispatchers, and DeepEP,
    before it calls plugins: their names are then bound to ep_ops. vLLM decides which backends exist when it imports
    ``all2all_utils``; a warning says so if that has happened.

    Raises:
        RuntimeError: DeepEP has created a buffer in this process.
        ValueError: the variable is neither 0, 1 nor empty.
    """
    asked = os.environ.get("EP_OPS_DEEP_EP", "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"EP_OPS_DEEP_EP is {asked!r}; allowed: 0, or 1 (ep_ops replaces DeepEP)")
    if asked != "1":
        return
    from ep_ops.integrations import deep_ep

    imported = sys.modules.get("deep_ep")
    deep_ep.install(replace=True)
    _bind_in_sglang("deepep", Buffer=deep_ep.Buffer, Config=deep_ep.Config)
    _bind_in_sglang("deepep_v2", ElasticBuffer=deep_ep.ElasticBuffer)
    if _VLLM in sys.modules and imported is not deep_ep:
        warnings.warn(
            f"vLLM imported {_VLLM} before ep_ops' plugin ran, so its deepep backends do not use ep_ops. Set"
            " VLLM_PLUGINS to a list without the plugin that imported it.",
            RuntimeWarning,
            stacklevel=2,
        )


def _bind_in_sglang(name: str, **classes: type) -> None:
    """Bind what a dispatcher's module of SGLang imports from DeepEP, if the module has been imported."""
    module: Any = sys.modules.get(f"{_SGLANG}.{name}")
    if module is None or all(getattr(module, key, None) is value for key, value in classes.items()):
        return
    if getattr(module, "sglang_per_token_group_quant_fp8", None) is None:  # imported after DeepEP, in one `try`
        module.sglang_per_token_group_quant_fp8 = _quantization()
    vars(module).update(classes)
    setattr(module, f"use_{name}", True)


def _quantization() -> Any:
    try:
        from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    except ModuleNotFoundError:  # SGLang 0.5.14
        from sglang.srt.layers.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    return sglang_per_token_group_quant_fp8
