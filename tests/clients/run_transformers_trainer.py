"""Train a Qwen3-MoE of transformers in several ways from the same weights, and compare the speed and the losses.

    torchrun --standalone --nproc-per-node 2 tests/clients/run_transformers_trainer.py --large
    torchrun --standalone --nproc-per-node 2 tests/clients/run_transformers_trainer.py --large --sequences 2
    torchrun --standalone --nproc-per-node 2 tests/clients/run_transformers_trainer.py    # small, also on CPUs

Parameters are float32 and computed in bfloat16 by FSDP2's mixed precision, in every way (``--ways``):

    fsdp            FSDP2 alone: each rank gathers all experts of a layer
    transformers    transformers' own expert parallelism
    register        ``ep_ops.integrations.transformers.register``
    spread          ``ep_ops.integrations.transformers.spread_experts``, and FSDP2 for the other parameters

The last two can be followed by ``+capacity`` (receive buffers of 1.5 times the mean), ``+token_major`` (rows), and
``+redispatch``. ``--large`` takes eight layers of Qwen3-30B-A3B's sizes with a vocabulary of 8192, 5.0 billion
parameters, and four sequences of 2048 tokens on each rank. Weights are drawn from the names of the parameters, and
sequences follow a rule.

For each way the script prints tokens per second on each rank, from the median of the times of steps after the fifth,
their ratio to those of ``fsdp`` and ``transformers``, and the largest relative difference of a loss from those of the
first way. The exit status is 0 if no loss differs by more than ``--tolerance`` and no row was dropped.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import ep_ops
from ep_ops.integrations.transformers import register, spread_experts
from ep_ops.nn import expert_parameters, keep_experts_apart

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = "fsdp,transformers,register,register+capacity,spread,spread+capacity"
SMALL: dict[str, Any] = dict(
    hidden_size=64, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, num_hidden_layers=2, vocab_size=128,
    num_attention_heads=4, head_dim=16, intermediate_size=64,
)  # fmt: skip
LARGE: dict[str, Any] = dict(
    hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, num_hidden_layers=8,
    vocab_size=8192, num_attention_heads=32, head_dim=128, intermediate_size=6144,
)  # fmt: skip
Fill = Callable[[str, torch.Size, torch.device], Tensor]


def config_of(sizes: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(
        "qwen3_moe", num_key_value_heads=4, norm_topk_prob=True, tie_word_embeddings=False, router_aux_loss_coef=0.0,
        max_position_embeddings=4096, **sizes,
    )  # fmt: skip
    config._attn_implementation, config._experts_implementation = "sdpa", "grouped_mm"
    return config


def drawn(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """Return the whole parameter of that name, equal on all ranks."""
    if "norm" in name:
        return torch.ones(shape, device=device)
    draw = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=draw, device=device) * 0.02


def own(whole: Tensor) -> Tensor:
    """Return this rank's part of a parameter or gradient. FSDP2 and expert parallelism split dimension 0 alike."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def made(way: str, config: Any, tokens: int, device: torch.device, fill: Fill = drawn) -> Any:
    """Return the model in one way.

    Args:
        tokens: of each rank and step.
        fill: returns the whole parameter of a name.
    """
    ranks, (kind, *how) = dist.get_world_size(), way.split("+")
    options: dict[str, Any] = {"max_tokens_per_rank": tokens}
    if "capacity" in how:
        options |= {"capacity": -(-3 * tokens * config.num_experts_per_tok // 2 // 128) * 128, "overflow": "raise"}
    if "token_major" in how:
        options |= {"rows": "token_major", "redispatch": "redispatch" in how}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if kind == "spread":
        _materialize(model, device)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(fill(name, p.shape, device))
        spread_experts(model, dtype=torch.bfloat16, **options)
        keep_experts_apart(model, ranks)
        mesh, apart = dist.init_device_mesh(device.type, (ranks,)), set(expert_parameters(model))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh, ignored_params=apart, mp_policy=policy)
    else:
        if kind == "register":
            register(way, **options)
        distributed = DistributedConfig(
            fsdp_size=ranks, ep_size=1 if kind == "fsdp" else ranks, fsdp_mixed_precision=True,
            ep_implementation=way if kind == "register" else "auto",
        )  # fmt: skip
        accelerator = torch._C._get_accelerator
        if device.type == "cpu":  # transformers asks torch for one
            torch._C._get_accelerator = lambda: device
        try:
            distributed, _, mesh = type(model).prepare_distribute_model(distributed)
            model = type(model).maybe_distribute_model(model, distributed, mesh)
        finally:
            torch._C._get_accelerator = accelerator
        _materialize(model, device)
        with torch.no_grad():
            for name, p in model.named_parameters():
                local(p).copy_(own(fill(name, p.shape, device)))
    for module in model.modules() if device.type == "cpu" else ():  # gloo has no average
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        if group is not None and group._reduce_scatter_process_group.size() > 1:
            module.set_force_sum_reduction_for_comms(True)
    return model


def _materialize(model: Any, device: torch.device) -> None:
    model.to_empty(device=device)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=rotary.config).to(device)


