"""Loading experts from checkpoints of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ep_ops.nn.expert_module import fill_experts
from ep_ops.nn.experts import Experts


def load_experts(
    experts: Experts, read: Callable[[str], Tensor], prefix: str,
    projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> None:  # fmt: skip
    """Fill this rank's experts from a checkpoint with one matrix for each expert and projection, such as Hugging
    Face's.

    Reads only the experts of this rank, one matrix at a time. Experts that FSDP2 has sharded can be filled as well. If
    ``torch.nn.utils.parametrize`` parametrizes the weights, the original weights are filled: as they are for low-rank
    adapters, or with what ``right_inverse`` returns.

    Args:
        experts: the module to fill.
        read: function that returns the tensor with a given name, such as
            ``safetensors.safe_open(path, "pt").get_tensor``.
        prefix: the name up to the expert's number, such as ``model.layers.3.mlp.experts.``
        projections: names of the gate [F, H], up [F, H] and down [H, F] projections, which ".weight" follows.

    Raises:
        ValueError: a tensor has another shape.
    """

    def matrix(expert: int, projection: str, shape: tuple[int, int]) -> Tensor:
        name = f"{prefix}{expert}.{projection}.weight"
        found = read(name)
        if found.shape != shape:
            raise ValueError(f"{name} has shape {tuple(found.shape)}; allowed: {shape}")
        return found.t()

    gate, up, down = projections
    inner, hidden = experts.w_out.shape[1:]

    def gate_and_up(expert: int) -> Tensor:
        return torch.cat([matrix(expert, name, (inner, hidden)) for name in (gate, up)], dim=1)

    fill_experts(experts, "w_in", gate_and_up)
    fill_experts(experts, "w_out", lambda expert: matrix(expert, down, (hidden, inner)))
