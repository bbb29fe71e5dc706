"""Figures that the model takes from others, and figures that it is held against and that no recorded run holds. Sources
are named, and what is assumed says so."""

from __future__ import annotations

import dataclasses

from .model_memory import Layout
from .model_times import Gpu, Wire

PAIRS_ON_2 = {1: 8.68, 8: 9.24, 32: 11.16, 64: 15.19, 128: 23.01}
"""Tokens of a rank -> µs of a dispatch and a combine of few tokens on 2 H200s, as benchmarks/results/throughput.md has
them ("After kernels learned to guard routes")."""

INFINIBAND = Wire(
    "InfiniBand, GPU-initiated",
    rate=45e9,
    latency=8.35,
    put=0.02,
    told="one 400 Gb/s NIC a GPU: 45 of its 50 GB/s (assumed; DeepEP V2's 90 and 61 GB/s on 2 and 4 hosts, own tokens"
    " included, are 45 across); put and signal 16.7 µs there and back (NCCL GIN on H100, arXiv 2511.15076);"
    " 50 million puts a second (assumed)",
)
EFA = Wire(
    "EFA, proxies",
    rate=43.5e9,
    latency=20.0,
    put=0.4,
    rows=32,
    told="rails of two p5 hosts, all to all: 43.5 GB/s in puts of 1 MB, 13.8 in puts of 8 KB (UCCL), which is 0.4 µs a"
    " put; 20 µs from put to signal (assumed: no figure was found); up to 32 rows of few tokens for a rank in a put,"
    " which a block puts together at 50 GB/s (assumed)",
)
WIRES = (INFINIBAND, EFA)


def gb200(h200: Gpu) -> Gpu:
    """For comparison with figures of GB200; its constants are the H200's."""
    return dataclasses.replace(
        h200,
        name="GB200",
        pull=722e9,
        push=722e9,
        memory=6.2e12,
        told="NVLink 722 GB/s (NCCL 2.30's table for sm_100), memory 6.2 TB/s (8 TB/s at the H200's share: assumed),"
        " constants of the H200",
    )


@dataclasses.dataclass(frozen=True)
class Published:
    """A figure of others. `unit`: µs, or "GB/s of domains": rows for each (token, domain), own domain included, or
    "GB/s of ranks": rows for each (token, rank), own rank included, by time."""

    who: str
    layout: Layout
    wire: Wire | None
    kind: str  # dispatch, combine, few dispatch, few combine
    value: float
    unit: str
    gpu: str = "H200"


def _both(
    who: str,
    layout: Layout,
    wire: Wire | None,
    values: tuple[float, float],
    unit: str,
    few: str = "",
    gpu: str = "H200",
) -> list[Published]:
    """A dispatch and a combine; numbers of a dispatch are as the layout says (1 byte: fp8), of a combine bf16."""
    bf16 = dataclasses.replace(layout, itemsize=2)
    of = ((layout, "dispatch", values[0]), (bf16, "combine", values[1]))
    return [Published(who, made, wire, few + kind, value, unit, gpu) for made, kind, value in of]


DOMAINS, RANKS = "GB/s of domains", "GB/s of ranks"

PUBLISHED = (
    *_both("DeepEP V1, fp8 dispatch", Layout(2, 8, itemsize=1), INFINIBAND, (43, 43), DOMAINS),
    *_both("DeepEP V1, fp8 dispatch", Layout(4, 8, itemsize=1), INFINIBAND, (58, 57), DOMAINS),
    *_both("DeepEP V1, fp8 dispatch", Layout(8, 8, itemsize=1), INFINIBAND, (51, 50), DOMAINS),
    *_both("DeepEP V2", Layout(2, 8, 8192), INFINIBAND, (90, 81), DOMAINS),
    *_both("DeepEP V2", Layout(4, 8, 8192), INFINIBAND, (61, 61), DOMAINS),
    *_both("HybridEP, H100", Layout(2, 8), INFINIBAND, (71.7, 63), DOMAINS),
    *_both("HybridEP, H100", Layout(4, 8), INFINIBAND, (57.7, 57.5), DOMAINS),
    *_both("HybridEP, H100", Layout(8, 8), INFINIBAND, (50, 49.8), DOMAINS),
    *_both("UCCL-EP, p5en", Layout(2, 8, itemsize=1), EFA, (1196, 6379), "µs"),
    *_both("DeepEP V1, fp8 dispatch", Layout(2, 8, 128, itemsize=1), INFINIBAND, (118, 195), "µs", "few "),
    *_both("DeepEP V1, fp8 dispatch", Layout(8, 8, 128, itemsize=1), INFINIBAND, (173, 314), "µs", "few "),
    *_both("DeepEP V1, fp8 dispatch", Layout(32, 8, 128, itemsize=1), INFINIBAND, (194, 360), "µs", "few "),
    *_both("pplx-garden, CX-7", Layout(2, 8, 128, itemsize=1), INFINIBAND, (110, 186), "µs", "few "),
    *_both("pplx-garden, CX-7", Layout(8, 8, 128, itemsize=1), INFINIBAND, (188, 309), "µs", "few "),
    *_both("pplx-garden, EFA", Layout(2, 8, 128, itemsize=1), EFA, (215, 242), "µs", "few "),
    *_both("pplx-garden, EFA", Layout(8, 8, 128, itemsize=1), EFA, (267, 391), "µs", "few "),
    *_both("UCCL-EP, p5en", Layout(2, 8, 128, itemsize=1), EFA, (226, 293), "µs", "few "),
    *_both("HybridEP, GB200", Layout(1, 8, experts=64), None, (764, 737), RANKS, gpu="GB200"),
    *_both("HybridEP, GB200", Layout(1, 16, experts=128), None, (707, 666), RANKS, gpu="GB200"),
    *_both("HybridEP, GB200", Layout(1, 32, experts=256), None, (642, 605), RANKS, gpu="GB200"),
    *_both("mscclpp, GB200", Layout(1, 4), None, (284, 476), "µs", gpu="GB200"),
    Published("mscclpp, GB200", Layout(1, 8), None, "combine", 494, "µs", "GB200"),
    Published("mscclpp, GB200", Layout(1, 16), None, "combine", 640, "µs", "GB200"),
    Published("mscclpp, GB200", Layout(1, 32), None, "combine", 747, "µs", "GB200"),
    Published("mscclpp, GB200", Layout(1, 16), None, "dispatch", 925, "µs", "GB200"),
)
"""Tokens, hidden size and top-k are those of `Layout` unless they are named: 4096 (few: 128), 7168, 8. Routing is taken
to be even over all experts, also where it was limited to groups, and the dtype to be bf16 where none is told."""
