"""The plugin that makes all MoE layers of a vLLM 0.26 or 0.33 server send their tokens with ep_ops.

vLLM has no registry of all-to-all backends. Its modules bind ``maybe_make_prepare_finalize`` by name when they are
imported, so the function is replaced in every module that has it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe import all2all_utils

from ep_ops.communicator import Communicator
from ep_ops.integrations.vllm import BatchedPrepareAndFinalize, PrepareAndFinalize

_NAME = "maybe_make_prepare_finalize"
_SHARED = (
    "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
)  # fmt: skip
"""Names in models' configurations of the number or the size of shared experts."""


def install() -> None:
    """Replace ``maybe_make_prepare_finalize`` in all of vLLM's modules, in this process. Repeated calls do nothing."""
    theirs = getattr(all2all_utils, _NAME)
    if isinstance(theirs, _Maker):
        return
    ours = _Maker(theirs)
    for module in list(sys.modules.values()):
        bound = getattr(module, "__dict__", {})  # getattr would import what is imported lazily
        if bound.get(_NAME) is theirs:
            bound[_NAME] = ours


class _Maker:
    """Takes the place of vLLM's function: makes ep_ops' classes for layers with expert parallelism."""

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self._theirs = theirs
        functools.update_wrapper(self, theirs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self._theirs).bind(*args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        parallel = asked["moe"].moe_parallel_config
        if not parallel.use_all2all_kernels or getattr(parallel, "use_passthrough_all2all", False):
            return self._theirs(*args, **kwargs)
        if asked["use_monolithic"] or not asked["allow_new_interface"]:
            what = "route tokens themselves" if asked["use_monolithic"] else "do not use vLLM's modular kernels"
            warnings.warn(
                f"EP_OPS_VLLM is 1, but the experts that vLLM chose {what}, so vLLM's own all-to-all is used for them."
                " --moe-backend triton chooses others.",
                RuntimeWarning,
                stacklevel=3,
            )
            return self._theirs(*args, **kwargs)
        if asked.get("all2all_manager") is not None or asked.get("eep_stage"):
            raise NotImplementedError("EP_OPS_VLLM is 1, which does not support elastic expert parallelism")
        return prepare_finalize(asked["moe"])


def prepare_finalize(moe: Any) -> PrepareAndFinalize | BatchedPrepareAndFinalize:
    """Return ep_ops' class for a layer with the configuration ``moe``, in the format that its experts take.

    Layers of equal sizes share a communicator; with dual batch overlap there is one for each micro-batch.
    """
    config, parallel = get_current_vllm_config(), moe.moe_parallel_config
    batches = config.parallel_config.num_ubatches if config.parallel_config.use_ubatching else 1
    first = _communicator(moe)
    comms = first, *(_communicator(moe, f"{first.name}-batch{batch}") for batch in range(1, batches))
    batched = parallel.use_batched_activation_format or getattr(moe, "moe_backend", "") == "batched_triton"
    kind = BatchedPrepareAndFinalize if batched else PrepareAndFinalize
    return kind(*comms, sp_size=parallel.sp_size, shared_experts=_has_shared_experts(config.model_config))


def _communicator(moe: Any, name: str = "") -> Communicator:
    return Communicator.shared(
        get_ep_group().device_group, num_experts=moe.num_experts, hidden_size=moe.hidden_dim,
        top_k=moe.experts_per_token, max_tokens_per_rank=moe.max_num_tokens, dtype=moe.in_dtype, name=name,
    )  # fmt: skip


def _has_shared_experts(model_config: Any) -> bool:
    """Return whether layers have shared experts. A wrong answer costs time: vLLM then runs them on a stream of its own,
    or combines are started and ended separately."""
    text = getattr(model_config, "hf_text_config", None)
    return any((getattr(text, name, None) or 0) > 0 for name in _SHARED)
