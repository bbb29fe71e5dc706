"""Serve Qwen3-30B-A3B's sizes with vLLM 0.26 in several ways, and compare the speed and the tokens.

    pip install vllm==0.26.0 'ep_ops[cu13]'
    python tests/clients/run_vllm_server.py --out /tmp/vllm
    python tests/clients/run_vllm_server.py --out /tmp/vllm --ways default,deepep_low_latency --max-batched 256

Each rank is an engine of vLLM on a GPU of its own (data parallelism), and all ranks share the experts. Decode steps are
CUDA graphs. Weights are drawn, with a standard deviation of 0.02, equally in all ways. The ways:

    default             vLLM's default, the all-to-all backend allgather_reducescatter
    native              the same with EP_OPS_VLLM=1
    deepep_low_latency  vLLM's backend for DeepEP with EP_OPS_DEEP_EP=1; buffers grow with --max-batched

For each way and number of sequences, the program prints medians and their ratios to those of the first way: the time of
a step's CUDA graph on the GPU; a step, from the start of one to the start of the next; and a prefill step of
--max-batched tokens. Then it prints how many of 16 sequences on each rank, of 32 tokens each, are equal to those of the
first way. They depend on roundings, because the weights are random.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
import zlib
from typing import Any

import torch
from serving import Peers, parser_of, run, write_model

WAYS = {"default": {}, "native": {"EP_OPS_VLLM": "1"}, "deepep_low_latency": {"EP_OPS_DEEP_EP": "1"}}


class Timing:
    """Methods that vLLM gives to its workers (``worker_extension_cls``)."""

    model_runner: Any

    def timing_fill(self, rank: int) -> str:
        """Draw the weights, and return the class that exchanges tokens in the layers."""
        model = self.model_runner.get_model()
        with torch.inference_mode():
            for name, p in model.named_parameters():
                if p.dim() < 2:
                    p.fill_(1.0)  # norms
                    continue
                draw = torch.Generator(p.device).manual_seed(zlib.crc32(name.encode()) + rank * ("experts" in name))
                p.uniform_(-0.0346, 0.0346, generator=draw)
        kernels = [getattr(getattr(m, "quant_method", None), "moe_kernel", None) for m in model.modules()]
        found = {type(kernel.impl.prepare_finalize) for kernel in kernels if kernel is not None}
        return ", ".join(f"{kind.__module__}.{kind.__name__}" for kind in found)

    def timing_begin(self, tokens: int) -> None:
        """Record, from now on, the steps of that many tokens."""
        torch.cuda.synchronize()
        self.timing_record: dict[str, Any] = {"tokens": tokens, "now": 0, "starts": [], "replays": []}
        if "execute_model" in vars(self.model_runner):
            return
        execute, replay = self.model_runner.execute_model, torch.cuda.CUDAGraph.replay

        def execute_model(output: Any, *rest: Any, **others: Any) -> Any:
            record = self.timing_record
            record["now"] = output.total_num_scheduled_tokens
            record["starts"].append((time.perf_counter(), record["now"]))
            try:
                return execute(output, *rest, **others)
            finally:
                record["now"] = 0  # batches without requests, for other ranks, are not recorded

        def replayed(graph: Any) -> None:
            record = self.timing_record
            if record["now"] != record["tokens"]:
                return replay(graph)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay(graph)
            end.record()
            record["replays"].append((begin, end))

        self.model_runner.execute_model, torch.cuda.CUDAGraph.replay = execute_model, replayed

    def timing_end(self) -> str:
        """Return the medians since :meth:`timing_begin`, as JSON."""
        torch.cuda.synchronize()
        record = self.timing_record
        starts, tokens = record["starts"], record["tokens"]
        steps = [1e3 * (b - a) for (a, m), (b, n) in zip(starts, starts[1:], strict=False) if m == n == tokens]
        graphs = [begin.elapsed_time(end) for begin, end in record["replays"]]
        step, graph = (statistics.median(times) if times else None for times in (steps, graphs))
        return json.dumps({"step_ms": step, "graph_ms": graph})


def one_rank(args: Any) -> None:
    peers = Peers(args)
    rank, port = peers.rank, peers.free_port()
    os.environ.update(
        VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank), VLLM_DP_SIZE=str(args.ranks),
        VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=str(port), VLLM_WORKER_MULTIPROCESSING_METHOD="spawn",
        EP_OPS_DEEP_EP_MAX_TOKENS=str(args.max_batched),
    )  # fmt: skip
    from vllm import LLM, SamplingParams

    batches, most = list(args.batches), args.max_batched
    backend = args.way if args.way.startswith("deepep") else "allgather_reducescatter"
    options: dict[str, Any] = dict(
        skip_tokenizer_init=True, load_format="dummy", max_model_len=max(4096, most // 4 + 8), seed=0,
        max_num_seqs=max(batches), max_num_batched_tokens=most, gpu_memory_utilization=0.75,
        enable_prefix_caching=False, enable_expert_parallel=True, all2all_backend=backend,
        worker_extension_cls="run_vllm_server.Timing", compilation_config={"cudagraph_capture_sizes": sorted(batches)},
    )  # fmt: skip
    llm = LLM(str(args.out / "model"), **options | json.loads(args.engine))
    engine, number = llm.llm_engine, iter(range(1 << 30))

    def serve(sequences: int, length: int, new: int, seed: int = 0) -> list[list[int]]:
        """Serve all sequences at once, and return their tokens."""
        draw, ids, tokens = random.Random(1000 * seed + rank), [], {}
        how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for _ in range(sequences):
            ids.append(f"r{next(number)}")
            prompt = [draw.randrange(100, 150000) for _ in range(length)]
            engine.add_request(ids[-1], {"prompt_token_ids": prompt}, how)
        while engine.has_unfinished_requests():
            tokens.update({o.request_id: list(o.outputs[0].token_ids) for o in engine.step() if o.finished})
        return [tokens[name] for name in ids]

    def timed(tokens: int, *how: int) -> dict[str, Any]:
        peers.meet()
        llm.collective_rpc("timing_begin", args=(tokens,))
        peers.meet()
        serve(*how)
        return json.loads(llm.collective_rpc("timing_end")[0])

    result: dict[str, Any] = {"layer": llm.collective_rpc("timing_fill", args=(rank,))[0], "batches": {}}
    peers.meet()
    serve(8, 16, 8)
    result["tokens"] = serve(16, 32, 32, seed=1)
    for batch in batches:
        serve(batch, 16, 6)
        result["batches"][batch] = timed(batch, batch, 32, 70, 2)
    result["prefill_ms"] = None
    if most > max(batches):
        serve(8, most // 4, 1)
        result["prefill_ms"] = timed(most, 16, most // 4, 1, 4)["step_ms"]
    peers.give(result)


def main() -> None:
    parser = parser_of(__doc__, list(WAYS), layers=32)
    parser.add_argument("--max-batched", type=int, default=8192, help="tokens of a step, which a prefill takes whole")
    parser.add_argument("--engine", default="{}", help="further arguments of vllm.LLM, as JSON")
    args = parser.parse_args()
    if args.rank is not None:
        return one_rank(args)
    write_model(args.out / "model", args.layers)
    run(__file__, args, WAYS)


if __name__ == "__main__":
    sys.exit(main())
