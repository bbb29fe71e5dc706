"""Modules that hold the experts of one rank, which data parallelism must not average or replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ep_ops.communicator import Communicator
from ep_ops.config import default_experts
from ep_ops.formats import ELEMENT
from ep_ops.nn import unsupported
from ep_ops.nn.apart import check_averaging, check_shards, parameters_apart


class LayerNumber(int):
    """The number of a layer among those of its communicator, for checking mode (backends/checked.py). A copy, or what
    is unpickled, is the next number."""

    comm: Communicator

    def __new__(cls, comm: Communicator) -> LayerNumber:
        made = super().__new__(cls, next(comm.layers))
        made.comm = comm
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerNumber:
        return LayerNumber(self.comm)

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, (int(self),)) if self.comm.destroyed else (LayerNumber, (self.comm,))


class ExpertModule(nn.Module):
    """Mixin for modules that hold this rank's experts; :class:`Experts` is one.

    It creates parameters of all experts that are sharded over the ranks, and reads this rank's shards. The gradient of
    an expert is a sum over the tokens of all ranks. A module that sets ``gradient_divisor`` divides the gradients of
    all weights that it reads with :meth:`local_weight`, for example to match other parameters, whose gradients data
    parallelism averages. :func:`keep_experts_apart` sets the divisor of all modules of a model.
    docs/own-experts.md shows an example.

    A subclass sets ``self.comm``, creates each parameter with :meth:`from_local`, and reads it with
    :meth:`local_weight`.

    Attributes:
        comm (Communicator): determines which experts this rank holds.
        gradient_divisor (int | None): number by which the gradients of the experts are divided. None: not set, and
            gradients are sums. FSDP2 raises an error for a module without a divisor, unless FSDP2 divides the gradients
            itself; 1 keeps the sums.
        expert_names (tuple[str, ...] | None): names of the parameters, buffers and submodules of which each rank holds
            different values. None: all of this module. Set it in a module that also holds a router or other values
            that all ranks share.
    """

    comm: Communicator
    layer_number: LayerNumber | None = None
    gradient_divisor: int | None = None
    expert_names: tuple[str, ...] | None = None

    def from_local(self, local: Tensor) -> Tensor:
        """Return the DTensor of all experts whose shard on this rank is ``local`` [El, ...]; on one rank, ``local``.

        Use it for all parameters with one entry for each expert, such as matrices, biases and adapters, and for such
        buffers: torch.distributed.checkpoint saves an ordinary tensor of one rank only. Differentiable. Gradients of
        matrices that are the transpose of contiguous ones, on all ranks, have the same strides.

        Raises:
            ValueError: the communicator does not split experts as DTensors do, or :meth:`Communicator.shrink` has
                removed some of its experts.
        """
        check_split(self.comm, type(self).__name__)
        if self.layer_number is None:
            self.layer_number = LayerNumber(self.comm)
        return experts_dtensor(self.comm, local)

    def local_weight(self, name: str, convert: bool = True) -> Tensor:
        """Return this rank's experts [El, ...] of a parameter, in the communicator's dtype.

        The gradient of the parameter is divided by ``gradient_divisor``.

        Args:
            name: name of the parameter, which may be parametrized (``torch.nn.utils.parametrize``).
            convert: False: return them in the dtype of the parameter, as for codes and scales.

        Raises:
            ValueError: FSDP2 averages the gradients of other parameters around this module, but nothing divides those
                of the experts; or the parameter is the shard of another rank.
            RuntimeError: the parameter is not a shard of this rank's experts.
        """
        weight = getattr(self, name)
        if torch.is_grad_enabled() and weight.requires_grad:
            self._check_averaging()
        local = local_part(self, weight)
        if local.shape != (self.comm.num_local_experts, *weight.shape[1:]):
            raise RuntimeError(
                f"{name} has local shape {tuple(local.shape)}; allowed:"
                f" {(self.comm.num_local_experts, *weight.shape[1:])}. FSDP2 gathers parameters when the module is"
                " called; around steps() call unshard() and reshard()"
            )
        return local.to(self.comm.dtype) if convert else local

    def expert_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of which each rank holds a different part."""
        return parameters_apart(self)

    @torch.compiler.assume_constant_result  # runs while torch.compile traces, and adds no guard
    def _check_averaging(self) -> None:
        check_averaging(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        unsupported.watch()  # no layer may have been created in this process
        check_shards(self)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        check_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def local_part(module: Any, weight: Tensor) -> Tensor:
    """Return this rank's shard of a parameter of ``module``; its gradient is divided by ``gradient_divisor``."""
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    divisor = getattr(module, "gradient_divisor", None)
    divisor = 1 if divisor is None else divisor
    if (divisor == 1 and local is weight) or not (torch.is_grad_enabled() and local.requires_grad):
        return local
    return _LocalGradient.apply(local, divisor)


class _LocalGradient(torch.autograd.Function):
    """The identity, whose backward divides the gradient and gives it the strides that :func:`experts_dtensor` states.

    The gradient becomes a DTensor. If its strides differ from those of the parameter, accumulating it may redistribute
    it, which is collective, but strides can differ on one rank alone, such as a rank without experts.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, divisor: int) -> Tensor:
        ctx.divisor, ctx.transposed = divisor, transposed(weight)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad if ctx.divisor == 1 else grad / ctx.divisor
        if ctx.transposed:
            return grad.transpose(1, 2).contiguous().transpose(1, 2), None
        if grad.numel() and grad.is_contiguous():
            return grad, None
        return grad.clone(memory_format=torch.contiguous_format), None  # an empty tensor can have strides of 0


AS_BYTES = "Bytes of E8M0 scales are viewed as torch.float8_e8m0fnu"


def check_state(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Check the tensors that a state dict has for the experts in ``module``.

    Raises:
        TypeError: a tensor is ordinary, but the parameter is a DTensor, or vice versa; or one is e4m3, or holds
            integers, and the other does not.
        ValueError: a DTensor is the shard of another rank.
    """
    for name, parameter in module.named_parameters():
        given = state.get(prefix + name)
        if not isinstance(given, Tensor):
            continue
        if (given.dtype == ELEMENT) != (parameter.dtype == ELEMENT):
            raise TypeError(
                f"{prefix}{name} has dtype {given.dtype}; allowed: {parameter.dtype}, the dtype of the parameter. e4m3"
                " numbers have scales, with which load_state_dict does not multiply or divide"
            )
        if given.is_floating_point() != parameter.is_floating_point():
            raise TypeError(
                f"{prefix}{name} has dtype {given.dtype}; allowed: {parameter.dtype}, the dtype of the parameter, or"
                f" another one of the same kind. {AS_BYTES}"
            )
        if isinstance(parameter, DTensor) and not isinstance(given, DTensor):
            raise TypeError(
                f"{prefix}{name} is a {type(given).__name__}, but the parameter is a DTensor of all ranks' experts;"
                " load full tensors with torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state,"
                " options=StateDictOptions(full_state_dict=True))"
            )
        if not isinstance(given, DTensor):
            continue
        if not isinstance(parameter, DTensor):
            raise TypeError(
                f"{prefix}{name} is a DTensor, of which {given.device_mesh.size()} ranks hold parts, but the parameter"
                " is an ordinary tensor; load full tensors"
            )
        saved, own = (_place(tensor.device_mesh) for tensor in (given, parameter))
        if saved != own and any(placement.is_shard() for placement in given.placements):
            raise ValueError(
                f"{prefix}{name} is the shard of the rank that saved it, with coordinate {saved[1]} in a mesh of"
                f" {saved[0]}; this rank has coordinate {own[1]} in {own[0]}. torch.save stores the experts of one"
                " rank; save with torch.distributed.checkpoint, or save the full tensors of get_model_state_dict(model,"
                " options=StateDictOptions(full_state_dict=True)), which all ranks call"
            )


def _place(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of a mesh and the coordinate of the rank that created it."""
    return tuple(mesh.shape), tuple(mesh.get_coordinate() or ())


def check_complete(comm: Communicator, what: str) -> None:
    """Raise ValueError for a communicator that has lost experts, which takes ids of a model with more experts."""
    if comm.config.lost_experts:
        raise ValueError(
            f"communicator {comm.name!r} has lost {comm.config.lost_experts} experts with their ranks, but takes the"
            f" expert ids of the whole model; {what} cannot be created on it. To continue with existing layers, set"
            " their attribute comm to this communicator"
        )


def check_split(comm: Communicator, what: str) -> None:
    """Raise ValueError unless ranks hold as many experts as ``Shard(0)`` of a DTensor gives them, and none was lost."""
    check_complete(comm, what)
    allowed = default_experts(comm.num_experts, comm.world_size)
    if comm.experts_per_rank != allowed:
        raise ValueError(
            f"experts_per_rank of communicator {comm.name!r} is {comm.experts_per_rank}; {what} takes the default,"
            f" {allowed}, which is how DTensors are sharded"
        )


def experts_dtensor(comm: Communicator, local: Tensor) -> Tensor:
    """Return the DTensor of all experts whose shard on this rank is ``local`` [El, ...]; on one rank, ``local``."""
    mesh = comm.expert_mesh()
    if mesh is None:
        return local
    unsupported.watch()
    shape = torch.Size((comm.num_experts, *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    if transposed(local):
        stride = stride[0], 1, shape[1]
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def transposed(w: Tensor) -> bool:
    """Return whether matrices w [El, M, N] are the transpose of contiguous ones, and not contiguous themselves."""
    return w.dim() == 3 and not w.is_contiguous() and w.transpose(1, 2).is_contiguous()


def local_slices(weight: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's part of a parameter, and its slices in the whole one.

    FSDP2 may have sharded the parameter, and the experts further than over the ranks of the communicator.
    """
    if not isinstance(weight, DTensor):
        return weight, tuple(slice(0, size) for size in weight.shape)
    local = weight.to_local()
    if local.numel() == 0:
        return local, tuple(slice(0, size) for size in local.shape)
    (chunk,) = weight.__create_chunk_list__()
    return local, tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))


