"""Experts from checkpoints of other libraries, and state dicts of models whose experts are ordinary tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ep_ops.communicator import Communicator
from ep_ops.nn.experts import Experts, local_parts
from ep_ops.nn.parallel import expert_layers


def load_experts(
    experts: Experts, read: Callable[[str], Tensor], prefix: str,
    projections: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> None:  # fmt: skip
    """Fill this rank's experts from a checkpoint that has a matrix for each expert and projection, as Hugging Face's.

    Reads the experts of this rank only, one matrix at a time. Works on experts that FSDP2 has sharded, too.

    Args:
        experts: the module to fill.
        read: returns the tensor of a name: ``safetensors.safe_open(path, "pt").get_tensor``, or a function that knows
            in which of several files a name is.
        prefix: what stands before the expert's number, such as ``model.layers.3.mlp.experts.``
        projections: names of gate [F, H], up [F, H] and down [H, F]; ".weight" follows them.

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
    with torch.no_grad():
        for expert, local, part in local_parts(experts.w_in):
            halves = [matrix(expert, name, (inner, hidden)) for name in (gate, up)]
            local.copy_(torch.cat(halves, dim=1)[part])
        for expert, local, part in local_parts(experts.w_out):
            local.copy_(matrix(expert, down, (hidden, inner))[part])


def resharding_state_dict(model: nn.Module, comm: Communicator) -> dict[str, Any]:
    """``model.state_dict()`` with an entry for each expert of this rank: ``moe.w_in.17`` instead of ``moe.w_in``.

    For ``torch.distributed.checkpoint``: ``save`` it on all ranks, then, with however many ranks and experts per rank,
    ``load`` into another one: its entries share the memory of the model's parameters. What all ranks hold stays as it
    is, also where it is sharded (FSDP2); experts must not be.

    Args:
        comm: the communicator of the layers with experts of their own (:func:`expert_parameters`), which says which
            experts this rank has.

    ValueError for an expert parameter whose first dimension is not this rank's experts.
    """
    state = model.state_dict(keep_vars=True)
    # Wrappers of modules (checkpoint_wrapper) may leave themselves out of these names, and not of named_modules.
    key_of = {id(value): key for key, value in state.items()}
    state.update({key: value.detach() for key, value in state.items() if isinstance(value, Tensor)})
    first, held = comm.first_local_expert, comm.num_local_experts
    for prefix, layer in expert_layers(model):
        own = {id(p) for p in layer.expert_parameters()}  # type: ignore[operator]
        kept = [(name, p) for name, p in layer.named_parameters() if id(p) in own]
        for name, tensor in (*kept, *((name, b) for name, b in layer.named_buffers() if name == "dropped")):
            key = key_of.get(id(tensor), prefix + name)
            whole = state.get(key)
            if whole is None or isinstance(whole, DTensor):  # a buffer that is not saved; or all experts already
                continue
            state.pop(key)
            if whole.dim() == 0 or whole.shape[0] != held:
                raise ValueError(
                    f"{key} has shape {tuple(whole.shape)}; allowed: {held} first, the experts of rank"
                    f" {comm.rank} of communicator {comm.name!r}"
                )
            state.update({f"{key}.{first + i}": whole[i] for i in range(held)})
    return state