def loss_of(model: Any, numbers: Tensor) -> Tensor:
    logits = model(input_ids=numbers[:, :-1], use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return nn.functional.cross_entropy(wide.flatten(0, 1), numbers[:, 1:].flatten())


def batch(step: int, sequences: int, length: int, vocabulary: int) -> Tensor:
    """Return sequences [sequences, length + 1]: each number is the one before times 5 plus a drawn step, and one in
    eight is random."""
    draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    columns = [torch.randint(vocabulary, (sequences, 1), generator=draw)]
    steps = torch.randint(1, 8, (sequences, 1), generator=draw)
    for _ in range(length):
        columns.append((columns[-1] * 5 + steps) % vocabulary)
    numbers = torch.cat(columns, 1)
    other = torch.randint(vocabulary, numbers.shape, generator=draw)
    return torch.where(torch.rand(numbers.shape, generator=draw) < 0.125, other, numbers).to(DEVICE)


def clip(model: nn.Module) -> None:
    """Scale the gradients so that the norm of those of all ranks, each of which one rank holds, is at most 1."""
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
    total = torch.stack(torch._foreach_norm(grads)).double().square().sum()
    dist.all_reduce(total)
    torch._foreach_mul_(grads, (1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0).float())


def train(way: str, args: argparse.Namespace) -> tuple[list[float], float, bool]:
    """Return the mean losses of all steps, tokens per second of a rank, and whether a rank dropped rows."""
    config, tokens = config_of(LARGE if args.large else SMALL), args.sequences * args.length
    model = made(way, config, tokens, DEVICE)
    apart: dict[bool, list[Any]] = {True: [], False: []}  # one group for each mesh, as fused optimizers need
    for name, p in model.named_parameters():
        apart[".experts." in name].append(p)
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in apart.values()], betas=(0.9, 0.95), fused=DEVICE.type == "cuda"
    )
    losses, times = [], []
    for step in range(args.steps):
        numbers = batch(step, args.sequences, args.length, config.vocab_size)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 10)
        dist.barrier()
        _wait()
        start = time.perf_counter()
        loss = loss_of(model, numbers)
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        _wait()
        times.append(time.perf_counter() - start)
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    dropped = torch.zeros((), dtype=torch.int32, device=DEVICE)
    for comm in list(ep_ops.registry.living.values()):
        try:
            comm.check_errors()
        except ValueError as error:
            print(f"{way}: {error}", flush=True)
            dropped += 1
        comm.destroy()
    dist.all_reduce(dropped)
    return losses, tokens / statistics.median(times[min(5, len(times) - 1) :]), bool(dropped)


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=WAYS, help=f"default: {WAYS}")
    parser.add_argument("--large", action="store_true", help="the larger model, for the speed")
    parser.add_argument("--sequences", type=int, help="of each rank (default: 2; with --large 4)")
    parser.add_argument("--length", type=int, help="tokens of a sequence (default: 32; with --large 2048)")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1e-4, help="after ten steps in which it rises")
    parser.add_argument("--tolerance", type=float, default=1e-3)
    args = parser.parse_args()
    args.sequences = args.sequences or (4 if args.large else 2)
    args.length = args.length or (2048 if args.large else 32)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    speeds: dict[str, float] = {}
    first, wrong = None, []
    for way in args.ways.split(","):
        losses, speed, dropped = train(way, args)
        gc.collect()
        torch.cuda.empty_cache()
        first, speeds[way] = first or losses, speed
        worst = max(abs(a - b) / b for a, b in zip(losses, first, strict=True))
        if worst > args.tolerance or dropped:
            wrong.append(way)
        if dist.get_rank() == 0:
            ratios = "".join(f", {speed / speeds[base]:.3f} x {base}" for base in WAYS.split(",")[:2] if base in speeds)
            print(f"{way:22} {speed:8.0f} tokens/s on each rank{ratios}")
            print(f"  loss {losses[0]:.5f} to {losses[-1]:.5f}, off the first way by at most {worst:.1e}", flush=True)
            if dropped:
                print("  FAILED: rows were dropped")
    dist.barrier()
    dist.destroy_process_group()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
