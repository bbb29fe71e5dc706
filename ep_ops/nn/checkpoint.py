"""Loading experts from checkpoints of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ep_ops.formats import ELEMENT
from ep_ops.nn.expert_module import AS_BYTES, fill_experts
from ep_ops.nn.experts import Experts
from ep_ops.records import wrong_type


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
        projections: names of the gate [F, H], up [F, H] and down [H, F] projections, which ".weight" follows, and for
            e4m3 experts also ".weight_scale_inv", with scales [F / 128, H / 128] and [H / 128, F / 128].

    Raises:
        ValueError: a tensor has another shape.
        TypeError: ``experts`` are not Experts; weights are e4m3, but those of ``experts`` are not, or vice versa; or a
            tensor holds integers.
    """

    if not hasattr(experts, "scale_names"):  # a wrapper, such as that of torch.compile, has the attributes of Experts
        raise wrong_type("experts", experts, Experts)

    def matrix(expert: int, projection: str, suffix: str, shape: tuple[int, ...], codes: bool) -> Tensor:
        name = f"{prefix}{expert}.{projection}.{suffix}"
        found = read(name)
        if found.shape != shape:
            raise ValueError(f"{name} has shape {tuple(found.shape)}; allowed: {shape}")
        if (found.dtype == ELEMENT) != codes:
            allowed = ELEMENT if codes else f"others than {ELEMENT}"
            raise TypeError(f"{name} has dtype {found.dtype}; allowed for experts of {experts.w_in.dtype}: {allowed}")
        if not found.is_floating_point():
            raise TypeError(f"{name} has dtype {found.dtype}; allowed: floating-point dtypes. {AS_BYTES}")
        return found

    def fill(weight: str, projections: Sequence[str], suffix: str) -> None:
        whole: Tensor = getattr(experts, weight)
        codes = whole.dtype == ELEMENT
        rows, columns = whole.shape[1:] if experts.scale_names else reversed(whole.shape[1:])
        shape = rows // len(projections), columns

        def joined(expert: int) -> Tensor:
            found = torch.cat([matrix(expert, one, suffix, shape, codes) for one in projections])
            return found if experts.scale_names else found.t()

        fill_experts(experts, weight, joined)

    gate, up, down = projections
    fill("w_in", (gate, up), "weight")
    fill("w_out", (down,), "weight")
    if experts.scale_names:
        fill("in_scales", (gate, up), "weight_scale_inv")
        fill("out_scales", (down,), "weight_scale_inv")
