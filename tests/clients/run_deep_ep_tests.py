"""Run DeepEP's own tests on ``ep_ops.integrations.deep_ep``, with their assertions unmodified.

    git clone https://github.com/deepseek-ai/DeepEP checkout                # any version; nothing of it is built
    python tests/clients/run_deep_ep_tests.py checkout/tests/elastic/test_ep.py --num-processes 2 --skip-perf-test

What follows the test's path are that test's arguments. The test and the modules of the checkout that it imports run as
they are, but for this:

* Each assertion is counted, and the test goes on behind one that fails. The last line tells how many held and failed.
* ``bench`` and ``bench_kineto`` call what they measure once (on a CPU not at all) and return made-up times.
* Without a GPU, or with ``--cpu`` before the path: the device "cuda" is "cpu", the backend "nccl" is "gloo",
  ``torch.cuda.synchronize`` and ``set_device`` do nothing, ``torch.compile`` compiles nothing, and collectives are
  called as gloo takes them: all-to-alls move float8 as bytes, all-gathers flat tensors.
* ``deep_ep`` is ``ep_ops.integrations.deep_ep``, to which no name is added. ``deep_ep._C`` is empty.

The exit status is 0 if assertions were run, all of them held, and nothing else was raised.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib.util
import os
import pathlib
import socket
import sys
import tempfile
import types
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from ep_ops.integrations import deep_ep

HELPERS = ("math", "testing", "comm", "envs", "gate", "refs")
"""Modules of DeepEP's ``utils`` that tests import, in an order in which they import each other."""
COUNTS: collections.Counter[tuple[str, int, bool]] = collections.Counter()
"""How often the assertion in (file, line) held and failed."""


class _Rewrite(ast.NodeTransformer):
    """Counts assertions, and has tests for GPUs run on a CPU."""

    def __init__(self, file: str, cpu: bool) -> None:
        self.file, self.names = file, {"cuda": "cpu", "cuda:": "cpu:", "nccl": "gloo"} if cpu else {}

    def visit_Assert(self, node: ast.Assert) -> Any:
        self.generic_visit(node)
        counted = ast.parse(
            f"try: pass\nexcept AssertionError as _error: _assertion({self.file!r}, {node.lineno}, _error)\n"
            f"else: _assertion({self.file!r}, {node.lineno}, None)"
        ).body[0]
        assert isinstance(counted, ast.Try)
        counted.body = [node]
        return ast.copy_location(counted, node)

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, str) and node.value in self.names:
            return ast.copy_location(ast.Constant(self.names[node.value]), node)
        return node


def _assertion(file: str, line: int, error: AssertionError | None) -> None:
    first = not COUNTS[file, line, False]
    COUNTS[file, line, error is None] += 1
    if error is not None and first:
        print(f"{file}:{line} fails: {str(error)[:300]}", file=sys.stderr, flush=True)


def _load(name: str, path: pathlib.Path, cpu: bool, run_as: str | None = None) -> types.ModuleType:
    """Import the file as module ``name``; ``run_as``: what it finds in ``__name__``."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    if run_as:
        module.__name__ = run_as
    module._assertion = _assertion  # type: ignore[attr-defined]
    sys.modules[name] = module
    tree = ast.fix_missing_locations(_Rewrite(path.name, cpu).visit(ast.parse(path.read_text())))
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


def _bench(call: Any, *_: Any, **__: Any) -> tuple[float, float, float]:
    if torch.cuda.is_available():
        call()
    return 1.0, 1.0, 1.0


def _bench_kineto(call: Any, kernel_names: Any, *_: Any, num_kernels_per_period: int = 1, **__: Any) -> Any:
    if torch.cuda.is_available():
        call()
    each: Any = 1.0 if num_kernels_per_period == 1 else [1.0] * num_kernels_per_period
    return (each,) * len(kernel_names) if isinstance(kernel_names, tuple) else each


def _load_test(path: pathlib.Path, cpu: bool, run_as: str | None = None) -> types.ModuleType:
    """Import a test of DeepEP and what it imports of the checkout."""
    deep_ep.install()
    if cpu:
        start, exchange, gather = dist.init_process_group, dist.all_to_all_single, dist.all_gather_into_tensor
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.set_device = lambda device: None
        dist.init_process_group = lambda device_id=None, **given: start(**given)  # type: ignore[assignment]

        def all_to_all_single(*given: Any, **named: Any) -> None:
            exchange(*(one.view(torch.uint8) if getattr(one, "itemsize", 0) == 1 else one for one in given), **named)

        dist.all_to_all_single = all_to_all_single  # type: ignore[assignment]
        dist.all_gather_into_tensor = lambda out, given, **named: gather(  # type: ignore[assignment]
            out.view(-1), given.view(-1), **named
        )
    utils = next(up for up in path.parents if (up / "deep_ep").is_dir()) / "deep_ep" / "utils"
    helpers = {f"deep_ep.utils.{name}": utils / f"{name}.py" for name in HELPERS}
    if not utils.is_dir():  # version 1: a file beside the tests
        helpers = {"utils": path.parent / "utils.py"}
    for name in ("deep_ep", deep_ep.__name__):  # `import deep_ep._C as _C` asks for both
        sys.modules[f"{name}._C"] = types.ModuleType("deep_ep._C")
    for name, file in helpers.items():
        module = _load(name, file, cpu)
        for replaced in (_bench, _bench_kineto):
            if hasattr(module, replaced.__name__[1:]):
                setattr(module, replaced.__name__[1:], replaced)
    for beside in sorted(path.parent.glob("test_low_latency.py")):  # which another test imports
        if beside != path:
            _load(beside.stem, beside, cpu)
    return _load(path.stem, path, cpu, run_as)


def _rank(rank: int, path: pathlib.Path, cpu: bool, function: str, arguments: tuple[Any, ...], counts: str) -> None:
    torch.set_num_threads(1)
    module = _load_test(path, cpu)
    try:
        getattr(module, function)(rank, *arguments)
    finally:
        torch.set_default_device(None)
        torch.save(dict(COUNTS), f"{counts}/{rank}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU even if there are GPUs")
    parser.add_argument("test", type=pathlib.Path, help="a test file in a checkout of DeepEP")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of that test")
    given = parser.parse_args()
    path, cpu = given.test.resolve(), given.cpu or not torch.cuda.is_available()
    if cpu:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.setdefault("MASTER_PORT", str(free.getsockname()[1]))
    start, raised = torch.multiprocessing.spawn, None
    with tempfile.TemporaryDirectory() as counts:

        def spawn(function: Any, args: tuple[Any, ...] = (), nprocs: int = 1, **_: Any) -> None:
            start(_rank, (path, cpu, function.__name__, args, counts), nprocs=nprocs)

        torch.multiprocessing.spawn = spawn  # type: ignore[assignment]
        sys.argv = [str(path), *given.arguments]
        try:
            _load_test(path, cpu, run_as="__main__")
        except Exception as error:
            raised = error
        for file in pathlib.Path(counts).iterdir():
            COUNTS.update(torch.load(file))
    held, failed = (sum(count for (*_, right), count in COUNTS.items() if right == wanted) for wanted in (True, False))
    places = sorted({f"{file}:{line}" for (file, line, right), count in COUNTS.items() if count and not right})
    if raised is not None:
        print(raised, file=sys.stderr)
    stopped = "" if raised is None else "; stopped by the exception above"
    print(f"{path.name}: {held} assertions held, {failed} failed{' in ' if places else ''}{', '.join(places)}{stopped}")
    return int(raised is not None or failed > 0 or held == 0)


if __name__ == "__main__":
    sys.exit(main())
