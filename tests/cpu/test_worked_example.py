"""The example that the docstrings of kernels work out is what the reference backend computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks

from ep_ops import Communicator
from ep_ops.nn import expert_lists

KERNELS = Path(__file__).parents[2] / "cute_kernels"
IDS = ([[2, 0], [3, 2]], [[2, 1], [0, 1]])


def routes() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    sizes: dict[str, Any] = dict(num_experts=4, hidden_size=8, top_k=2, max_tokens_per_rank=2, alignment=1)
    comm = Communicator(**sizes, dtype=torch.float32, device="cpu", backend="reference")
    ids, x = torch.tensor(IDS[rank], dtype=torch.int32), torch.zeros(2, 8)
    found: dict[str, Any] = {}
    for layout, capacity in (("grouped", 4), ("token_major", 3)):
        route = comm.dispatch(x, ids, layout=layout, capacity=capacity).route
        found[layout] = {name: getattr(route, name).tolist() for name in ("send_rows", "arrivals", "offs", "counts")}
        if route.local_idx is not None:
            found["local_idx"] = route.local_idx.tolist()
            lists = expert_lists(route.local_idx, 2, capacity=4)
            found["lists"] = {name: getattr(lists, name).tolist() for name in ("rows", "flat", "places", "offs")}
    comm.destroy()
    return found


def pairs(arrivals: list[int], rows: int, copies: int) -> tuple[str, str, str]:
    """Return the lists as docstrings write them, without what is undefined."""
    begin = 2 * (rows + 1)
    ends = [f"[{a}, {b}]" for a, b in zip(arrivals[: 2 * copies : 2], arrivals[1 : 2 * copies : 2], strict=True)]
    owned = arrivals[begin : begin + 2 * rows]
    of_rows = [f"[{a}, {b}]" for a, b in zip(owned[::2], owned[1::2], strict=True)]
    return " ".join(ends), " ".join(of_rows), " ".join(map(str, arrivals[-3:]))


def said(file: str, *texts: str) -> None:
    words = " ".join((KERNELS / file).read_text().split('"""')[1].split())
    for text in texts:
        assert text in words, f"{file} does not say {text}"


def test_the_example() -> None:
    sent, here = run_ranks(2, routes)
    assert sent["grouped"]["send_rows"] == [[0, 0], [3, 1]]
    assert (here["grouped"]["offs"], here["grouped"]["counts"]) == ([3, 4], [3, 1])
    copies, owned, sources = pairs(here["grouped"]["arrivals"], 4, 3)
    said("arrivals.py", f"copies {copies} [4, -]", f"owned {owned}", f"sources {sources}")
    said("local/places_route.py", f"`copies` {copies} [4, -], `owned` {owned}")
    said("throughput/placing.py", "`send_rows` of rank 0 becomes 0 0, 3 1")

    assert sent["token_major"]["send_rows"] == [[0, 0], [1, -1]]
    assert here["local_idx"] == [[0, -1], [1, 0], [0, -1]]
    copies, owned, _ = pairs(here["token_major"]["arrivals"], 3, 3)
    said("latency/place_tokens.py", f"`copies` is {copies} and `owned` {owned}")
    said("throughput/placing_tokens.py", "0 -1, 1 0 and 0 -1", "becomes 0 0 for token 0", "and 1 -1 for token 1")
    lists = {name: " ".join(str(value).replace("[", "").replace("]", "").replace(",", "").split())
             for name, value in here["lists"].items()}  # fmt: skip
    said("local/expert_lists.py", *(f"{name} {lists[name]}" for name in ("flat", "rows", "places", "offs")))
