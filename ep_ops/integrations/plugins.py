"""The plugins that vLLM and SGLang call: in vLLM before models are imported, in SGLang's schedulers afterwards.

One environment variable selects each way, if it is 1:

    EP_OPS_VLLM      vLLM's MoE layers use ep_ops (:mod:`ep_ops.integrations.vllm_server`)
    EP_OPS_SGLANG    SGLang's MoE layers use ep_ops (:mod:`ep_ops.integrations.sglang`)
    EP_OPS_DEEP_EP   ep_ops takes the place of the module deep_ep (:mod:`ep_ops.integrations.deep_ep`)
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

_SGLANG = "sglang.srt.layers.moe.token_dispatcher"
_VLLM = "vllm.model_executor.layers.fused_moe.all2all_utils"


def vllm() -> None:
    """Let vLLM use ep_ops as the environment says. vLLM calls it in each of its processes.

    Raises:
        RuntimeError: DeepEP has created a buffer in this process.
        ValueError: a variable is neither 0, 1 nor empty, or two are 1.
    """
    way = _way("EP_OPS_VLLM", "EP_OPS_DEEP_EP")
    if way == "EP_OPS_DEEP_EP":
        stand_in_for_deep_ep()
    elif way:
        importlib.import_module("ep_ops.integrations.vllm_server").install()


def sglang() -> None:
    """Let SGLang use ep_ops as the environment says. SGLang calls it in each of its processes.

    Raises:
        RuntimeError, ValueError: as for :func:`vllm`.
    """
    way = _way("EP_OPS_SGLANG", "EP_OPS_DEEP_EP")
    if way == "EP_OPS_DEEP_EP":
        stand_in_for_deep_ep()
    elif way:
        importlib.import_module("ep_ops.integrations.sglang").install()


def _way(*variables: str) -> str:
    """Return the variable that is 1, or an empty string."""
    given = {name: os.environ.get(name, "") for name in variables}
    for name, value in given.items():
        if value not in ("", "0", "1"):
            raise ValueError(f"{name} is {value!r}; allowed: 0, or 1 ({_MEANING[name]})")
    chosen = [name for name, value in given.items() if value == "1"]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} are 1; allowed: one of them")
    return "".join(chosen)


_MEANING = {
    "EP_OPS_DEEP_EP": "ep_ops replaces DeepEP",
    "EP_OPS_VLLM": "vLLM's MoE layers use ep_ops",
    "EP_OPS_SGLANG": "SGLang's MoE layers use ep_ops",
}


def stand_in_for_deep_ep() -> None:
    """Replace DeepEP by :mod:`ep_ops.integrations.deep_ep`.

    DeepEP may be installed, as SGLang requires. A spawned scheduler of SGLang imports its dispatchers, and DeepEP,
    before it calls plugins: their names are then bound to ep_ops. vLLM decides which backends exist when it imports
    ``all2all_utils``; a warning says so if that has happened.

    Raises:
        RuntimeError: DeepEP has created a buffer in this process.
    """
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
        module.sglang_per_token_group_quant_fp8 = quantization()
    vars(module).update(classes)
    setattr(module, f"use_{name}", True)


def quantization() -> Any:
    """Return SGLang's function that quantizes rows in groups to float8_e4m3fn."""
    try:
        from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    except ModuleNotFoundError:  # SGLang 0.5.14
        from sglang.srt.layers.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    return sglang_per_token_group_quant_fp8
