"""`ep-ops demo`: train a small compiled MoE language model, with one process per GPU or two on the CPU.

A sequence names one of DIALECTS dialects and then follows that dialect's permutation of the vocabulary. Predicting a
token takes attention to the dialect's name and a table of DIALECTS x VOCABULARY facts, which the experts learn. Without
the dialect the loss is log(DIALECTS) nats per token, and for uniform predictions log(VOCABULARY).
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import ep_ops
from ep_ops.commands.launch import process_group
from ep_ops.nn import DenseMoE, MoELayer

VOCABULARY, DIALECTS, LENGTH, HEADS = 32, 4, 32, 4


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `ep-ops demo`, which trains, and of `ep-ops demo --decode`. Sizes are per rank."""

    device: str  # "cuda" | "cpu"
    ranks: int
    steps: int
    tokens: int  # in a decode step
    sequences: int  # in a training step
    hidden_size: int
    backend: str
    compiled: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def communicator(self, experts: int, top_k: int, tokens: int, device: torch.device) -> ep_ops.Communicator:
        return ep_ops.Communicator(
            num_experts=experts, hidden_size=self.hidden_size, top_k=top_k, max_tokens_per_rank=tokens,
            dtype=self.dtype, device=device, backend=self.backend,
        )  # fmt: skip

    @property
    def tolerance(self) -> float:
        """Allowed |difference| / |value|, in norm, due to rounding. In bfloat16 the router's gradient, a difference of
        nearly equal numbers, differs by 2 % between compiled and eager on two CPU ranks, all others by 0.6 %."""
        return 5e-2 if self.dtype == torch.bfloat16 else 1e-4


class Model(nn.Module):
    """One transformer block with ``moe`` for its MLP: token ids [B, LENGTH] -> logits [B, LENGTH, VOCABULARY]."""

    def __init__(self, hidden_size: int, moe: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype  # of the rows that the experts see; everything else is fp32
        self.embedding = nn.Embedding(VOCABULARY + DIALECTS, hidden_size)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden_size) for _ in range(3))
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.project = nn.Linear(hidden_size, hidden_size, bias=False)
        self.moe = moe
        self.head = nn.Linear(hidden_size, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        rows = self.norms[1](x).flatten(0, 1).to(self.dtype)
        x = x + self.moe(rows).view(x.shape).float()
        return self.head(self.norms[2](x))


class Language:
    """Batches of the language, different on each rank, with the same dialects on all."""

    def __init__(self, rank: int, sequences: int, device: torch.device) -> None:
        dialects = torch.Generator().manual_seed(0)
        self.next = torch.stack([torch.randperm(VOCABULARY, generator=dialects) for _ in range(DIALECTS)])
        self.draws = torch.Generator().manual_seed(1 + rank)
        self.sequences, self.device = sequences, device

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs [B, LENGTH] (the dialect, then tokens) and targets [B, LENGTH], the first of which is
        random."""
        dialect = torch.randint(DIALECTS, (self.sequences,), generator=self.draws)
        words = [torch.randint(VOCABULARY, (self.sequences,), generator=self.draws)]
        for _ in range(LENGTH - 1):
            words.append(self.next[dialect, words[-1]])
        inputs = torch.stack([VOCABULARY + dialect, *words[:-1]], dim=1)
        return inputs.to(self.device), torch.stack(words, dim=1).to(self.device)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of this rank's tokens in nats."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs)[:, 1:].flatten(0, 1), targets[:, 1:].flatten())


def gradients(model: nn.Module, batch: tuple[Tensor, Tensor], shared: list[nn.Parameter]) -> float:
    """Leave the gradients of the mean loss over all ranks in ``model`` and return that loss. ``shared``: parameters
    that every rank holds. Their gradients are summed over ranks; those of experts already are."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, batch) / dist.get_world_size()
    loss.backward()
    total = loss.detach().clone()
    for tensor in [total, *(p.grad for p in shared if p.grad is not None)]:
        dist.all_reduce(tensor)
    return total.item()


def training(
    model: Model, draw: Callable[[], tuple[Tensor, Tensor]], steps: int
) -> Iterator[tuple[tuple[Tensor, Tensor], float]]:
    """Train by AdamW with a learning rate that falls to 0. Yields each batch that `draw` returns and the loss of all
    ranks before its step, while the gradients are in ``model``."""
    experts = list(model.moe.experts.parameters())  # type: ignore[union-attr]
    shared = [p for name, p in model.named_parameters() if not name.startswith("moe.experts.")]
    rate = 0.64 / model.qkv.in_features
    # The experts are DTensors, in a group of their own, because an optimizer's group takes one kind.
    optimizer = torch.optim.AdamW([{"params": shared}, {"params": experts}], lr=rate, weight_decay=0.0)
    for step in range(steps):
        batch = draw()
        yield batch, gradients(model, batch, shared)
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        optimizer.step()


class Mismatch(RuntimeError):
    """The expert-parallel model differs from the dense one or does not learn."""


def check(model: Model, loss: float, dense: Model, batch: tuple[Tensor, Tensor], tolerance: float) -> float:
    """Compare ``loss`` and the gradients in ``model`` with those of ``dense``; return the largest relative error."""
    expected_loss = gradients(dense, batch, list(dense.parameters()))
    moe = model.moe
    assert isinstance(moe, MoELayer)
    first, last = moe.comm.first_local_expert, moe.comm.first_local_expert + moe.comm.num_local_experts
    errors = {"loss": abs(loss - expected_loss) / abs(expected_loss)}
    expected_grads = {name: p.grad for name, p in dense.named_parameters()}
    experts = {id(p) for p in moe.experts.parameters()}
    for name, ours in model.named_parameters():
        grad, expected = ours.grad, expected_grads[name]
        assert grad is not None and expected is not None, name
        expected = expected[first:last] if id(ours) in experts else expected
        grad = grad.to_local() if isinstance(grad, DTensor) else grad
        errors[f"gradient of {name}"] = relative_error(grad, expected)
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    # Every rank learns of every rank's worst error, so that all of them stop, or none.
    found = torch.tensor(errors[worst], device=batch[0].device, dtype=torch.float64).nan_to_num(nan=math.inf)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if not found.item() <= tolerance:
        raise Mismatch(
            f"self-check failed: the expert-parallel model differs from the dense model by up to {found.item():.2g}"
            f" (allowed {tolerance:g}); here most in the {worst}: {errors[worst]:.2g}"
        )
    return found.item()


def relative_error(got: Tensor, expected: Tensor) -> float:
    norm = expected.double().norm().item()
    return (got.double() - expected.double()).norm().item() / max(norm, 1e-12)


def train(rank: int, store: str, world_size: int, options: Options) -> None:
    """Run one process of the demo. Rank 0 prints."""
    if options.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    compiler = compile_backend(options.device) if options.compiled else None
    with process_group(rank, store, world_size, options.device) as device:
        with options.communicator(8 * world_size, 2, options.sequences * LENGTH, device) as comm:
            comm.warmup()
            report = Printer(comm, options, compiler)
            report.start()
            torch.manual_seed(0)  # the same on every rank: what all ranks hold starts out equal
            moe = MoELayer(comm, options.hidden_size)
            model = Model(options.hidden_size, moe, options.dtype).to(device)
            dense = Model(options.hidden_size, DenseMoE(comm, options.hidden_size), options.dtype).to(device)
            dense.load_state_dict(without_moe(model), strict=False)
            if compiler is not None:
                model.compile(backend=compiler, fullgraph=True)
            language = Language(rank, options.sequences, device)
            first = loss = math.nan
            for step, (batch, loss) in enumerate(training(model, language.batch, options.steps)):
                if step == 0:
                    first = loss
                    report.checked(check(model, loss, dense, batch, options.tolerance))
                report.step(step + 1, loss)
            comm.check_errors()
            report.end(first, loss)
            if not loss < first:
                raise Mismatch(
                    f"the loss did not fall: {first:.3f} nats at first, {loss:.3f} after {options.steps} steps"
                )


def without_moe(model: Model) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if not name.startswith("moe.")}


