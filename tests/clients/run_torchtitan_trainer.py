"""Train a DeepSeek-V3 of torchtitan in torchtitan's own trainer, with its all-to-all dispatcher and with that of
``ep_ops.integrations.torchtitan``, and compare the losses and gradient norms of all steps, and the speed.

    torchrun --standalone --nproc-per-node 2 tests/clients/run_torchtitan_trainer.py --steps 10
    torchrun --standalone --nproc-per-node 2 tests/clients/run_torchtitan_trainer.py --large --checkpointing none

All ranks share the experts, and FSDP2 shards the rest. The model is torchtitan's small one with three layers, two of
them with experts, and trains on sequences that follow a rule, so that the loss falls. ``--large`` takes the layers of
its "16B" (width 2048, 64 experts of width 1408, top 6), six of them with experts, a vocabulary of 8192, 2 sequences of
4096 tokens on each rank and 24 steps, for the speed: the script prints tokens per second on each rank, from the median
of the times of steps after the sixth, and their ratio. ``--checkpointing`` and ``--compile`` choose torchtitan's
activation checkpointing and compiled blocks for both runs; ``--cuda-graphs`` has the run with ep_ops captured by the
trainer (the other cannot be), and ``--capacity-factor`` gives it fewer rows than the worst case.

What is replaced: the tokenizer, the data, the attention (scaled_dot_product_attention), and the function that changes
timeouts, if PyTorch lacks the one that torchtitan calls. Without a GPU also: the device and its memory statistics,
FSDP2's averages (sums, all that gloo has), and the change of timeouts. With PyTorch 2.11 also: how FSDP2 is applied to
a block with experts (older_fsdp.py), and the loss, which is not computed in chunks; and the run with the all-to-all
dispatcher is not compiled, because Inductor fails in its backward there.

The exit status is 0 if every loss and every norm differs by less than ``--tolerance``, relatively, if the loss fell,
and if each layer dispatched once for each step (twice under full checkpointing). With ``--large`` losses of equal runs
drift apart, because of roundings that routers amplify, so that no tolerance applies unless it is given.
"""
# ruff: noqa: E402  the device is replaced before torchtitan reads it

from __future__ import annotations

import argparse
import collections
import gc
import math
import os
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import older_fsdp
import torch
import torch.distributed as dist
from torch.distributed import fsdp

CPU = not torch.cuda.is_available()
if CPU:  # before anything reads the device's name
    from torchtitan.tools import utils

    module: Any = types.ModuleType("cpu")
    module.device_count = lambda: 1
    module.set_device = module.reset_peak_memory_stats = module.empty_cache = module.synchronize = lambda *_: None
    module.current_device = lambda: 0
    module.get_device_name = lambda *_: "CPU"
    module.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30)
    module.memory_stats = lambda *_: {}
    utils.device_type, utils.device_module = "cpu", module
OLDER_FSDP = not hasattr(fsdp, "DataParallelMeshDims")
if OLDER_FSDP:
    older_fsdp.install()
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout

from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed import utils as distributed
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.trainer import Trainer

import ep_ops
from ep_ops.integrations.torchtitan import use_ep_ops

SMALL = dict(layers=2, sequences=4, length=32, steps=10)
LARGE = dict(layers=6, sequences=2, length=4096, steps=24)
VOCABULARY = 8192
"""That of the larger model."""


class Numbers(BaseTokenizer):
    """A tokenizer for the data below, which are numbers already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **others: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **others: Any) -> list[int]:
        return [int(word) for word in args[0].split()]

    def decode(self, *args: Any, **others: Any) -> str:
        return " ".join(map(str, args[0]))

    def get_vocab_size(self) -> int:
        return 2048


class Sequences(BaseDataLoader):
    """Each number is the one before plus a step that the sequence has drawn from five."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **others: Any) -> None:
        self.draw = torch.Generator().manual_seed(dp_rank)
        self.shape = local_batch_size, seq_len

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        batch, length = self.shape
        while True:
            first, step = (torch.randint(1, most, (batch, 1), generator=self.draw) for most in (64, 6))
            numbers = (first + step * torch.arange(length + 1)) % 64
            yield {"input": numbers[:, :-1].contiguous()}, numbers[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def configured(args: argparse.Namespace, ours: bool, folder: str) -> Any:
    config = deepseek_v3_debugmodel()
    spec = config.model_spec = model_registry("16B" if args.large else "debugmodel", attn_backend="varlen")
    model = spec.model
    del model.layers[args.layers + 1 :]  # the first has no experts
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    ScaledDotProductAttention.sdpa_backends = [SDPBackend.MATH]
    if args.large:
        model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = VOCABULARY
        config.loss.loss_fn.global_vocab_size = VOCABULARY
        if not CPU:
            ScaledDotProductAttention.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if CPU:
        spec.parallelize_fn = _with_sums(spec.parallelize_fn)
    config.dump_folder, config.tokenizer, config.dataloader = folder, Numbers.Config(), Sequences.Config()
    config.checkpoint.enable = config.validator.enable = False
    config.training.local_batch_size, config.training.seq_len = args.sequences, args.length
    config.training.steps = args.steps
    config.training.mixed_precision_param = args.dtype
    config.training.disable_cuda_graphs = not (ours and args.cuda_graphs)
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.expert_parallel_degree = dist.get_world_size()
    config.debug.seed = 0
    if OLDER_FSDP:
        config.loss = config.loss.loss_fn
    if args.compile and (ours or not OLDER_FSDP):
        config.compile.enable, config.compile.backend = True, args.compile
    config.activation_checkpoint = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}[
        args.checkpointing
    ]
    if ours:
        found = use_ep_ops(config, dtype=args.dtype, capacity_factor=args.capacity_factor)
        assert len(found) == args.layers, found
    return config


