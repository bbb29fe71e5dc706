"""Hugging Face transformers (5.19 and later): shard the experts of a model's MoE layers over ranks.

With one call, on a model that every rank has loaded in full:

    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B")
    spread_experts(model, max_tokens_per_rank=4096)

or as an implementation of transformers' own expert parallelism (5.23 and later), which loads only the experts of each
rank:

    register(max_tokens_per_rank=4096)
    config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="ep_ops")  # ep_size defaults to 1
    model = AutoModelForCausalLM.from_pretrained(..., distributed_config=config)

In both cases the experts are computed as by the layer's own code, including biases and activations. With its
implementation "grouped_mm", the grouped GEMMs run on the rows as they are received (``local_experts.py``). Every rank
passes its own tokens, and all ranks run the same layers.

FP8 checkpoints keep their weights and scales. Without gradients, SwiGLU experts with blocks of 128 x 128 run
:func:`ep_ops.nn.few_rows_mlp_e4m3` on rows that are sent in e4m3, if the communicator's dtype is bfloat16 and
``max_tokens_per_rank`` is one for which ``gemms="auto"`` of :class:`ep_ops.nn.Experts` selects "memory", or on CPUs.
Other calls run transformers' own kernels, which need a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard

try:
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    from ep_ops.integrations.local_experts import GROUPED_ROWS, LocalExperts, give_interface, is_quantized
except ImportError as error:
    raise ImportError(
        f"ep_ops.integrations.transformers needs transformers 5.19, which failed to import: {error}. Install it with"
        " pip install 'transformers>=5.19,<6'."
    ) from error
try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ImportError as missing:
    _no_interface: ImportError | None = missing
    EPImplementation = object  # type: ignore[assignment, misc]
else:
    _no_interface = None

from ep_ops import registry
from ep_ops.arguments import device_of, group_of
from ep_ops.communicator import Communicator
from ep_ops.config import DTYPES
from ep_ops.formats import ELEMENT
from ep_ops.group.exchange import Exchange
from ep_ops.integrations.spread_checks import (
    check_all_save,
    check_equal,
    check_launch,
    check_optimizers,
    check_options,
    check_unwrapped,
    checksum,
    no_experts,
    raising_together,
)
from ep_ops.nn.apart import check_averaging, check_shards, parameters_apart
from ep_ops.nn.expert_module import LayerNumber, check_split, check_state, experts_dtensor
from ep_ops.nn.few_rows_e4m3 import FORMAT as E4M3
from ep_ops.nn.token_major import Rows, check_rows
from ep_ops.records import GROUPED, TOKEN_MAJOR

_TOP_K = "num_experts_per_tok", "top_k_experts", "moe_topk"
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules of experts whose parameters are known to be shards of this rank."""


