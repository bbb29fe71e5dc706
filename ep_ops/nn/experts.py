"""The experts of a mixture-of-experts layer, sharded over the ranks of a communicator."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ep_ops import inputs
from ep_ops.communicator import Communicator, reject_destroyed
from ep_ops.config import DTYPES
from ep_ops.formats import ELEMENT, combine_format_problem, format_of, reject_hidden
from ep_ops.nn.apart import check_averaging
from ep_ops.nn.e4m3_weights import check_e4m3, dtype_problem, gradient_problem, quantize_blocks
from ep_ops.nn.expert_mlp import Computed, expert_mlp, expert_rows, is_late
from ep_ops.nn.expert_module import ExpertModule, check_split, fill_experts
from ep_ops.nn.few_rows_e4m3 import BLOCK, SCALES
from ep_ops.nn.gemms import choose
from ep_ops.nn.grouped import Gemms
from ep_ops.nn.late import SentTokens, end
from ep_ops.nn.scaled import ROW
from ep_ops.nn.token_major import How, Rows, check_rows
from ep_ops.operators.eager import fits, is_transformed, misfit
from ep_ops.operators.rejection import Result, reject, rejected
from ep_ops.overflow import recomputing
from ep_ops.records import GROUPED, check_types

logger = logging.getLogger("ep_ops")


class Experts(ExpertModule):
    """SwiGLU experts, sharded over the ranks of a communicator. This rank holds ``comm.num_local_experts`` of them.

    On more than one rank the parameters are DTensors of all experts with the placement ``Shard(0)`` over
    ``comm.expert_mesh()``, so that ``torch.distributed.checkpoint``, optimizers and FSDP2 treat them correctly:
    ``w_in`` [E, H, 2F] and ``w_out`` [E, F, H]. On one rank they are ordinary tensors. No rank allocates the experts of
    other ranks.

    After backward, the gradients of the parameters are sums over the tokens of all ranks. docs/training.md describes
    how to divide them if the gradients of other parameters are averages.

    With ``dtype=torch.float8_e4m3fn`` the weights are e4m3 with a scale for each block of 128 x 128, in the layout of
    checkpoints: ``w_in`` [E, 2F, H] with ``in_scales`` [E, 2F / 128, H / 128], and ``w_out`` [E, H, F] with
    ``out_scales`` [E, H / 128, F / 128], scales in float32. They have no gradient, and conversions such as
    ``.to(dtype)`` and ``.bfloat16()`` leave them as they are. Rows are sent in e4m3, and
    :func:`ep_ops.nn.few_rows_mlp_e4m3` computes the experts, for which H and F are multiples of 128, the communicator's
    dtype is bfloat16, and ``rows`` is "grouped".

    Args:
        comm: determines the number of experts, the hidden size H, and which experts this rank holds. Its
            ``experts_per_rank`` must be the default, which splits experts as ``Shard(0)`` does.
        intermediate_size: F, the width of each expert.
        capacity: number of rows of this rank's receive buffer, a multiple of ``comm.alignment``; with token-major rows,
            any number of copies. Rows that do not fit are dropped and counted in ``dropped``. None: the worst case,
            without drops: ``comm.capacity()``, or as many copies as all ranks have tokens.
        dynamic: allocate exactly as many rows as arrive, which costs one host synchronization per call. Under
            ``torch.compile(fullgraph=True)`` set ``torch._dynamo.config.capture_dynamic_output_shape_ops = True``.
        format: format in which rows are dispatched (docs/formats.md). Empty: the communicator's dtype. A format that
            begins with ``wire:``: fewer bytes are sent. ``e4m3/row/fp32``: the first GEMM uses quantized rows
            (:func:`ep_ops.nn.scaled_grouped_mm`; the communicator's dtype must be bfloat16). Gradients are not
            quantized. With e4m3 weights, ``e4m3/128/fp32`` (default) or ``e4m3/128/pow2``.
        combine_format: format in which sums are sent back to the ranks of the tokens, one that
            :meth:`ep_ops.Communicator.combine` takes. Empty: the communicator's dtype.
        dtype: dtype of the parameters; None: ``comm.dtype``. They are converted to ``comm.dtype`` in each call, except
            for e4m3 weights.
        seed: seed of the initial weights, which depend neither on the number of ranks nor on ``torch.manual_seed``.
            Layers with the same seed begin with the same weights: give each layer of a model its own seed.
        gemms: the grouped GEMMs, the same on all ranks. "torch": PyTorch's. "quack": quack's, with the gradients of
            weights computed late (docs/overlap.md). "memory": kernels for few rows
            (:func:`ep_ops.nn.few_rows_mlp`), with the gradients of "torch"; for bfloat16 and float16 and sizes that are
            multiples of 8. "auto": "memory" in calls without gradients in which experts have at most 64 rows on
            average, if the backend is ``cute``; else "torch". An :class:`ep_ops.nn.Gemms`: your own. With e4m3
            weights, "auto" and "memory" select the kernels for these.
        rows: which rows this rank receives, the same on all ranks. "grouped": one for each (token, local expert), by
            expert. "token_major": one for each token that has an expert here. Then backward keeps the received rows
            [R, H] and the output of the first GEMM [L, 2F], R copies of tokens and L places; with "grouped" it also
            keeps the input and the output of the second GEMM, and R = L. "memory" kernels run without gradients only.
        places: for token-major rows, the number L of rows of the GEMMs, a multiple of ``comm.alignment``: one for each
            (token, local expert), padded by expert. None: as many as the copies can need, if the ids of a token are
            distinct. (token, k) that find no place are dropped.
        redispatch: for token-major rows, whether backward dispatches x again instead of keeping the received rows, with
            the same bits. The same on all ranks.

    Raises:
        TypeError: ``comm`` is not a communicator, or ``gemms`` is neither a name nor GEMMs.
        ValueError: a size, a format, ``dtype``, ``gemms``, ``rows``, ``places``, ``redispatch`` or the split of the
            experts is not supported.

    Attributes:
        gemms (str | Gemms): as the argument.
        dropped (Tensor): int32 [El], for each local expert the number of (token, k) that were dropped since the module
            was created. With token-major rows all (token, k) of a copy that does not fit count, and those that find no
            place.
    """

    w_in: Tensor
    w_out: Tensor
    dropped: Tensor  # [El] int32: (token, k) dropped by each local expert since the module was created

    def __init__(
        self, comm: Communicator, intermediate_size: int, *, capacity: int | None = None, dynamic: bool = False,
        format: str = "", combine_format: str = "", dtype: torch.dtype | None = None, seed: int = 0,
        gemms: str | Gemms = "auto", rows: str = GROUPED, places: int | None = None, redispatch: bool = False,
    ) -> None:  # fmt: skip
        check_types(Communicator, comm=comm)
        reject_destroyed(comm)
        super().__init__()
        if dtype not in (None, *DTYPES, ELEMENT):
            raise ValueError(f"dtype is {dtype}; allowed: None, {', '.join(map(str, (*DTYPES, ELEMENT)))}")
        e4m3 = dtype == ELEMENT
        if not e4m3 and format not in ("", ROW) and not str(format).startswith("wire:"):
            raise ValueError(f"format is {format!r}; allowed here: '', {ROW!r}, or one that begins with 'wire:'")
        if format == ROW and comm.dtype != torch.bfloat16:
            raise ValueError(f"format is {ROW!r} on a communicator of {comm.dtype}; allowed: torch.bfloat16")
        if problem := combine_format_problem("combine_format", combine_format):
            raise ValueError(problem)
        for name in filter(None, (format, combine_format)):
            reject_hidden(comm.hidden_size, format_of(name))
        check_size("intermediate_size", intermediate_size, 1)
        if dynamic and capacity is not None:
            raise ValueError(f"capacity is {capacity} and dynamic is True; allowed: one of the two")
        check_split(comm, "Experts")
        check_rows(Rows(rows, places, redispatch), comm, dynamic, format)
        if e4m3:
            format = check_e4m3(comm, intermediate_size, gemms, Rows(rows), format)
        self.rows, self.places, self.redispatch = rows, places, redispatch
        self.gemms = gemms
        chosen = "few_rows_mlp_e4m3" if e4m3 else choose(comm, gemms, intermediate_size, format)
        logger.info("Experts of communicator %s: gemms=%r selects %s", comm.name, gemms, chosen)
        self.comm, self.capacity, self.dynamic = comm, capacity, dynamic
        self.format, self.combine_format, self.seed, self.width = format, combine_format, seed, intermediate_size
        held, hidden, device = comm.num_local_experts, comm.hidden_size, default_device(comm)
        made = functools.partial(torch.empty, dtype=comm.dtype if dtype is None else dtype, device=device)
        self.scale_names: tuple[str, ...] = ("in_scales", "out_scales") if e4m3 else ()
        for name, shape in (("w_in", (hidden, 2 * intermediate_size)), ("w_out", (intermediate_size, hidden))):
            local = made(held, *(reversed(shape) if e4m3 else shape))
            self.register_parameter(name, nn.Parameter(self.from_local(local), requires_grad=not e4m3))
        for name, w in zip(self.scale_names, (self.w_in, self.w_out), strict=False):
            local = torch.empty(held, w.shape[1] // BLOCK, w.shape[2] // BLOCK, device=device)
            self.register_parameter(name, nn.Parameter(self.from_local(local), requires_grad=False))
        self.register_buffer("dropped", torch.zeros(held, dtype=torch.int32, device=device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial weights of this rank's experts and set ``dropped`` to zero.

        Call it after ``to_empty``, also if FSDP2 has sharded the parameters. Does nothing on the meta device.
        """
        for which, name in enumerate(("w_in", "w_out")):
            shape = getattr(self, name).shape[1:]
            if not self.scale_names:
                fill_experts(self, name, functools.partial(draw_expert, shape, self.seed, which=which))
                continue
            for part, filled in enumerate((name, self.scale_names[which])):
                fill_experts(self, filled, functools.partial(_draw_e4m3, shape, self.seed, which, part))
        self.dropped.zero_()

    def forward(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, max_tokens: int | None = None,
        shared: Callable[[Tensor], Tensor] | None = None, return_dropped: bool = False,
    ) -> Any:  # fmt: skip
        """Return, for each token, the weighted sum of its experts' outputs. Collective.

        Args:
            x: tokens [T, H] or [B, S, H] in ``comm.dtype``. T (B times S) is 0 to ``comm.max_tokens_per_rank`` and may
                differ between ranks.
            topk_idx, topk_weights: chosen experts and their weights, [..., K].
            max_tokens: bound on T in this call, the same on all ranks. A small bound selects the latency kernels and a
                smaller buffer. None: ``comm.max_tokens_per_rank``.
            shared: a module or function that is applied to x while rows are dispatched (before the dispatch, if
                ``dynamic``). Its result is added to the output.
            return_dropped: whether to return a :class:`Computed`, which contains the output and the dropped rows.

        Returns:
            The output, with shape and dtype of x, or a :class:`Computed`.

        Raises:
            TypeError, ValueError, RuntimeError: as for :meth:`ep_ops.Communicator.dispatch`.
        """
        if self.splits(shared):
            *_, done = self.steps(x, topk_idx, topk_weights, max_tokens=max_tokens, shared=shared)
            assert done is not None
            return done if return_dropped else done.out
        self.check_tokens(x, max_tokens, split=False)
        before = functools.partial(self.before_sending, max_tokens=max_tokens, split=False)
        added = None if shared is None else before(functools.partial(shared, x))
        w_in, w_out, *scales = before(self._local_weights)
        done = expert_mlp(
            self.comm, x, topk_idx, topk_weights, w_in, w_out, *scales, capacity=self.capacity, exact=self.dynamic,
            max_tokens=max_tokens, format=self.format, combine_format=self.combine_format, gemms=self.gemms,
            rows=self.rows, places=self.places, redispatch=self.redispatch,
        )  # fmt: skip
        self._count(done.dropped)
        if added is not None:
            done = done._replace(out=done.out + added)
        return done if return_dropped else done.out

    def steps(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *, flight: int = 0, max_tokens: int | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> Iterator[Computed | None]:  # fmt: skip
        """Run ``forward`` in steps, for :func:`ep_ops.nn.interleave`. Collective.

        FSDP2 does not see this call. Call ``unshard()`` of the module before it and ``reshard()`` after it.

        Args:
            x, topk_idx, topk_weights, max_tokens, shared: as for :meth:`forward`.
            flight: 0 or 1, to distinguish two micro-batches that are in progress at the same time.

        Yields:
            None between the start and the wait of dispatch and of combine, then a :class:`Computed`.

        Raises:
            RuntimeError: ``dynamic`` is True, or the flight is in use. Other errors as for :meth:`forward`.
        """
        self.check_tokens(x, max_tokens, split=True, flight=flight)
        chosen = choose(self.comm, self.gemms, self.width, self.format)
        late = is_late(chosen.gemms, self.format, (x, topk_weights), tuple(self.parameters()))
        how = How(Rows(self.rows, self.places, self.redispatch), False, self.format, late, split=True)
        zeros = torch.is_grad_enabled()
        with torch.set_grad_enabled(zeros and not late):
            dispatch = self.comm.dispatch_start(
                x, topk_idx, topk_weights, layout=self.rows, capacity=self.capacity, max_tokens=max_tokens,
                flight=flight, format=self.format, zeros=zeros,
            )  # fmt: skip
        tokens = dispatch.arguments.max_tokens
        try:
            added = None if shared is None else shared(x)
            yield None
        except BaseException as error:
            end(functools.partial(self.comm.dispatch_wait, dispatch))
            if isinstance(error, Exception):
                reject("combine_start", self.comm, error, flight, tokens)
            raise
        with torch.set_grad_enabled(zeros and not late):
            received = self.comm.dispatch_wait(dispatch)

        def compute() -> tuple[Tensor, Tensor | None, Tensor]:
            w_in, w_out, *scales = self._local_weights()
            sent = SentTokens(self.comm, x, topk_weights, flight)
            return expert_rows(received, w_in, w_out, chosen, sent, how, scales)

        y, weights, dropped = rejected("combine_start", self.comm, compute, flight=flight, max_tokens=tokens)
        self._count(dropped)
        combine = self.comm.combine_start(y, received.route, weights, format=self.combine_format, flight=flight)
        try:
            yield None
        except BaseException:
            end(functools.partial(self.comm.combine_wait, combine))
            raise
        out = self.comm.combine_wait(combine)
        yield Computed(out if added is None else out + added, dropped)

    def splits(self, shared: Callable[[Tensor], Tensor] | None) -> bool:
        """Return whether :meth:`forward` uses split operations, so that ``shared`` runs while rows are sent."""
        return shared is not None and not self.dynamic

    def check_tokens(self, x: Tensor, max_tokens: int | None, *, split: bool, flight: int = 0) -> None:
        """Reject tokens with a wrong type, shape or dtype on all ranks, before a router or a shared expert reads them,
        and transforms of torch.func, before the weights are read.

        Args:
            x, max_tokens, flight: as for :meth:`steps`.
            split: whether the tokens are sent by a split operation.

        Raises:
            TypeError: x is not a tensor, or has the wrong dtype, or e4m3 weights were converted.
            ValueError: x has the wrong shape.
            NotImplementedError: a transform of torch.func is active, or a gradient of e4m3 weights is needed.
            RuntimeError: ``split`` and ``dynamic`` are True.
        """
        if split and self.dynamic:
            raise RuntimeError(
                "steps() is not available with dynamic=True, because exact sizes need a host synchronization"
            )
        comm = self.comm
        is_meta = self.before_sending(self._is_meta, max_tokens, split=split, flight=flight)
        error: Exception | None = None
        if is_transformed():
            error = NotImplementedError(
                f"{type(self).__name__} does not support the transforms of torch.func (grad, vjp, jacrev, jvp, vmap);"
                " allowed: backward and torch.autograd.grad, with the tokens of all samples in one call"
            )
        elif not fits("Tensor", x):
            error = misfit("x", x, "Tensor")
        elif x.dim() < 2 or x.shape[-1] != comm.hidden_size:
            error = ValueError(f"x has shape {tuple(x.shape)}; allowed: [..., T, {comm.hidden_size}] (hidden_size)")
        elif x.dtype != comm.dtype and not inputs.casts(comm, x):
            error = TypeError(f"x has dtype {x.dtype}; allowed: {comm.dtype}")
        elif x.is_meta != is_meta or not x.is_meta and x.device != comm.device:
            allowed = "meta, like the experts" if is_meta else f"{comm.device}"
            error = ValueError(f"x is on {x.device}; allowed: {allowed}")
        elif self.scale_names:
            error = dtype_problem(self.w_in, self.w_out) or gradient_problem(x, *self.parameters())
        if error is not None:
            operator, tokens = self._first_operation(max_tokens, split)
            reject(operator, comm, error, flight, tokens)

    def before_sending(
        self, run: Callable[[], Result], max_tokens: int | None, *, split: bool, flight: int = 0
    ) -> Result:
        """Return ``run()``, the result of a part that runs before tokens are sent: a router, a shared expert, the
        parametrizations of weights. In eager code, all ranks raise what it raises.

        Args:
            run: calls the part.
            max_tokens, split, flight: as for :meth:`check_tokens`.
        """
        operator, tokens = self._first_operation(max_tokens, split)
        return rejected(operator, self.comm, run, flight=flight, max_tokens=tokens)

    def _first_operation(self, max_tokens: int | None, split: bool) -> tuple[str, int]:
        """Return the operator that sends tokens, and its ``max_tokens``."""
        operator = "dispatch_start" if split else "dispatch_dynamic" if self.dynamic else "dispatch"
        return operator, self.comm.max_tokens_per_rank if max_tokens is None else max_tokens

    def extra_repr(self) -> str:
        experts, *_ = self.w_in.shape
        return f"{experts} experts, hidden_size={self.comm.hidden_size}, width={self.width}, dtype={self.w_in.dtype}"

    def _is_meta(self) -> bool:
        return self.w_in.is_meta

    def _local_weights(self) -> list[Tensor]:
        """Return this rank's w_in and w_out, and their scales if they are e4m3."""
        names = "w_in", "w_out", *self.scale_names
        return [self.local_weight(name, convert=not self.scale_names) for name in names]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        def apply(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype == tensor.dtype:
                return moved
            if self.scale_names:
                return tensor.to(moved.device)  # codes are no numbers to convert
            if moved.dtype == ELEMENT:
                raise TypeError(
                    f"dtype is {ELEMENT}, to which weights are not converted without scales; make Experts with dtype="
                    f"{ELEMENT} and load them"
                )
            return moved

        return super()._apply(apply, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        for name in self.scale_names:  # load_state_dict(assign=True) keeps the dtype of the file
            scales = getattr(self, name)
            if scales.dtype not in SCALES:
                setattr(self, name, nn.Parameter(scales.float(), requires_grad=False))

    @torch.compiler.assume_constant_result  # as in the base class
    def _check_averaging(self) -> None:
        check_averaging(self, weights_given=True)

    def _count(self, dropped: Tensor) -> None:
        if not recomputing():
            self.dropped.add_(dropped)  # without assigning the attribute, which compiled checkpointing does not allow


def check_size(name: str, size: Any, least: int) -> None:
    """Raise ValueError unless ``size`` is an int of at least ``least``."""
    if type(size) is not int or size < least:
        raise ValueError(f"{name} is {size!r}; allowed: an int of at least {least}")


def default_device(comm: Communicator) -> torch.device:
    """Return the device of new parameters: meta if that is torch's default device, else the communicator's."""
    default = torch.get_default_device()
    return default if default.type == "meta" else comm.device


def _draw_e4m3(shape: torch.Size, seed: int, which: int, part: int, expert: int) -> Tensor:
    """Return the codes [N, M] of the weights of :func:`draw_expert`, or for ``part`` 1 their scales."""
    return quantize_blocks(draw_expert(torch.Size(reversed(shape)), seed, expert, which).t())[part]


def draw_expert(shape: torch.Size, seed: int, expert: int, which: int) -> Tensor:
    """Return initial weights [M, N] of one of the two matrices of an expert, float32 on the CPU.

    Each matrix has its own random stream, so that it does not depend on the placement of experts.
    """
    generator = torch.Generator().manual_seed(((seed + 1) * 1_000_003 + expert) * 2 + which)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn * shape[0] ** -0.5
