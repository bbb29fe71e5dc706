"""The code blocks of docs/training.md, in order, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks

import ep_ops

PAGE = Path(ep_ops.__file__).parent.parent / "docs/training.md"


def run_blocks() -> tuple[int, float]:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    tuned = names["tuned"]
    ids, weights = torch.rand(7, 5).topk(2).indices, torch.full((7, 2), 0.5)
    tuned(torch.randn(7, 16), ids, weights).sum().backward()
    learned = {name for name, p in tuned.named_parameters() if p.grad is not None}
    assert learned == {"parametrizations.w_in.0.a", "parametrizations.w_in.0.b"}
    loaded = names["model"].moe.experts.w_in
    assert not loaded.full_tensor().any()
    names["comm"].destroy()
    return len(blocks), float(names["norm"])


def test_blocks_run_on_two_ranks() -> None:
    (blocks, norm), (same, other) = run_ranks(2, run_blocks)
    assert blocks == same >= 10 and norm == other > 0
