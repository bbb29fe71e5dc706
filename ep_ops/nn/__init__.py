"""Layers built on the operators: examples to copy from as much as modules to use."""

from ep_ops.nn.moe_layer import DenseMoE, MoELayer, choose_experts, grouped_mm, swiglu

__all__ = ["DenseMoE", "MoELayer", "choose_experts", "grouped_mm", "swiglu"]