def register(
    name: str = "ep_ops", *, max_tokens_per_rank: int, capacity: int | None = None, dtype: torch.dtype | None = None,
    rows: str = GROUPED, places: int | None = None, redispatch: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Register ep_ops as ``DistributedConfig(ep_size=..., ep_implementation=name)``.

    Args:
        name: name of the implementation.
        max_tokens_per_rank: the largest number of tokens (batch times length) that any rank passes through a layer.
        capacity: rows of a rank's receive buffer, a multiple of the alignment. Rows that do not fit are dropped; with
            ``overflow="raise"``, ``check_errors`` of the communicator raises. None: the worst case.
        dtype: dtype in which tokens are sent and experts are computed. Tokens and the experts' parameters (unless they
            are quantized) are cast to it, and the results to the dtype of the tokens. None: the dtype of the tokens,
            without casts.
        rows, places, redispatch: as for :class:`ep_ops.nn.Experts`. Token-major rows keep less for backward; they are
            for SiLU-gated experts without biases and norms, which :func:`ep_ops.nn.expert_mlp` computes. Then
            ``capacity`` counts copies of tokens.
        options: more arguments of :class:`ep_ops.Communicator`. Layers of equal sizes share one.

    Raises:
        TypeError: an option is unknown, or follows from the model.
        ImportError: transformers is older than 5.23 and has no implementations of expert parallelism.
    """
    if _no_interface is not None:
        raise ImportError(
            f"register needs transformers 5.23, which failed to import: {_no_interface}. Install it with"
            " pip install 'transformers>=5.23,<6', or use spread_experts."
        ) from _no_interface
    check_options("register", options)
    options |= {"max_tokens_per_rank": max_tokens_per_rank}
    how = Rows(rows, places, redispatch)
    made = functools.partial(EpOps, capacity=capacity, dtype=dtype, rows=how, options=options)
    EPImplementationInterface.register(name, made)


def spread_experts(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, max_tokens_per_rank: int, capacity: int | None = None,
    dtype: torch.dtype | None = None, rows: str = GROUPED, places: int | None = None, redispatch: bool = False,
    **options: Any,
) -> list[str]:  # fmt: skip
    """Keep this rank's experts of all MoE layers of ``model``, and send tokens to the ranks that hold their experts.

    Call it on all ranks of ``group``, with the same weights, in the final dtype and on the final device, before
    optimizers are created. On more than one rank the experts' parameters become DTensors of all experts, ``Shard(0)``
    over ``expert_mesh()`` of the communicator, as in :class:`ep_ops.nn.Experts`: checkpoints, optimizers and norms work
    as docs/training.md describes, and gradients are sums over the tokens of all ranks. ``save_pretrained`` gathers all
    experts on rank 0 and must be called on all ranks.

    Llama 4 is supported. Each expert computes the tokens that chose it; in the model's own code it computes all.

    If only some ranks find an error, the others raise a ValueError with the same text.

    Args:
        model: the model, changed in place.
        group: process group. None: the default group.
        max_tokens_per_rank, capacity, rows, places, redispatch, options: as for :func:`register`. ``top_k`` is required
            if the model's configuration does not contain it.
        dtype: as for :func:`register`; None: the dtype of the experts' parameters or, if they are quantized, of the
            model's first parameter that is not. For mixed precision, where parameters of float32 are computed in
            bfloat16, pass ``torch.bfloat16``.

    Returns:
        Names of the modules of experts, each of which has the attribute ``comm``.

    Raises:
        ValueError: there are no experts, top_k is unknown, the model was sharded before or has parametrized experts,
            weights differ between ranks, ``experts_per_rank`` is not the default, or ``rows`` is not allowed.
        TypeError: an option is unknown, or follows from the model.
        RuntimeError: an optimizer holds parameters of the experts, or a launcher has started several processes but
            ``torch.distributed`` is not initialized.
    """
    check_launch(group)
    for block in model.modules():
        if isinstance(block, Llama4TextMoe):
            _give_routing(block)
    options |= {"max_tokens_per_rank": max_tokens_per_rank}
    exchange, own = Exchange(group_of(group), device_of(None)), dict[str, int]()
    with raising_together(exchange):
        check_options("spread_experts", options)
        modules = _to_spread(model)
        how = Rows(rows, places, redispatch)
        forwards = {name: _Spread(capacity, LocalExperts(m, m.forward, dtype, how)) for name, m in modules.items()}
        asked = {name: _options(m, dtype, _plain_dtype(model), options) for name, m in modules.items()}
        if exchange.world_size > 1:
            check_optimizers({f"{name}.{last}": p for name, m in modules.items() for last, p in _of_experts(m).items()})
            own = {f"{name}.{last}": checksum(p) for name, m in modules.items() for last, p in m.named_parameters()}
    check_equal(exchange, own)
    comms = {name: Communicator.shared(group, **sizes) for name, sizes in asked.items()}
    with raising_together(exchange):
        _check_communicators(list(comms.values()), how)
    made: dict[nn.Parameter, nn.Parameter] = {}  # layers may share experts
    for name, experts in modules.items():
        _spread(experts, comms[name], forwards[name], made)
    _gather_to_save(model, next(iter(comms.values())))
    return list(modules)


def _check_communicators(comms: list[Communicator], how: Rows) -> None:
    """Raise ValueError if spread experts cannot use one of the communicators."""
    for comm in comms:
        check_split(comm, "spread_experts")
        check_rows(how, comm, False, "")


def _to_spread(model: nn.Module) -> dict[str, Any]:
    """Return the modules of experts by name. ValueError if there are none, or if one cannot be spread."""
    # transformers' modules of experts share an interface
    found = {
        name: m for name, m in model.named_modules() if hasattr(m, "_is_expert_parallel") and hasattr(m, "num_experts")
    }
    if not found:
        raise no_experts(model)
    for name, experts in found.items():
        if experts._is_expert_parallel:
            raise ValueError(f"{name} of {type(model).__name__} is already spread over ranks; call spread_experts once")
        check_unwrapped(name, experts)
    return found


def _plain_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the first parameter that is not quantized."""
    return next((p.dtype for p in model.parameters() if p.dtype in DTYPES), torch.bfloat16)


