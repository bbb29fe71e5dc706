"""The common part of run_vllm_server.py and run_sglang_server.py: the model, the processes of ranks, and the table."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as dist

QWEN3: dict[str, Any] = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", attention_bias=False, bos_token_id=151643,
    eos_token_id=151645, decoder_sparse_step=1, head_dim=128, hidden_act="silu", hidden_size=2048,
    intermediate_size=6144, max_position_embeddings=40960, mlp_only_layers=[], moe_intermediate_size=768,
    norm_topk_prob=True, num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_key_value_heads=4,
    rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1e6, router_aux_loss_coef=0.001, tie_word_embeddings=False,
    torch_dtype="bfloat16", use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
"""The configuration of Qwen3-30B-A3B, without its number of layers."""

SWITCHES = ("EP_OPS_VLLM", "EP_OPS_SGLANG", "EP_OPS_DEEP_EP", "EP_OPS_DEEP_EP_MAX_TOKENS")


def positive(text: str) -> int:
    """Parse a positive int. (Not ep_ops', which these processes import only if their way does.)"""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an int of at least 1")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def parser_of(doc: str | None, ways: Sequence[str], layers: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(ways[:2]), help=f"of {', '.join(ways)}; ratios are to the first")
    parser.add_argument("--out", type=Path, required=True, help="folder for the configuration, logs and results")
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--layers", type=positive, default=layers)
    parser.add_argument("--batches", type=numbers, default=(8, 64, 256), help="sequences of each rank in a step")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each way")
    for name in ("way", "rank", "port"):  # of the processes that the program starts
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser


def write_model(folder: Path, layers: int, **others: Any) -> None:
    """Write a configuration without weights. Servers then draw weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3 | {"num_hidden_layers": layers} | others))


class Peers:
    """A meeting point of the ranks' processes, and a way to return results to the program."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self._ranks, self._turn, self._program = int(args.rank), args.ranks, 0, os.getppid()
        self._store = dist.TCPStore("127.0.0.1", int(args.port), timeout=timedelta(seconds=args.limit))

    def meet(self) -> None:
        """Wait until all ranks call this."""
        self._turn += 1
        self._store.set(f"{self._turn}/{self.rank}", "here")
        self._store.wait([f"{self._turn}/{rank}" for rank in range(self._ranks)])

    def free_port(self) -> int:
        """Return the same free port on all ranks."""
        if self.rank == 0:
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                self._store.set("free port", str(found.getsockname()[1]))
        return int(self._store.get("free port"))

    def give(self, result: dict[str, Any]) -> None:
        """Hand the result to the program, and wait until it ends this process, or has been killed itself."""
        self._store.set(f"result/{self.rank}", json.dumps(result))
        while os.getppid() == self._program:
            time.sleep(1)


def run_way(script: str, way: str, environment: dict[str, str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the script once for each rank, with ``--way``, ``--rank`` and ``--port``, and return what they give.

    Raises:
        SystemExit: a process ended before that, or the limit is over. The last lines of its log are printed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kept = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    path = os.pathsep.join([str(Path(script).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ranks, logs = [], []
    try:
        for rank in range(args.ranks):
            logs.append(args.out / f"{way}.{rank}.log")
            own = ["--way", way, "--rank", str(rank), "--port", str(store.port)]
            with logs[-1].open("w") as log:
                ranks.append(subprocess.Popen(
                    [sys.executable, script, *sys.argv[1:], *own], stdout=log, stderr=subprocess.STDOUT,
                    env=kept | {"PYTHONPATH": path} | environment, start_new_session=True,
                ))  # fmt: skip
        keys, end = [f"result/{rank}" for rank in range(args.ranks)], time.monotonic() + args.limit
        while not store.check(keys):
            stopped = [rank for rank, process in enumerate(ranks) if process.poll() is not None]
            if stopped or time.monotonic() > end:
                time.sleep(1)  # until the others have logged why
                rank = (stopped or [0])[0]
                print("\n".join(logs[rank].read_text(errors="replace").splitlines()[-40:]))
                raise SystemExit(f"{way}: {f'rank {rank} ended' if stopped else 'the limit is over'}; see {logs[rank]}")
            time.sleep(0.2)
        return [json.loads(store.get(key)) for key in keys]
    finally:
        for process in ranks:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that a server has started
            except ProcessLookupError:
                pass
            process.wait()


def same_until(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the medians of each way, averaged over ranks, and their ratios to those of the first way.

    Args:
        found: by way, of each rank: ``batches``, by number of sequences ``step_ms`` and ``graph_ms`` (None without
            graphs); ``prefill_ms``, or None; ``tokens`` of some sequences.
    """
    first, lines = next(iter(found)), []

    def both(way: str, *keys: str) -> str:
        values = []
        for one in (way, first):
            parts: list[Any] = found[one]
            for key in keys:
                parts = [None if part is None else part.get(key) for part in parts]
            values.append(None if None in parts else statistics.mean(parts))
        value, base = values
        return "-" if value is None else f"{value:.3f} ms" + (f" ({value / base:.3f})" if base else "")

    for way, ranks in found.items():
        lines.append(f"{way}: {ranks[0]['layer']}")
        for batch in ranks[0]["batches"]:
            graph, step = (both(way, "batches", batch, key) for key in ("graph_ms", "step_ms"))
            lines.append(f"  {batch:>5} sequences on each rank: graph {graph}, step {step}")
        if any(rank["prefill_ms"] for rank in ranks):
            lines.append(f"  prefill: {both(way, 'prefill_ms')}")
        both_ways = zip(found[first], ranks, strict=True)
        pairs = [pair for a, b in both_ways for pair in zip(a["tokens"], b["tokens"], strict=True)]
        whole = sum(same_until(a, b) == len(a) for a, b in pairs)
        begun = sum(a[0] == b[0] for a, b in pairs)
        lines.append(f"  tokens: {whole} of {len(pairs)} sequences as {first}, {begun} first tokens")
    return "\n".join(lines)


def run(script: str, args: argparse.Namespace, ways: dict[str, dict[str, str]]) -> None:
    """Run the chosen ways one after the other, and print the table."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the processes, too
    unknown = [way for way in args.ways.split(",") if way not in ways]
    if unknown:
        raise SystemExit(f"--ways: {', '.join(unknown)} unknown; allowed: {', '.join(ways)}")
    found = {}
    for way in args.ways.split(","):
        found[way] = run_way(script, way, ways[way], args)
        (args.out / f"{way}.json").write_text(json.dumps(found[way]))
        print(f"{way}: done", flush=True)
    print(table(found))
