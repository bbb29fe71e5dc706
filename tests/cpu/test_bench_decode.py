"""`ep-ops bench decode` on a CPU: sizes by name, what it measures and writes, and the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ep_ops.bench import decode
from ep_ops.commands import cli

SMALL = "--device cpu --ranks 1 --tokens 1,3 --hidden 64 --width 32 --experts 8 --top-k 2 --replays 2 --calls 2"


def test_sizes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the model, but for what is given."""
    read = []
    monkeypatch.setattr(decode, "on_every_rank", lambda measure, args: read.append(args) or 0)
    for options in ("--model qwen3-30b", "--model deepseek-v3 --experts 32 --tokens 8"):
        assert decode.main(["--device", "cpu", *options.split()]) == 0
    first, second = ((args.hidden, args.width, args.experts, args.top_k, args.tokens) for args in read)
    assert first == (2048, 768, 128, 8, decode.TOKENS) and second == (7168, 2048, 32, 8, (8,))
    with pytest.raises(SystemExit):
        decode.main(["--model", "other"])
    assert "invalid choice: 'other'" in capsys.readouterr().err


def test_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert cli.main(["bench", "decode", *SMALL.split(), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["benchmark"] == "decode" and found["width"] == 32 and found["read_tb_s"] is None
    assert [result["tokens"] for result in found["results"]] == [1, 3]
    for result in found["results"]:
        assert result["correct"] and 0 < result["error"] < decode.MAX_ERROR and 0 < result["named"] <= 6
        assert all(result[name] > 0 for name in ("memory", "transposed", "torch", "gemms", "pair"))
    assert not any("floor" in line for line in decode.table(found)[2:])


def test_table() -> None:
    run = {
        "experts": 8, "top_k": 2, "hidden": 64, "width": 32, "dtype": "bf16", "calls": 10, "replays": 30,
        "read_tb_s": 3.09, "results": [
            {"tokens": 1, "named": 2.0, "floor_us": 10.0, "memory": 11.0, "pair": 5.0, "correct": True},
            {"tokens": 8, "named": 7.5, "floor_us": 40.0, "memory": 42.0, "torch": 60.0, "correct": True},
        ],
    }  # fmt: skip
    heading, *rows = decode.table(run)
    assert heading.endswith("graphs of 10, median of 30 replays; a kernel that only reads: 3.09 TB/s")
    assert [row.split()[-1] for row in rows] == ["8", "7.5", "40.0", "(1.05)", "(1.50)", "5.0"]
    assert rows[3].startswith("layer, kernels for few rows") and "11.0 (1.10)" in rows[3]
    run["results"][1]["correct"] = False
    assert "WRONG" in decode.table(run)[4]
