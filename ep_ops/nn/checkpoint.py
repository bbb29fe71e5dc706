"""State dicts of models whose experts are spread over ranks: saved by some number of ranks, loaded by another."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ep_ops.communicator import Communicator
from ep_ops.nn.parallel import expert_layers


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
            whole = state.pop(key, None)
            if whole is None:  # a buffer that is not saved
                continue
            if whole.dim() == 0 or whole.shape[0] != held:
                raise ValueError(
                    f"{key} has shape {tuple(whole.shape)}; allowed: {held} first, the experts of rank"
                    f" {comm.rank} of communicator {comm.name!r}"
                )
            state.update({f"{key}.{first + i}": whole[i] for i in range(held)})
    return state
