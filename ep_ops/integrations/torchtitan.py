"""torchtitan 0.3: a token dispatcher for its MoE layers, for training and generation.

It works in eager mode, compiled and in CUDA graphs: sizes are fixed, the host is not synchronized, and gradients reach
tokens and scores. In a function that makes a trainer's configuration:

    config = deepseek_v3_16b()
    use_ep_ops(config)
    config.training.disable_cuda_graphs = False

or for each layer: ``RoutedExperts.Config(token_dispatcher=EpOpsTokenDispatcher.Config(num_experts=64, top_k=6), ...)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

try:
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.config.override import derive
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, HybridEPTokenDispatcher
except ImportError as error:
    raise ImportError(
        f"ep_ops.integrations.torchtitan needs torchtitan 0.3, which failed to import: {error}. Install it with"
        " pip install 'torchtitan>=0.3,<0.4' (and triton, where torch comes without it)."
    ) from error

from ep_ops.communicator import Communicator
from ep_ops.nn import recomputing
from ep_ops.operators import SAVE_FOR_CHECKPOINT
from ep_ops.records import Dispatched


class EpOpsTokenDispatcher(BaseEPTokenDispatcher):
    """Dispatch and combine of T tokens of each rank, the same number on all ranks of the EP mesh.

    ``dropped`` (int64 [local experts], on the device) counts the rows of each local expert that did not fit since the
    mesh was wired. Recomputation by activation checkpointing is not counted again.
    """

    dropped: Tensor

    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):
        """Configuration of the dispatcher.

        It is a HybridEP configuration, because torchtitan fills in sizes and allows CUDA graphs for known classes only.
        The inherited fields have the same meaning.

        Args:
            num_experts, top_k: number of experts of all ranks, a multiple of the EP mesh's size; experts of a token.
            hidden_dim: elements of a token. None: the model's ``dim``, from ``update_from_config``.
            num_max_tokens_per_rank: the largest number of tokens that any rank passes. None: ``local_batch_size *
                seq_len`` divided by the degrees of context and tensor parallelism, from ``update_from_config``.
            non_blocking_capacity_factor: rows of a rank as a part of the worst case, in (0, 1]; what does not fit is
                dropped and counted. None or 1: the worst case, in which every token names ``min(top_k, local experts)``
                experts of this rank. (With None torchtitan's trainer does not allow CUDA graphs.)
            pad_multiple: each expert's rows are padded with zeros to a multiple of it, which quantized experts need;
                counts include them. None: no padding.
            dtype: dtype of the tokens, "bfloat16", "float32" or "float16", as ``training.mixed_precision_param``.
            options: more arguments of :class:`ep_ops.Communicator`. Layers of equal sizes share one. (Its errors name
                ``hidden_dim``, ``num_max_tokens_per_rank`` and ``pad_multiple`` as hidden_size, max_tokens_per_rank and
                alignment.)
        """

        non_blocking_capacity_factor: float | None = 1.0
        dtype: str = "bfloat16"
        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        factor = 1.0 if config.non_blocking_capacity_factor is None else config.non_blocking_capacity_factor
        if not isinstance(factor, (int, float)) or not 0 < factor <= 1:
            raise ValueError(f"non_blocking_capacity_factor is {factor!r}; allowed: None or in (0, 1]")
        if config.dtype not in TORCH_DTYPE_MAP:
            raise ValueError(f"dtype is {config.dtype!r}; allowed: one of {', '.join(map(repr, TORCH_DTYPE_MAP))}")
        self.config, self._factor = config, factor
        self._comm: Communicator | None = None

    def init_buffer(self) -> None:
        """Create or find the communicator. Collective over the EP mesh, which ``wire_meshes`` has set."""
        config, mesh = self.config, self.ep_mesh
        if mesh is None:
            raise ValueError("ep_mesh is None; EpOpsTokenDispatcher needs expert_parallel_degree > 1")
        if config.num_experts % mesh.size():
            raise ValueError(
                f"num_experts is {config.num_experts}; allowed: a multiple of the EP mesh's size, {mesh.size()}"
            )
        for name in ("hidden_dim", "num_max_tokens_per_rank"):
            if getattr(config, name) is None:
                raise ValueError(
                    f"{name} is None; give EpOpsTokenDispatcher.Config an int, or have the model configuration's"
                    " update_from_config fill it in before the model is built"
                )
        self._comm = comm = Communicator.shared(
            mesh.get_group(), num_experts=config.num_experts, hidden_size=config.hidden_dim, top_k=config.top_k,
            max_tokens_per_rank=config.num_max_tokens_per_rank, dtype=TORCH_DTYPE_MAP[config.dtype],
            alignment=1 if config.pad_multiple is None else config.pad_multiple, **config.options,
        )  # fmt: skip
        self.dropped = torch.zeros(comm.num_local_experts, dtype=torch.int64, device=comm.device)

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Dispatched]:
        """Return rows [R, D] by local expert, undefined after the last; rows of each expert, int32 [local experts];
        metadata."""
        comm, tokens, capacity = self._comm, x_TD.shape[0], None
        if comm is None:
            raise RuntimeError("dispatch was called before wire_meshes, which creates the communicator")
        if self._factor < 1:
            capacity = math.ceil(comm.capacity(tokens) * self._factor / comm.alignment) * comm.alignment
        sent = comm.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK, capacity=capacity, max_tokens=tokens, zeros=True)
        if capacity is not None and not recomputing():
            self.dropped.add_(sent.dropped)
        # torchtitan's cumulative sums of counts must be `offs`, which includes padding.
        counts = torch.diff(sent.route.offs, prepend=sent.route.offs.new_zeros(1))
        return sent.x, counts, sent

    def combine(self, routed_output_RD: Tensor, metadata: Dispatched, x_TD: Tensor) -> Tensor:
        """Return the sum of each token's rows times their scores, [T, D], in float32 and in a fixed order."""
        assert self._comm is not None
        return self._comm.combine(routed_output_RD, metadata.route, metadata.weights)


class SaveDispatch(SelectiveAC):
    """torchtitan's selective activation checkpointing that also saves dispatched rows instead of sending them again.

    Other policies can add ``ep_ops.operators.SAVE_FOR_CHECKPOINT`` in their ``get_save_ops``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | set(SAVE_FOR_CHECKPOINT)


def use_ep_ops(config: Any, *, capacity_factor: float = 1.0, **fields: Any) -> list[str]:
    """Configure all MoE layers to dispatch with ep_ops, and ``SelectiveAC`` to save dispatched rows.

    Call it after converters (quantization) and before the model is built.

    Args:
        config: a ``Trainer.Config`` or a model's configuration, changed in place.
        capacity_factor: ``non_blocking_capacity_factor`` of :class:`EpOpsTokenDispatcher`'s Config.
        fields: more fields of that Config.

    Returns:
        Names of the layers' routed experts.

    Raises:
        ValueError: there are none.
    """
    found = []
    for name, experts, _, _ in config.traverse(RoutedExperts.Config):
        experts.token_dispatcher = derive(
            experts.token_dispatcher, EpOpsTokenDispatcher.Config, non_blocking_capacity_factor=capacity_factor,
            **{"dtype": "bfloat16", "hidden_dim": experts.inner_experts.dim} | fields,
        )  # fmt: skip
        found.append(name)
    if not found:
        raise ValueError(f"{type(config).__qualname__} has no RoutedExperts.Config inside")
    for _, policy, parent, name in list(config.traverse(SelectiveAC.Config)):
        if type(policy) is SelectiveAC.Config:
            setattr(parent, name, derive(policy, SaveDispatch.Config))
    return found
