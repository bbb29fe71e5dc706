"""Its place makes ``tests/`` importable: ``import cases`` works in every test below."""

import gc
import os
import random
import shutil
import tempfile
from pathlib import Path

import drawing
import pytest

LONG = (
    "test_cli.py", "test_ptx.py", "test_emulated.py", "test_transformers.py", "test_operators_collectives.py",
    "test_token_major_experts.py", "test_gpu_runner.py", "test_top_k.py", "test_formats_ptx.py", "test_across_ptx.py",
    "test_moe_layer.py", "test_formats_model.py", "test_operators_compile.py", "test_latency_ptx.py",
    "test_reference.py", "test_parallel.py", "test_few_rows_ptx.py", "test_wheel.py", "test_operators_registration.py",
    "test_divisors.py",
)  # fmt: skip


DRAWN = 1 / 8
"""Which part of the cases is run of tests that are marked `drawn`."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep what Inductor and the CuTe DSL compile in a folder of this run, never of an earlier ep_ops.

    Processes of pytest-xdist, and workers of tests, inherit the folder from the process that starts them. Ranks under
    torchrun have one in common.
    """
    if hasattr(config, "workerinput"):
        return
    drawing.text()  # the same for all processes of the run
    # Threads of OpenMP spin while they wait for more work, and all cores have work.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(tempfile.gettempdir())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        folder /= f"ep_ops_tests_{os.environ['TORCHELASTIC_RUN_ID']}_{os.getppid()}"
    else:
        folder = Path(tempfile.mkdtemp(prefix="ep_ops_tests_"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    kernels = folder / "kernels"  # tests/kernels/built.py
    kernels.mkdir(parents=True, exist_ok=True)
    os.environ["EP_OPS_TEST_KERNELS"] = str(kernels)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collectstart() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep modules and test cases, which are most of all objects, out of garbage collections, and collect less often:
    reference counts free nearly all of the many objects that compilers make."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_report_header() -> str:
    return f"{drawing.NAME}={drawing.text()} repeats the random subset of tests; EP_OPS_ALL_CHECKS=1 runs all"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest tests` leaves out tests/gpu, which are run by themselves: by torchrun, and some of those here have files
    of the same name."""
    if collection_path != Path(__file__).parent / "gpu":
        return None
    asked = ((config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args)
    return None if any(collection_path in (path, *path.parents) for path in asked) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files come first, so that none of them is left to one process at the end."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    if os.environ.get("EP_OPS_ALL_CHECKS") == "1":
        return
    run = drawing.text()
    left_out = {item for item in items if not drawn(item, run)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def drawn(item: pytest.Item, run: str) -> bool:
    return not item.get_closest_marker("drawn") or random.Random(run + item.nodeid).random() < DRAWN
