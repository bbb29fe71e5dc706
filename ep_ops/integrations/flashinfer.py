"""flashinfer 0.7.2: a communication backend for its expert-parallel layers (``flashinfer.moe_ep``), named "ep_ops".

    from flashinfer.moe_ep import MoEEpLayer, SplitConfig

    from ep_ops.integrations.flashinfer import EpOpsConfig

    layer = MoEEpLayer(bootstrap, fleet_params, weights, backend=SplitConfig(comm=EpOpsConfig()))

Importing this module registers the backend. Activations are bfloat16, float16, DeepSeekFp8 or MXFP8. Sizes do not
depend on the routing and the host is not synchronized, as CUDA graphs require. Not tested on GPUs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

try:
    from flashinfer.moe_ep.core.comm import MoEEpCommunication, MoEEpDispatchResult, register_communication
except ImportError as error:
    raise ImportError(
        f"ep_ops.integrations.flashinfer needs flashinfer 0.7.2, which failed to import: {error}. Install it with"
        " pip install 'flashinfer-python>=0.7.2,<0.8'."
    ) from error

from ep_ops.communicator import Communicator
from ep_ops.records import Dispatched

_FORMATS = {"BF16": "", "FP16": "", "DeepSeekFp8": "e4m3/128/fp32", "MXFP8": "e4m3/32/mx"}
_users: Counter[str] = Counter()
"""By name of a communicator: how many backends use it."""


@dataclass
class EpOpsConfig:
    """Configuration of the backend, for ``SplitConfig(comm=EpOpsConfig())``.

    Args:
        options: more arguments of :class:`ep_ops.Communicator`. Layers of equal sizes share one.
    """

    backend_name: ClassVar[str] = "ep_ops"
    options: dict[str, Any] = field(default_factory=dict)


@register_communication("ep_ops")
class EpOpsCommunication(MoEEpCommunication):
    """flashinfer's contract on token-major rows: W * tokens_per_rank rows, one for each (token, rank), ordered by
    source rank and token.

    Args:
        bootstrap: flashinfer's ``BootstrapConfig``; its ``process_group`` is the group of expert parallelism.
        params: flashinfer's ``MoEEpCommParams``.
        config: configuration of the backend.

    Raises:
        ValueError: ``params.dispatch_format`` is not supported.
    """

    def __init__(self, bootstrap: Any, params: Any, config: EpOpsConfig | None = None) -> None:
        super().__init__(bootstrap, params)
        name = "BF16" if params.dispatch_format is None else params.dispatch_format.name
        if name not in _FORMATS:
            raise ValueError(f"dispatch_format is {name}; allowed: None, {', '.join(_FORMATS)}")
        self._name, self._format = name, _FORMATS[name]
        self._sent: Dispatched | None = None
        self.comm = Communicator.shared(
            bootstrap.process_group, num_experts=params.num_experts, hidden_size=params.hidden_size, top_k=params.top_k,
            max_tokens_per_rank=params.max_tokens_per_rank, dtype=params.token_dtype,
            **(config.options if config is not None else {}),
        )  # fmt: skip
        self._destroyed = False
        _users[self.comm.name] += 1

    @classmethod
    def is_platform_supported(cls) -> bool:
        """Return True: where kernels cannot run, the communicator uses the reference backend."""
        return True

    def dispatch(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor | None = None, *,
        hidden_states_scale: Tensor | None = None, max_tokens_per_rank: int | None = None,
        eplb_local_stats: Tensor | None = None,
    ) -> MoEEpDispatchResult:  # fmt: skip
        """Send each token to the ranks of its experts.

        Args:
            hidden_states: [T, H] in the communicator's dtype, or float8_e4m3fn with scales.
            topk_ids: global expert ids, int32 or int64 [T, K].
            topk_weights: float32 [T, K], or None.
            hidden_states_scale: float32 [T, H / 128] for DeepSeekFp8, float8_e8m0fnu [T, H / 32] for MXFP8.
            max_tokens_per_rank: bound on T in this call, the same on all ranks. None: that of the parameters.
            eplb_local_stats: not supported.

        Returns:
            MoEEpDispatchResult: ids of other ranks' experts, and of rows without a token, are ``invalid_expert_id``;
            such rows are undefined.

        Raises:
            RuntimeError: ``dispatch`` was called twice without a ``combine``.
            NotImplementedError: ``eplb_local_stats`` is given.
            ValueError: scales are missing or not expected.
        """
        if self._sent is not None:
            raise RuntimeError("dispatch was called twice; every dispatch needs a combine before the next dispatch")
        if eplb_local_stats is not None:
            raise NotImplementedError("eplb_local_stats is given, which ep_ops does not gather; pass None")
        if hidden_states_scale is None and self._format:
            raise ValueError(f"hidden_states_scale is None; dispatch_format {self._name} needs scales")
        if hidden_states_scale is not None and not self._format:
            raise ValueError(
                "hidden_states_scale is given; dispatch_format is None, BF16 or FP16, which have no scales"
            )
        tokens = self.params.max_tokens_per_rank if max_tokens_per_rank is None else max(1, max_tokens_per_rank)
        sent = self.comm.dispatch(
            hidden_states, topk_ids, topk_weights, layout="token_major", max_tokens=tokens,
            scales=hidden_states_scale, format=self._format,
        )  # fmt: skip
        assert sent.local_idx is not None
        own = sent.local_idx + self.comm.first_local_expert
        ids = torch.where(sent.local_idx >= 0, own, self.params.invalid_expert_id)
        self._sent = sent
        return MoEEpDispatchResult(sent.x, ids, sent.weights, tokens, sent.scales)

    def combine(self, expert_output: Tensor, *, output: Tensor | None = None) -> Tensor:
        """Return to each token the sum of its rows over ranks.

        Args:
            expert_output: [W * tokens_per_rank, H] or [W, tokens_per_rank, H], weighted and summed over the experts of
                this rank. Rows without a token are not read.
            output: [T, H], which receives the result. None: a new tensor.

        Returns:
            Tensor: [T, H] in the communicator's dtype, or ``output``.

        Raises:
            RuntimeError: there was no ``dispatch`` before.
        """
        if self._sent is None:
            raise RuntimeError("combine was called before dispatch")
        sent, self._sent = self._sent, None
        out = self.comm.combine(expert_output.reshape(-1, expert_output.shape[-1]), sent.route)
        return out if output is None else output.copy_(out)

    def destroy(self) -> None:
        """Destroy the communicator if no other backend uses it. Collective; repeated calls have no effect."""
        if self._destroyed:
            return
        self._destroyed = True
        _users[self.comm.name] -= 1
        if not _users[self.comm.name]:
            self.comm.destroy()
