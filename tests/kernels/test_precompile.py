"""tests/gpu/precompile.py lists the kernels of the files of GPU tests. Needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

GPU = Path(__file__).parents[1] / "gpu"
WITHOUT = {
    "test_deaths.py": "starts processes itself",
    "test_deep_gemm.py": "needs an optional package",
    "test_domains_rounds.py": "listed with test_domains.py",
    "test_domains_steps.py": "listed with test_domains.py",
    "test_domains_tokens.py": "listed with test_domains.py",
    "test_flights.py": "kernels of test_latency.py",
    "test_nvshmem.py": "needs an optional package",
    "test_quack.py": "needs an optional package",
}
"""Files whose kernels are not listed."""
LIST = """
import json
import precompile, test_gather, test_moe_communicator, test_steps
from ep_ops.backends.cute.backend import all_kernels
from ep_ops.config import Config, default_experts

found, lists = {}, {file: [find(ranks, 1) for ranks in (1, 2)] for file, find in precompile.FINDS.items()}
for file, given, bound, formats in (
    ("test_moe_communicator.py", *test_moe_communicator.wanted(2)),
    ("test_steps.py", test_steps.CONFIG, 0, []),
    ("test_gather.py", test_gather.steps_config(2), 0, []),
):
    listed = set(lists[file][1])
    experts = tuple(default_experts(given["num_experts"], 2))
    config = Config(**given | {"latency_max_tokens": bound}, world_size=2, experts_per_rank=experts)
    of_problem = [kernel for kernel in listed if kernel.problem == all_kernels(config)[0].problem]
    kinds = sorted({type(kernel).__name__ for kernel in of_problem})
    counts = sorted({kernel.problem.counts_waits for kernel in listed})
    found[file] = counts, kinds, len(set(all_kernels(config, formats)) - listed)
print(json.dumps([{file: [len(one) for one in of_file] for file, of_file in lists.items()}, found]))
"""

TILES = """
import json
from test_few_rows import E4M3, kernels

depths = {"FewRows": 512, "FewRowsE4M3": E4M3[0][0] // 2}  # of the tests that compare tiles
found = {name: set() for name in depths}
for kernel in kernels(1):
    if kernel.gated and kernel.experts == 5 and kernel.depth == depths[type(kernel).__name__]:
        found[type(kernel).__name__].add(kernel.tile.rows)
print(json.dumps({name: sorted(rows) for name, rows in found.items()}))
"""

SERVED = """
import concurrent.futures, pathlib, sys
import precompile
from cute_kernels import jit

folder, submitted = pathlib.Path(sys.argv[1]), []

class Pool(concurrent.futures.ProcessPoolExecutor):
    def submit(self, function, kernel, arch):
        submitted.append(kernel)
        done = concurrent.futures.Future()
        done.set_result(None)
        return done

concurrent.futures.ProcessPoolExecutor = Pool
jit.prepared = lambda kernel, arch: kernel == "there"
precompile.ask(folder, precompile.LATER, "a", ["there", "missing"])
precompile.time.sleep = lambda seconds: (folder / "end").touch()
precompile.serve(folder, "sm_90a", 2)
print(submitted)
"""


ASKED = """
import json, os, pickle, types
import lockstep
from ep_ops.backends.cute import backend, launcher
from ep_ops.backends.cute.backend import all_kernels
from ep_ops.config import Config
from ep_ops.memory import planned

backend.CuteBackend.__init__ = lambda self, member: None
lockstep.ask_for_kernels()
config = planned(Config(num_experts=4, hidden_size=64, top_k=2, max_tokens_per_rank=64), 2)
kernels = all_kernels(config)
os.environ["PYTEST_CURRENT_TEST"] = "tests/gpu/test_latency.py::test_first (call)"
backend.CuteBackend(types.SimpleNamespace(config=config))
(last,) = [pickle.loads(path.read_bytes()) for path in lockstep.FOLDER.glob("*.kernels")]
assert last == list(dict.fromkeys(kernels)) and [*lockstep.FOLDER.glob("3-*.kernels")]
for rank, wanted in ((0, kernels[:3]), (1, kernels), (0, kernels[1:4]), (0, kernels[:4])):
    lockstep.RANK = rank
    launcher.prepare_all(wanted, "sm_90a", 8)
asked = [pickle.loads(path.read_bytes()) for path in sorted(lockstep.FOLDER.glob("1-*.kernels"))]
print(json.dumps([[kernels.index(kernel) for kernel in some] for some in asked]))
"""


@pytest.fixture(scope="module")
def listed() -> Any:
    """Numbers of kernels by file, on 1 and on 2 ranks, and what is listed of three communicators."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(GPU), *sys.path])}
    done = subprocess.run([sys.executable, "-c", LIST], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_of_every_file_of_gpu_tests_are_listed(listed: Any) -> None:
    """Every file of tests/gpu has kernels in precompile.FINDS, on 1 or on 2 ranks, or a reason here why it has none."""
    numbers, _ = listed
    assert {path.name for path in GPU.glob("test_*.py")} == {*numbers, *WITHOUT}
    assert all(any(counts) for counts in numbers.values()), numbers
    assert all(numbers[file][0] > 0 for file in ("test_live_rows.py", "test_sums.py", "test_lists.py")), numbers
    assert all(numbers["test_few_rows.py"]), numbers


def test_what_a_warmup_compiles_is_listed(listed: Any) -> None:
    """A listed kernel is that of a communicator with all values of its configuration, and kernels of failures, which a
    warmup compiles as well, are listed with the operators'."""
    counting = {"test_moe_communicator.py": [True], "test_steps.py": [False], "test_gather.py": [False]}
    for file, (counts, kinds, missing) in listed[1].items():
        assert counts == counting.pop(file) and missing == 0, file
        assert {"Reject", "RaiseAlarm", "Gather", "Publish", "Pull", "Combine"} <= {*kinds}, file
    assert not counting


@pytest.mark.drawn
def test_bits_are_compared_on_all_tiles_for_few_rows() -> None:
    """The bounds on tokens in test_few_rows.py select every number of rows of a tile."""
    from cute_kernels.gemm.few_rows import ROWS

    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(GPU), *sys.path])}
    done = subprocess.run([sys.executable, "-c", TILES], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(("FewRows", "FewRowsE4M3"), [*ROWS])


def test_warmups_ask_for_their_kernels(tmp_path: Path) -> None:
    """Where other processes compile, a warmup starts none: rank 0 asks for each kernel once, also for those of a new
    communicator, which come last because the file's own kernels are listed."""
    env = os.environ | {
        "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(GPU), *sys.path]),
        "EP_OPS_GPU_RUN": str(tmp_path), "EP_OPS_GPU_GROUP": "2.0.1", "EP_OPS_GPU_STAGE": "2",
        "EP_OPS_GPU_END": "inf", "EP_OPS_GPU_COMPILERS": "4",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", ASKED], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, 1, 2], [3]]


def test_what_is_on_disk_is_not_compiled_again(tmp_path: Path) -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(GPU), *sys.path])}
    command = [sys.executable, "-c", SERVED, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['missing']"
