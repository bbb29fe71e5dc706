"""Layers built on the operators, and row-wise operations between dispatch and combine."""

from ep_ops.nn.checkpoint import load_experts
from ep_ops.nn.expert_mlp import Computed, expert_mlp
from ep_ops.nn.expert_module import ExpertModule
from ep_ops.nn.experts import Experts
from ep_ops.nn.few_rows import few_rows_mlp
from ep_ops.nn.few_rows_e4m3 import few_rows_mlp_e4m3
from ep_ops.nn.grouped import TORCH, Gated, Gemms, grouped_mm, weights_gradient
from ep_ops.nn.interleave import interleave
from ep_ops.nn.lists import ExpertLists, expert_lists, gather_rows, reduce_rows
from ep_ops.nn.live_rows import swiglu_quantized, swiglu_rows
from ep_ops.nn.losses import expert_counts, load_balancing_loss, router_z_loss, update_expert_bias_
from ep_ops.nn.moe_layer import DenseMoE, MoELayer, Routing, swiglu
from ep_ops.nn.parallel import clip_grad_norm_, dropped_rows, expert_parameters, keep_experts_apart
from ep_ops.nn.per_expert import expert_of_rows, mask_rows, of_rows
from ep_ops.nn.places import gather_mm, places_route, weights_of_places
from ep_ops.nn.routing import Routed, Router
from ep_ops.nn.scaled import scaled_grouped_mm
from ep_ops.overflow import recomputing

__all__ = [
    "TORCH", "Computed", "DenseMoE", "ExpertLists", "ExpertModule", "Experts", "Gated", "Gemms", "MoELayer", "Routed",
    "Router", "Routing", "clip_grad_norm_", "dropped_rows", "expert_counts", "expert_lists", "expert_mlp",
    "expert_of_rows", "expert_parameters", "few_rows_mlp", "few_rows_mlp_e4m3", "gather_mm", "gather_rows",
    "grouped_mm", "interleave", "load_experts", "keep_experts_apart", "load_balancing_loss", "mask_rows", "of_rows",
    "places_route", "recomputing", "reduce_rows", "router_z_loss", "scaled_grouped_mm", "swiglu",
    "swiglu_quantized", "swiglu_rows", "update_expert_bias_", "weights_gradient", "weights_of_places",
]  # fmt: skip
