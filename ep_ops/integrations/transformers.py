"""Hugging Face transformers (5.23 and later): the experts of a model's MoE layers spread over ranks.

With one call, on a model that is there in full on every rank:

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B")
    spread_experts(model, max_tokens_per_rank=4096)

or as an implementation of transformers' own expert parallelism, which loads only the experts of each rank:

    register(max_tokens_per_rank=4096)
    config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="ep_ops")  # ep_size: 1 unless it is given
    model = AutoModelForCausalLM.from_pretrained(..., distributed_config=config)

In both, a layer's own code computes the experts, biases and activations included; what is replaced is how their tokens
come and go. Every rank passes its own tokens, and all ranks run the same layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from ep_ops import registry
from ep_ops.communicator import Communicator
from ep_ops.nn import expert_of_rows

_TOP_K = "num_experts_per_tok", "top_k_experts", "moe_topk"


def register(name: str = "ep_ops", *, max_tokens_per_rank: int, capacity: int | None = None, **options: Any) -> None:
    """From now on ``DistributedConfig(ep_size=..., ep_implementation=name)`` takes this library.

    Args:
        max_tokens_per_rank: the most tokens (batch times length) that any rank passes through a layer.
        capacity: rows of a rank's receive buffer, a multiple of the alignment; rows that do not fit are dropped, of
            which ``check_errors`` of the communicator tells with ``overflow="raise"``. None: the worst case.
        options: more arguments of :class:`ep_ops.Communicator`. Layers of equal sizes share one.
    """
    options |= {"max_tokens_per_rank": max_tokens_per_rank}
    EPImplementationInterface.register(name, functools.partial(EpOps, capacity=capacity, options=options))


def spread_experts(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, max_tokens_per_rank: int, capacity: int | None = None,
    **options: Any,
) -> list[str]:  # fmt: skip
    """Leaves each rank of ``group`` (None: the default group) its share of the experts of all MoE layers of ``model``,
    and has their tokens sent there. Call it on all ranks, where the model has the same weights, in the dtype and on the
    device that it is to run in, before optimizers are made. Arguments as for :func:`register`; ``top_k``, experts that
    a token names, where the model's configuration does not say. Returns the names of the layers' experts; ValueError
    if there are none, or if nobody says top_k.

    Gradients of the experts then hold the tokens of all ranks (see ``ep_ops.nn.keep_experts_apart``).
    ``save_pretrained`` of ``model`` raises a NotImplementedError unless it is given a ``state_dict``: this rank's has a
    part of the experts.
    """
    found = [name for name, module in model.named_modules() if _is_experts(module)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts that transformers would spread over ranks")
    for name in found:
        if model.get_submodule(name)._is_expert_parallel:
            raise ValueError(f"{name} of {type(model).__name__} is spread over ranks already; allowed: once")
    options |= {"max_tokens_per_rank": max_tokens_per_rank}
    for name in found:
        experts: Any = model.get_submodule(name)
        parameter = next(experts.parameters())
        top_k = options.get("top_k") or _top_k(experts)
        comm = Communicator.shared(
            group, num_experts=experts.num_experts, hidden_size=_hidden_size(experts), dtype=parameter.dtype,
            device=parameter.device, **options | {"top_k": top_k},
        )  # fmt: skip
        mine = slice(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
        whole = dict(experts.named_parameters(recurse=False))
        spread = [held for held, p in whole.items() if p.shape[:1] == (comm.num_experts,)]
        for held in spread:
            own = nn.Parameter(whole[held].detach()[mine].clone(), requires_grad=whole[held].requires_grad)
            setattr(experts, held, own)
        experts.num_experts, experts._is_expert_parallel = comm.num_local_experts, True
        own_experts = functools.partial(_through, comm, capacity, experts, experts.forward)
        experts.forward = own_experts
        experts.expert_parameters = functools.partial(_parameters, experts, spread)
        experts.comm = comm
    saves: Any = model
    if hasattr(model, "save_pretrained"):
        saves.save_pretrained = functools.partial(_save_whole, model, type(saves).save_pretrained)
    return found


class EpOps(EPImplementation):
    """See :func:`register`. Ranks of a tensor-parallel group hold the same tokens: each sends a part of them."""

    def __init__(
        self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any, *, capacity: int | None, options: dict[str, Any]
    ) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._experts, self._capacity, self._options = experts, capacity, options
        self._comm: Communicator | None = None

    @torch.compiler.assume_constant_result  # it is made while torch.compile traces, where that is the first call
    def _made(self, hidden_size: int, top_k: int, dtype: torch.dtype, device: torch.device) -> str:
        """The name of the communicator for such tokens."""
        local: Any = self.num_local_experts
        return Communicator.shared(
            self.ep_mesh.get_group(), num_experts=local * self.ep_mesh.size(), hidden_size=hidden_size, top_k=top_k,
            dtype=dtype, device=device, **self._options,
        ).name  # fmt: skip

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self._comm is None or self._comm.destroyed:
            sizes = hidden_states.shape[-1], top_k_index.shape[-1]
            found: Any = registry.get(self._made(*sizes, hidden_states.dtype, hidden_states.device))
            self._comm = found
        given: tuple[Tensor, ...] = hidden_states, top_k_index, top_k_weights
        parts = self.tp_mesh.size() > 1
        if parts:
            copies = [DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False) for t in given]
            given = tuple(t.redistribute(placements=[Shard(0)]).to_local().contiguous() for t in copies)
        out = _through(self._comm, self._capacity, self._experts, self.experts_forward, *given)
        if parts:
            shape, stride = hidden_states.shape, hidden_states.stride()
            out = DTensor.from_local(out, self.tp_mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()
        return out


def _through(
    comm: Communicator, capacity: int | None, experts: Any, forward: Callable[..., Tensor], hidden_states: Tensor,
    top_k_index: Tensor, top_k_weights: Tensor,
) -> Tensor:  # fmt: skip
    """The tokens to their experts, through these, and back. ``forward``: of this rank's ``experts``."""
    sent = comm.dispatch(hidden_states.contiguous(), top_k_index, top_k_weights, capacity=capacity)
    expert = expert_of_rows(sent.route)
    there = (expert >= 0).unsqueeze(1)
    # Rows that nobody owns are undefined. The layer's code skips an expert of the number that there are; its eager loop
    # does not in all models, and computes a row of zeros with weight zero.
    rows = torch.where(there, sent.x, 0)
    nobody = 0 if experts.config._experts_implementation == "eager" else comm.num_local_experts
    ids = torch.where(there, expert.unsqueeze(1), nobody)
    if comm.num_local_experts:
        y = forward(rows, ids, there.to(rows.dtype))
    else:  # no rows, which not all implementations take; they hang on the parameters, lest others wait in backward
        y = rows + sum(parameter.sum() for parameter in experts.parameters()).to(rows.dtype)
    if torch.is_grad_enabled():  # nor is the gradient of such rows defined, which a weight of zero does not stop
        y = torch.where(there, y, 0)
    return comm.combine(y, sent.route, sent.weights)


