"""Serve Qwen3-30B-A3B's sizes with SGLang 0.5.14 in several ways, and compare the speed and the tokens.

    pip install sglang==0.5.14 'ep_ops[cu13]'
    python tests/clients/run_sglang_server.py --out /tmp/sglang
    python tests/clients/run_sglang_server.py --out /tmp/sglang --ways default,native,auto,low_latency,normal

Each rank has a GPU and SGLang's model runner, which makes the steps of ``sglang.bench_one_batch``. Attention is data
parallel, all ranks share the experts, which are FP8 in blocks of 128 x 128, and decode steps are CUDA graphs. Weights
are drawn, equally in all ways. The ways:

    default      no all-to-all (``--moe-a2a-backend none``), Triton experts
    native       ``--moe-a2a-backend deepep`` with EP_OPS_SGLANG=1, DeepGEMM experts
    auto, low_latency, normal: the modes for DeepEP with EP_OPS_DEEP_EP=1, DeepGEMM experts

For each way and number of sequences, the program prints medians and their ratios to those of the first way: the time of
a step's CUDA graph on the GPU; a step, of which each is waited for; and a prefill of 4 sequences of 1024 tokens on each
rank. Then it prints how many of 16 sequences on each rank, of 17 tokens each, are equal to those of the first way. They
depend on roundings, because the weights are random: two kernels for the same experts do not give the same sequences.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import zlib
from typing import Any

import torch
from serving import QWEN3, Peers, parser_of, run, write_model

DEEP_EP = {"EP_OPS_DEEP_EP": "1", "EP_OPS_DEEP_EP_MAX_TOKENS": "4096"}
WAYS = {"default": {}, "native": {"EP_OPS_SGLANG": "1"}, "auto": DEEP_EP, "low_latency": DEEP_EP, "normal": DEEP_EP}
FP8: dict[str, Any] = dict(
    quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128],
    modules_to_not_convert=["self_attn"],
)  # fmt: skip


def draw_weights(model: Any, rank: int) -> None:
    """Draw weights, equal in all ways. Experts of two ranks differ, and experts have an effect on the tokens."""
    for name, p in model.named_parameters():
        split = ".experts." in name or ("lm_head" in name and p.shape[0] < QWEN3["vocab_size"])
        draw = torch.Generator(p.device).manual_seed(zlib.crc32(name.encode()) + 7919 * rank * split)
        if "norm" in name:
            p.data.fill_(1.0)
        elif name.endswith("_scale_inv"):
            p.data.uniform_(0.5, 1.5, generator=draw).mul_(0.06 if "w2" in name else 0.02)
        elif p.dtype == torch.float8_e4m3fn:
            for expert in p.data:
                wide = torch.randn(expert.shape, generator=draw, device=p.device, dtype=torch.float16)
                expert.copy_(wide)
        else:
            p.data.normal_(0.0, 1.0 if "embed" in name else 0.02, generator=draw)


def one_rank(args: Any) -> None:
    peers = Peers(args)
    rank, way = peers.rank, args.way
    os.environ |= {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "256", "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
    from sglang.srt.plugins import load_plugins

    load_plugins()  # before the modules that plugins change
    import numpy
    import sglang.srt.models.qwen3_moe  # noqa: F401
    from sglang import bench_one_batch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_loader import loader
    from sglang.srt.server_args import ServerArgs

    batches = list(args.batches)
    deepep = {"deepep_mode": "auto" if way == "native" else way, "moe_a2a_backend": "deepep"}
    server = ServerArgs(
        model_path=str(args.out / "model"), tp_size=args.ranks, dp_size=args.ranks, ep_size=args.ranks,
        enable_dp_attention=True, enable_dp_lm_head=True, disable_custom_all_reduce=True, attention_backend="triton",
        sampling_backend="pytorch", load_format="dummy", skip_tokenizer_init=True, disable_radix_cache=True,
        mem_fraction_static=0.7, max_total_tokens=65536, max_running_requests=1024, chunked_prefill_size=8192,
        cuda_graph_bs_decode=batches, random_seed=0, context_length=8192, dtype="bfloat16",
        **({} if way == "default" else deepep),
    )  # fmt: skip
    bench_one_batch._set_envs_and_config(server)
    for initialize in ("moe", "fp8_gemm", "fp4_gemm"):
        getattr(bench_one_batch, f"initialize_{initialize}_config")(server)
    bench_one_batch.configure_logger(server, prefix=f" TP{rank}")
    loader.initialize_dummy_weights = lambda model, *_, **__: draw_weights(model, rank)
    runner = ModelRunner(
        model_config=ModelConfig.from_server_args(server), mem_fraction_static=0.7, gpu_id=rank, tp_rank=rank,
        tp_size=args.ranks, moe_ep_rank=rank, moe_ep_size=args.ranks, pp_rank=0, pp_size=1,
        nccl_port=peers.free_port(), server_args=server,
    )  # fmt: skip
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    bench = bench_one_batch._TorchBenchRunner(runner)
    replay, replays = torch.cuda.CUDAGraph.replay, []

    def replayed(graph: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay(graph)
        end.record()
        replays.append((begin, end))

    torch.cuda.CUDAGraph.replay = replayed

    def start(sequences: int, length: int, seed: int) -> Any:
        """Prefill sequences of random tokens, and return the next tokens, their logits and the batch."""
        bench.clear()
        prompts = numpy.random.RandomState(1000 * seed + rank).randint(100, 150000, (sequences, length)).tolist()
        return bench.extend(bench_one_batch.prepare_synthetic_inputs_for_latency_test(sequences, length, prompts))

    def now() -> float:
        torch.cuda.synchronize()
        return 1e3 * time.perf_counter()

    layers = [module.dispatcher for module in runner.model.modules() if hasattr(module, "dispatcher")]
    kinds = {type(part) for layer in layers for part in getattr(layer, "_inners", [layer])}
    result: dict[str, Any] = {"batches": {}, "prefill_ms": None}
    result["layer"] = ", ".join(f"{kind.__module__}.{kind.__name__}" for kind in kinds)
    following, _, batch = start(16, 16, 1)
    tokens = [following.tolist()]
    for _ in range(16):
        following, _ = bench.decode(following, batch)
        tokens.append(following.tolist())
    result["tokens"] = list(zip(*tokens, strict=True))
    for sequences in batches:
        following, _, batch = start(sequences, max(1, 256 // sequences), 2)
        times = []
        replays.clear()
        for _ in range(46):
            begin = now()
            following, _ = bench.decode(following, batch)
            times.append(now() - begin)
        graphs = [first.elapsed_time(last) for first, last in replays[-40:]]
        graph = statistics.median(graphs) if graphs else None
        result["batches"][sequences] = {"step_ms": statistics.median(times[-40:]), "graph_ms": graph}
    if way != "low_latency":  # its buffers hold 256 tokens of each rank
        times = []
        for turn in range(10):
            peers.meet()
            begin = now()
            start(4, 1024, 3 + turn)
            times.append(now() - begin)
        result["prefill_ms"] = statistics.median(times[-8:])
    peers.give(result)


def main() -> None:
    args = parser_of(__doc__, list(WAYS), layers=16).parse_args()
    if args.rank is not None:
        return one_rank(args)
    write_model(args.out / "model", args.layers, quantization_config=FP8)
    run(__file__, args, WAYS)


if __name__ == "__main__":
    sys.exit(main())
