"""Layers built on the operators, to copy from as much as to use, and row-wise operations between them."""

from ep_ops.nn.checkpoint import resharding_state_dict
from ep_ops.nn.moe_layer import DenseMoE, MoELayer, choose_experts, grouped_mm, swiglu
from ep_ops.nn.parallel import clip_grad_norm_, expert_parameters, keep_experts_apart
from ep_ops.nn.recompute import recomputing
from ep_ops.nn.rows import expert_of_rows, of_rows

__all__ = [
    "DenseMoE", "MoELayer", "choose_experts", "clip_grad_norm_", "expert_of_rows", "expert_parameters", "grouped_mm",
    "keep_experts_apart", "of_rows", "recomputing",
    "resharding_state_dict", "swiglu",
]  # fmt: skip