def _parameters(experts: nn.Module, spread: list[str]) -> list[nn.Parameter]:
    """Those that were spread: others (a norm behind the experts) all ranks hold."""
    return [experts.get_parameter(name) for name in spread]


def _save_whole(model: nn.Module, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``save_pretrained``, of what has all experts."""
    if (args[2] if len(args) > 2 else kwargs.get("state_dict")) is None:
        raise NotImplementedError(
            "save_pretrained would save the experts of one rank alone; allowed: state_dict=, of all of them, or"
            " torch.distributed.checkpoint of ep_ops.nn.resharding_state_dict"
        )
    return save(model, *args, **kwargs)


def _is_experts(module: nn.Module) -> bool:
    """Whether it is one of transformers' modules of experts, which share one interface."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "num_experts")


def _hidden_size(experts: Any) -> int:
    """Elements of a row, of which some models' experts have fewer than their other layers."""
    return experts.down_proj.shape[-1 if experts.is_transposed else -2]


def _top_k(experts: Any) -> int:
    """Experts that a token names, by whichever of its names the model's configuration has it."""
    sizes = experts.config.get_text_config()
    found = [value for name in _TOP_K if (value := getattr(sizes, name, None)) is not None]
    told = {number for value in found for number in (value if isinstance(value, list) else [value])}  # of each layer
    if len(told) != 1:
        given = f"tells {sorted(told)}" if told else f"has none of {', '.join(_TOP_K)}"
        raise ValueError(f"top_k is not given, and {type(sizes).__name__} {given}; allowed: an int, if it is given")
    return told.pop()
