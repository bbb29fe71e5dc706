"""The kernels' own source, run on a CPU thread by thread (tests/emulator says what that proves and what not)."""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
from pathlib import Path

import drawing
import pytest
from cases import fresh_seed
from forks import forks

pytest.importorskip("greenlet", reason="needs greenlet, whose threads stand for those of a GPU")

from emulator.main import CHECKS, main
from emulator.mutations import MUTATIONS, ROOT

ALWAYS = (
    "latency", "throughput", "few_rows", "rejected_latency", "epochs_latency_across", "posted", "walked", "guarded",
    "owned", "latency_one_rank", "places_route_garbage", "distinct_swizzled",
)  # fmt: skip
ONE_OF = (
    ("throughput_dropping", "death_few_dispatch", "wire_nvshmem", "across_small", "across_wide"),
    ("alarm_joining", "alarm_staging"),
)
"""Of each group one is run, others for each commit."""
DRAWN = 1
"""How many of the other checks are run, others for each commit. EP_OPS_ALL_CHECKS=1: all, which takes an hour."""
SLOW = (
    "across_", "alarm_", "death_", "epochs_", "rejected_", "domains_", "formats_", "pushes", "rounds", "tokens",
    "latency_34", "latency_across", "throughput_",
)  # fmt: skip
"""How the names of those begin that may take minutes: they are never drawn."""


def some() -> list[str]:
    grouped = [name for group in ONE_OF for name in group]
    others = [name for name in CHECKS if name not in (*ALWAYS, *grouped)]
    if os.environ.get("EP_OPS_ALL_CHECKS") == "1":
        return [*ALWAYS, *grouped, *others]
    draw = random.Random(drawing.text())
    quick = [name for name in others if not name.startswith(SLOW)]
    return [*ALWAYS, *map(draw.choice, ONE_OF), *draw.sample(quick, DRAWN)]


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_still_apply(name: str) -> None:
    """The source that the nightly run removes exists, and so does its check."""
    check, file, old, new = MUTATIONS[name]
    source = (ROOT / "cute_kernels" / file).read_text()
    assert check in CHECKS and source.count(old) == 1 and new != old


@pytest.mark.parametrize("name", some())
def test_check(name: str, tmp_path: Path) -> None:
    """A check passes, in a process of its own, since fakes stand there in the places of the DSL's modules."""
    seed, said = fresh_seed(), tmp_path / "said"
    said.touch()
    process = forks().Process(target=_check, args=(name, seed, said), daemon=True)
    process.start()
    try:
        process.join()
    finally:
        process.kill()
    assert process.exitcode == 0, f"emulator.main {name} {seed} says\n{said.read_text()}"


def _check(name: str, seed: int, said: Path) -> None:
    gc.freeze()  # what all forks share
    warnings.simplefilter("ignore")
    with open(said, "w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    main(name, seed)