def _options(experts: Any, dtype: torch.dtype | None, other: torch.dtype, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the communicator of a module of experts. Modules with equal options share one. ``other``:
    dtype of rows for quantized experts."""
    parameter = next(experts.parameters())
    return options | {
        "num_experts": experts.num_experts,
        "hidden_size": experts.down_proj.shape[-1 if experts.is_transposed else -2],  # may differ from the model's
        "dtype": dtype or (other if is_quantized(experts) else parameter.dtype),
        "device": None if parameter.is_meta else parameter.device,
        "top_k": options.get("top_k") or _top_k(experts),
    }


def _of_experts(experts: Any) -> dict[str, nn.Parameter]:
    """Return the parameters with one entry for each expert."""
    return {name: p for name, p in experts.named_parameters(recurse=False) if p.shape[:1] == (experts.num_experts,)}


def _spread(experts: Any, comm: Communicator, forward: _Spread, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Shard one module of experts. ``made``: parameters that were sharded before, and those that replace them."""
    mine = slice(comm.first_local_expert, comm.first_local_expert + comm.num_local_experts)
    spread = _of_experts(experts)
    for name, whole in spread.items() if comm.world_size > 1 else ():
        if whole not in made:
            own = experts_dtensor(comm, whole.detach()[mine].clone())
            made[whole] = nn.Parameter(own, requires_grad=whole.requires_grad)
        setattr(experts, name, made[whole])
    experts.register_load_state_dict_pre_hook(check_state)
    experts.num_experts, experts._is_expert_parallel = comm.num_local_experts, True
    experts.forward = forward
    # The attributes of ep_ops.nn.ExpertModule. Other parameters, such as a norm after the experts, are alike on all
    # ranks.
    experts.comm, experts.gradient_divisor, experts.expert_names = comm, None, tuple(spread)
    experts.expert_parameters = functools.partial(parameters_apart, experts)
    experts.layer_number = LayerNumber(comm)


class _Spread:
    """The forward of a module whose experts are spread over ranks."""

    def __init__(self, capacity: int | None, local: LocalExperts) -> None:
        self.capacity, self.local = capacity, local

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self._check(torch.is_grad_enabled())
        given = hidden_states, top_k_index, top_k_weights
        return _through(self.local.module.comm, self.capacity, self.local, *given)

    @torch.compiler.assume_constant_result  # runs while torch.compile traces, and adds no guard
    def _check(self, gradients: bool) -> None:
        experts = self.local.module
        if experts not in _checked:
            check_shards(experts)
            _checked.add(experts)
        if gradients:
            check_averaging(experts, weights_given=True)


class EpOps(EPImplementation):
    """The implementation that :func:`register` registers.

    Ranks of a tensor-parallel group hold the same tokens, and each sends a part of them.
    """

    def __init__(
        self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any, *, capacity: int | None, dtype: torch.dtype | None,
        options: dict[str, Any], rows: Rows = GROUPED_ROWS,
    ) -> None:  # fmt: skip
        super().__init__(experts, ep_mesh, tp_mesh)
        self._capacity, self._options = capacity, options
        self._local = LocalExperts(experts, self.experts_forward, dtype, rows)
        self._comm: Communicator | None = None

    @torch.compiler.assume_constant_result  # called while torch.compile traces
    def _made(self, hidden_size: int, top_k: int, dtype: torch.dtype, device: torch.device) -> str:
        """Return the name of the communicator for these tokens, which may be created while torch.compile traces."""
        local: Any = self.num_local_experts
        options = {"top_k": top_k} | self._options
        return Communicator.shared(
            self.ep_mesh.get_group(), num_experts=local * self.ep_mesh.size(), hidden_size=hidden_size, dtype=dtype,
            device=device, **options,
        ).name  # fmt: skip

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self._comm is None or self._comm.destroyed:
            sizes = hidden_states.shape[-1], top_k_index.shape[-1]
            dtype = self._local.dtype or hidden_states.dtype
            found: Any = registry.get(self._made(*sizes, dtype, hidden_states.device))
            check_rows(self._local.rows, found, False, "")
            self._comm = found
        given: tuple[Tensor, ...] = hidden_states, top_k_index, top_k_weights
        parts = self.tp_mesh.size() > 1
        if parts:
            copies = [DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False) for t in given]
            given = tuple(t.redistribute(placements=[Shard(0)]).to_local().contiguous() for t in copies)
        out = _through(self._comm, self._capacity, self._local, *given)
        if parts:
            shape, stride = hidden_states.shape, hidden_states.stride()
            out = DTensor.from_local(out, self.tp_mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()
        return out


def _through(
    comm: Communicator, capacity: int | None, experts: LocalExperts, hidden_states: Tensor, top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:  # fmt: skip
    """Send tokens to their experts, through this rank's ``experts``, and back."""
    x = hidden_states.to(comm.dtype).contiguous()
    if experts.rows.layout == TOKEN_MAJOR:
        return experts.token_major(comm, x, top_k_index, top_k_weights, capacity).to(hidden_states.dtype)
    if not torch.is_grad_enabled() and experts.takes_codes(comm):
        sent = comm.dispatch(x, top_k_index, top_k_weights, capacity=capacity, format=E4M3.name)
        return comm.combine(experts.of_codes(sent, comm.world_size), sent.route, sent.weights).to(hidden_states.dtype)
    sent = comm.dispatch(x, top_k_index, top_k_weights, capacity=capacity)
    y, weights = experts(sent)
    return comm.combine(y.to(comm.dtype), sent.route, weights).to(hidden_states.dtype)


def _give_routing(block: Any) -> None:
    """Give Llama 4's experts the interface of other models' experts.

    Its layer multiplies a token by its scores, zero for experts that it did not choose, and sums the outputs of all
    experts. Experts map zeros to zeros, so the chosen ones suffice.
    """
    if not hasattr(block.experts, "weights_first"):
        give_interface(block.experts, block.top_k)
        block.forward = functools.partial(_llama4_forward, block)


def _llama4_forward(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Replace ``Llama4TextMoe.forward`` with the same results."""
    x = hidden_states.reshape(-1, block.hidden_dim)
    scores, logits = block.router(x)
    ids = logits.topk(block.top_k, dim=1).indices
    return block.shared_expert(x) + block.experts(x, ids, scores.gather(1, ids)), logits


def _gather_to_save(model: Any, comm: Communicator) -> None:
    """Let ``save_pretrained`` of the model save all experts."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = functools.partial(_save_whole, model, comm)


def _save_whole(model: Any, comm: Communicator, *args: Any, **kwargs: Any) -> Any:
    """Call ``save_pretrained`` with the state dict of all experts, unless a state dict or DTensors are to be saved."""
    save = type(model).save_pretrained
    given = inspect.signature(save).bind(model, *args, **kwargs).arguments
    if given.get("state_dict") is None and not given.get("distributed_checkpoint"):
        if comm.world_size > 1:
            check_all_save(comm)
        with _codes_as_bytes(model) as dtypes:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            whole: dict[str, Any] = get_model_state_dict(model, options=options)
        whole |= {name: whole[name].view(dtype) for name, dtype in dtypes.items() if name in whole}
        return save(**given | {"state_dict": whole})
    return save(model, *args, **kwargs)


@contextlib.contextmanager
def _codes_as_bytes(model: nn.Module) -> Iterator[dict[str, torch.dtype]]:
    """Replace DTensors of codes and of UE8M0 scales within the block by DTensors of bytes, which all backends of
    torch.distributed gather. Yield their names and dtypes."""
    found = {
        name: (model.get_submodule(name.rpartition(".")[0]), p)
        for name, p in model.named_parameters() if isinstance(p, DTensor) and p.dtype in (ELEMENT, torch.float8_e8m0fnu)
    }  # fmt: skip
    try:
        for name, (module, p) in found.items():
            local, shape, stride = p.to_local().detach().view(torch.uint8), p.shape, p.stride()
            codes = DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride)
            module._parameters[name.rpartition(".")[2]] = nn.Parameter(codes, requires_grad=False)
        yield {name: p.dtype for name, (_, p) in found.items()}
    finally:
        for name, (module, p) in found.items():
            module._parameters[name.rpartition(".")[2]] = p


def _top_k(experts: Any) -> int:
    """Return the number of experts of a token, which configurations store under different names."""
    if hasattr(experts, "top_k"):
        return experts.top_k
    sizes = experts.config.get_text_config()
    found = [value for name in _TOP_K if (value := getattr(sizes, name, None)) is not None]
    named = {number for value in found for number in (value if isinstance(value, list) else [value])}  # of each layer
    if len(named) != 1:
        given = f"has {sorted(named)}" if named else f"has none of {', '.join(_TOP_K)}"
        raise ValueError(f"top_k is not given, and {type(sizes).__name__} {given}; pass top_k")
    return named.pop()