def _with_sums(parallelize: Any) -> Any:
    def wrapped(*args: Any, **others: Any) -> Any:
        model = parallelize(*args, **others)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
        return model

    return wrapped


def train(config: Any) -> tuple[list[tuple[float, float]], float, collections.Counter[str]]:
    """Loss and gradient norm of each step, tokens per second, and how often each operator of ep_ops ran."""
    torch.manual_seed(0)
    trainer = Trainer(config)
    curve: list[tuple[float, float]] = []
    ends: list[float] = []

    def log(step: int, loss: float, most: float, norm: float, **others: Any) -> None:
        curve.append((loss, norm))
        ends.append(time.perf_counter())

    trainer.metrics_processor.log = log
    counts: collections.Counter[str] = collections.Counter()
    for comm in ep_ops.registry.living.values():
        _count(comm.backend, counts)
    trainer.train()
    trainer.close()
    for comm in list(ep_ops.registry.living.values()):
        comm.destroy()
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    took = [end - begin for begin, end in zip(ends, ends[1:], strict=False)][min(5, len(ends) - 2) :]
    tokens = config.training.local_batch_size * config.training.seq_len
    return curve, tokens / statistics.median(took), counts


def _count(backend: Any, counts: collections.Counter[str]) -> None:
    """Count the calls that a backend runs, by operator."""
    bind = backend.bind

    def counted(spec: Any, a: Any) -> Any:
        run = bind(spec, a)
        return lambda a: (counts.update([spec.kind]), run(a))[1]

    backend.bind = counted


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", action="store_true", help="the larger model, for the speed")
    parser.add_argument("--layers", type=int, help="with experts (default: 2; with --large 6)")
    parser.add_argument("--sequences", type=int, help="of each rank (default: 4; with --large 2)")
    parser.add_argument("--length", type=int, help="tokens of a sequence (default: 32; with --large 4096)")
    parser.add_argument("--steps", type=int, help="at least 2 (default: 10; with --large 24)")
    parser.add_argument("--capacity-factor", type=float, default=1.0, help="share of the worst case's rows")
    parser.add_argument("--checkpointing", choices=["none", "selective", "full"], default="selective")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32" if CPU else "bfloat16")
    parser.add_argument("--compile", metavar="BACKEND", help="of torch.compile, such as inductor")
    parser.add_argument("--cuda-graphs", action="store_true")
    parser.add_argument("--tolerance", type=float, help="default: 1e-5 with float32, 1e-2 with bfloat16; --large: none")
    args = parser.parse_args()
    for name, value in LARGE.items() if args.large else SMALL.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    tolerance = args.tolerance or (math.inf if args.large else 1e-5 if args.dtype == "float32" else 1e-2)
    if CPU:
        distributed.set_pg_timeouts = lambda *_, **__: None
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if CPU else "nccl")
    torch.autograd.set_multithreading_enabled(False)  # as the trainer does, which leaves a group that exists alone
    with tempfile.TemporaryDirectory() as folder:
        (theirs, before, none), (ours, after, counts) = (
            train(configured(args, which, folder)) for which in (False, True)
        )
    worst = max(abs(a - b) / abs(b) for step in zip(ours, theirs, strict=True) for a, b in zip(*step, strict=True))
    if dist.get_rank() == 0:
        for step, ((loss, norm), (their_loss, their_norm)) in enumerate(zip(ours, theirs, strict=True), 1):
            print(f"step {step}: loss {loss:.6f} and {their_loss:.6f}, norm {norm:.6f} and {their_norm:.6f}")
        print(f"largest relative difference {worst:.2e}; operators of ep_ops: {dict(counts)}")
        print(f"tokens/s on each rank: {after:.0f} and {before:.0f}, ratio {after / before:.2f}")
    times = 2 if args.checkpointing == "full" else 1
    wrong = {
        f"a difference of {worst}": worst >= tolerance,
        f"losses that do not fall: {ours}": len(ours) != args.steps or ours[-1][0] >= 0.9 * ours[0][0],
        f"operators of the other run: {none}": bool(none),
        f"{counts}": not args.cuda_graphs and counts["dispatch"] != times * args.layers * args.steps,
    }
    dist.barrier()
    dist.destroy_process_group()
    for text in (text for text, found in wrong.items() if found):
        print("FAILED:", text)
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