def compile_backend(device: str) -> str:
    """Return "inductor", or "aot_eager" on CPUs without a C++ compiler."""
    compilers = (os.environ.get("CXX"), "g++", "clang++")
    usable = device == "cuda" or any(shutil.which(name) for name in compilers if name)
    return "inductor" if usable else "aot_eager"


class Printer:
    """Output of rank 0: a line that is rewritten on a terminal, else a line every ten steps."""

    def __init__(self, comm: ep_ops.Communicator, options: Options, compiler: str | None) -> None:
        self.comm, self.options, self.compiler = comm, options, compiler
        self.quiet = comm.rank != 0
        self.terminal = sys.stdout.isatty()
        self.width = 0
        self.began = self.warm = time.perf_counter()
        self.error = math.nan

    def say(self, text: str, end: str = "\n") -> None:
        if not self.quiet:
            padding = " " * (self.width - len(text))
            print(("\r" if self.terminal else "") + text + padding, end=end, flush=True)
            self.width = len(text) if end == "" else 0

    def start(self) -> None:
        comm, compiler = self.comm, self.compiler
        self.say(
            f"{comm.world_size} rank(s), {comm.num_experts} experts, top {comm.top_k}, hidden size {comm.hidden_size}, "
            f"{comm.max_tokens_per_rank} tokens per rank and step"
        )
        if compiler == "aot_eager":
            self.say("no C++ compiler was found: the model is traced as one graph, but runs uncompiled")
        self.say(f"first step{', compiling' if compiler else ''} ...", end="" if self.terminal else "\n")

    def checked(self, error: float) -> None:
        self.error = error
        self.say(f"self-check: loss and all gradients equal the dense model's to {error:.1e}")

    def step(self, step: int, loss: float) -> None:
        steps = self.options.steps
        if step == 1:  # the first step compiles and checks: not counted in tokens/s
            self.warm = time.perf_counter()
        if self.terminal:
            full = 30 * step // steps
            self.say(f"[{'#' * full}{'.' * (30 - full)}] step {step}/{steps}  loss {loss:.3f}", end="")
        elif step % 10 == 0 or step in (1, steps):
            self.say(f"step {step}/{steps}  loss {loss:.3f}")

    def end(self, first: float, last: float) -> None:
        comm, now = self.comm, time.perf_counter()
        if self.terminal:
            self.say("", end="\n")
        device = torch.cuda.get_device_name(comm.device) if comm.device.type == "cuda" else "CPU"
        tokens = comm.world_size * comm.max_tokens_per_rank * (self.options.steps - 1)
        how = f"compiled as one graph ({self.compiler})" if self.compiler else "eager"
        speed = f"{tokens / (now - self.warm):,.0f} tokens/s after the first step" if tokens else "one step only"
        self.say(f"ran on     {comm.world_size} x {device}, backend {comm.backend.name}, {self.options.dtype}, {how}")
        self.say(f"speed      {speed}; {self.warm - self.began:.1f} s for the first step and its check")
        self.say(
            f"loss       {first:.3f} -> {last:.3f} nats per token"
            f" (guessing: {math.log(VOCABULARY):.3f}; without attention to the first token: {math.log(DIALECTS):.3f})"
        )
