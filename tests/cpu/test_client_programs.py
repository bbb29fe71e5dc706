"""Programs in tests/clients that compare the speed of clients: what runs without a GPU and without the clients."""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks

CLIENTS = Path(__file__).parent.parent / "clients"
RANK = """
from serving import Peers, parser_of

args = parser_of("", ["one"], layers=1).parse_args()
peers = Peers(args)
port = peers.free_port()
peers.meet()
if args.way == "broken" and args.rank == "1":
    raise SystemExit("the engine does not start")
import os
peers.give({"rank": peers.rank, "port": port, "seen": os.environ.get("EP_OPS_VLLM"), "way": os.environ["WAY"]})
"""


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(CLIENTS))
    import serving

    return serving


@pytest.mark.parametrize("program", ["run_vllm_server", "run_sglang_server"])
def test_help(program: str, serving: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(CLIENTS / f"{program}.py"), run_name="__main__")
    assert ended.value.code == 0 and "--ways" in capsys.readouterr().out


@pytest.mark.drawn
def test_processes_of_ranks(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, given = tmp_path / "rank.py", ["--out", str(tmp_path), "--limit", "250"]
    script.write_text(RANK)
    monkeypatch.setattr(sys, "argv", ["rank.py", *given])
    monkeypatch.setenv("EP_OPS_VLLM", "1")  # of the caller; a way sets its own
    monkeypatch.setenv("PYTHONPATH", str(CLIENTS))
    args = serving.parser_of("", ["one"], layers=1).parse_args(given)
    found = serving.run_way(str(script), "one", {"WAY": "1"}, args)
    assert [one["rank"] for one in found] == [0, 1] and found[0]["port"] == found[1]["port"]
    assert all(one["seen"] is None and one["way"] == "1" for one in found)
    with pytest.raises(SystemExit, match="broken: rank 1 ended; see .*broken.1.log"):
        serving.run_way(str(script), "broken", {"WAY": "2"}, args)
    assert "the engine does not start" in capsys.readouterr().out


def test_processes_end_with_the_program(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM of the program ends the processes, which end on their own if it is killed."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="two unknown; allowed: one"):
            serving.run("", argparse.Namespace(ways="two"), {"one": {}})
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        assert ended.value.code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    monkeypatch.setattr(serving.dist, "TCPStore", lambda *_, **__: argparse.Namespace(set=lambda *_: None))
    peers = serving.Peers(argparse.Namespace(rank="0", ranks=1, port="1", limit=1))
    monkeypatch.setattr(os, "getppid", lambda: 1)
    peers.give({})


@pytest.mark.parametrize("options", ["--ranks 0", "--batches 8,x", "--layers -1"])
def test_options_are_checked_first(serving: Any, options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serving.parser_of("", ["one"], layers=1).parse_args([*options.split(), "--out", "unused"])
    assert "is not an int of at least 1" in capsys.readouterr().err


def test_table(serving: Any) -> None:
    def rank(step: float, graph: float | None, prefill: float | None, *tokens: list[int]) -> dict[str, Any]:
        return {
            "layer": "L",
            "batches": {"8": {"step_ms": step, "graph_ms": graph}},
            "prefill_ms": prefill,
            "tokens": tokens,
        }

    found = {
        "default": [rank(4.0, 2.0, 10.0, [1, 2], [3, 4]), rank(6.0, 3.0, 30.0, [5, 6], [7, 8])],
        "native": [rank(4.0, 2.0, 20.0, [1, 2], [3, 9]), rank(4.0, 2.0, 20.0, [5, 6], [0, 8])],
        "eager": [rank(8.0, None, None, [1, 2], [3, 4]), rank(8.0, None, None, [5, 6], [7, 8])],
    }
    assert serving.table(found).splitlines() == [
        "default: L",
        "      8 sequences on each rank: graph 2.500 ms (1.000), step 5.000 ms (1.000)",
        "  prefill: 20.000 ms (1.000)",
        "  tokens: 4 of 4 sequences as default, 4 first tokens",
        "native: L",
        "      8 sequences on each rank: graph 2.000 ms (0.800), step 4.000 ms (0.800)",
        "  prefill: 20.000 ms (1.000)",
        "  tokens: 2 of 4 sequences as default, 3 first tokens",
        "eager: L",
        "      8 sequences on each rank: graph -, step 8.000 ms (1.600)",
        "  tokens: 4 of 4 sequences as default, 4 first tokens",
    ]


WAYS = ("fsdp", "transformers", "register+capacity", "register+token_major+redispatch", "spread+capacity")


def trained() -> list[Any]:
    from clients import run_transformers_trainer as program

    args = argparse.Namespace(large=False, sequences=1, length=32, steps=2, lr=1e-4)
    with mock.patch.object(program, "DEVICE", torch.device("cpu")):
        return [program.train(way, args) for way in WAYS]


@pytest.mark.drawn  # test_transformers_gradients.py makes the same models
def test_transformers_trainer() -> None:
    pytest.importorskip("transformers.distributed.expert_parallel", reason="needs transformers 5.23 or later")
    from transformers_cases import need_implementations

    need_implementations()
    found = run_ranks(2, trained)[0]
    for way, (losses, speed, dropped) in zip(WAYS, found, strict=True):
        assert speed > 0 and not dropped, way
        assert losses == pytest.approx(found[0][0], rel=2e-4), way