def local_parts(weight: Tensor) -> Iterator[tuple[int, Tensor, tuple[slice, ...]]]:
    """Yield the global id, the local part, and its slices in the whole expert, for each expert of ``weight`` [E, ...]
    on this rank.

    Yields nothing on the meta device.
    """
    local, (held, *part) = local_slices(weight)
    if not weight.is_meta and local.numel():
        yield from ((held.start + i, one, tuple(part)) for i, one in enumerate(local))


def fill_experts(module: nn.Module, name: str, expert_of: Callable[[int], Tensor]) -> None:
    """Fill this rank's part of the parameter ``name`` [E, ...] of all experts.

    Args:
        module, name: as for :func:`fill_weight`.
        expert_of: function that returns the whole expert with a given id, [...].
    """

    def fill(weight: Tensor) -> None:
        for expert, local, part in local_parts(weight):
            local.copy_(expert_of(expert)[part])

    _fill(module, name, fill)


def fill_weight(module: nn.Module, name: str, whole: Callable[[], Tensor]) -> None:
    """Fill this rank's part of a parameter. Does nothing on the meta device.

    A parametrized parameter (``torch.nn.utils.parametrize``) is set as when its parametrizations are registered: those
    without ``right_inverse`` count as the identity, such as low-rank adapters.

    Args:
        module: the module of the parameter.
        name: its name.
        whole: function that returns the contents of the whole parameter.
    """

    def fill(weight: Tensor) -> None:
        local, part = local_slices(weight)
        local.copy_(whole()[part])

    _fill(module, name, fill)


def _fill(module: nn.Module, name: str, fill: Callable[[Tensor], None]) -> None:
    with torch.no_grad():
        chain: Any = getattr(module, "parametrizations", {})
        chain = chain[name] if name in chain else ()
        inverses = [one.right_inverse for one in reversed(chain) if hasattr(one, "right_inverse")]
        stored = getattr(module, name) if not chain or inverses else chain.original
        if stored.is_meta:
            return
        weight = torch.empty_like(stored) if inverses else stored
        fill(weight)
        if inverses:
            for inverse in inverses:
                weight = inverse(weight)
            values = [weight] if chain.is_tensor else weight
            names = ["original"] if chain.is_tensor else [f"original{i}" for i in range(chain.ntensors)]
            for own, value in zip(names, values, strict=True):
                getattr(chain, own).copy_(value)
