"""`ep-ops compile`: the kernels that a communicator will ask for, before there is one."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

import torch

from cute_kernels import jit, prepare
from cute_kernels.alarm import RaiseAlarm
from cute_kernels.internode.wire import BUNDLE, Nvlink
from ep_ops.backends.cute.backend import all_kernels
from ep_ops.backends.cute.sizing import problem_of
from ep_ops.commands import compile as ahead
from ep_ops.commands import doctor
from ep_ops.commands.cli import main
from ep_ops.config import Config
from ep_ops.memory import planned

CONFIG = Config(num_experts=4, hidden_size=64, top_k=2, max_tokens_per_rank=64)
SIZES = ["--ranks", "2", "--num-experts", "4", "--hidden-size", "64", "--top-k", "2", "--max-tokens-per-rank", "64"]


def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("EP_OPS_CACHE_DIR", str(tmp_path))
    asked: list[tuple[Any, str]] = []
    monkeypatch.setattr(ahead, "compile_all", lambda wanted, arch: asked.extend((kernel, arch) for kernel in wanted))
    assert main(["compile", *SIZES, "--arch", "sm_100a", "--latency-max-tokens", "16"]) == 0
    config = planned(dataclasses.replace(CONFIG, latency_max_tokens=16), 2)
    assert asked == [(kernel, "sm_100a") for kernel in all_kernels(config)]
    assert f"{len(asked)} kernels for sm_100a are in {tmp_path}" in capsys.readouterr().out

    plain = list(asked)
    asked.clear()
    assert main(["compile", *SIZES, "--arch", "sm_90a", "--domain-size", "1", "--wire", "nvlink"]) == 0
    across = planned(dataclasses.replace(CONFIG, domain_size=1, wire="nvlink"), 2)
    assert asked == [(kernel, "sm_90a") for kernel in all_kernels(across)]
    for kernel, _ in asked:
        assert kernel.problem.domains == ((0,), (1,)) and kernel.problem.wire == Nvlink() and not kernel.linked

    asked.clear()
    monkeypatch.setenv("EP_OPS_BUNDLE", "1")
    assert main(["compile", *SIZES, "--arch", "sm_90a", "--domain-size", "1", "--wire", "nvlink"]) == 0
    assert {kernel.problem.wire for kernel, _ in asked} == {Nvlink(rows=BUNDLE)}
    monkeypatch.delenv("EP_OPS_BUNDLE")

    asked.clear()
    with monkeypatch.context() as patch:  # NVSHMEM is needed across domains alone
        patch.setattr(ahead, "no_device_library", lambda: "NVSHMEM is not installed")
        assert main(["compile", *SIZES, "--arch", "sm_90a", "--domain-size", "1"]) == 2 and not asked
        assert "NVSHMEM is not installed" in capsys.readouterr().err
        assert main(["compile", *SIZES, "--arch", "sm_90a"]) == 0 and asked

    asked.clear()
    ways = ["--format", "e4m3/32/mx=packed", "--format", "wire:e4m3/row/fp32"]
    assert main(["compile", *SIZES, "--arch", "sm_100a", "--latency-max-tokens", "16", *ways]) == 0
    wanted = all_kernels(config, [("e4m3/32/mx", "packed"), ("wire:e4m3/row/fp32", "")])
    assert asked == [(kernel, "sm_100a") for kernel in wanted] and set(plain) < set(asked)


def test_they_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled by other processes, loaded by this one without compiling anything. Files with names of the standard
    library are not imported, neither from the program's folder nor from one that contains cute_kernels."""
    folder, cache, site = (tmp_path / name for name in ("folder", "cache", "site"))
    for made in (folder, cache, site):
        made.mkdir(mode=0o700)
        (made / "tempfile.py").write_text("raise SystemExit")
    (site / "cute_kernels").symlink_to(Path(jit.__file__).parent)
    monkeypatch.setattr(prepare, "__file__", str(site / "cute_kernels" / "prepare.py"))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("EP_OPS_CACHE_DIR", str(cache))
    monkeypatch.setattr(prepare, "cores", lambda: frozenset({0, 1}))
    monkeypatch.setattr(jit, "compile_kernel", lambda *args, **more: pytest.fail("compiled once more"))
    wanted = all_kernels(planned(CONFIG, 2))[-2:]
    ahead.compile_all(wanted, "sm_90a")
    for kernel in wanted:
        assert jit.get(kernel, "sm_90a", lambda: False) is not None


class Strange(RaiseAlarm):
    """A kernel of a module that other processes do not find."""

    __module__ = "elsewhere"


def test_what_other_processes_cannot_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels that other processes fail at are compiled by this one, and so are all kernels if nothing is kept."""
    monkeypatch.setenv("EP_OPS_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    here: list[Any] = []
    monkeypatch.setattr(prepare, "cores", lambda: frozenset({0, 1}))
    monkeypatch.setitem(sys.modules, "elsewhere", sys.modules[__name__])
    monkeypatch.setattr(jit, "_compile_to", lambda path, kernel, arch: here.append(kernel))
    problem = problem_of(planned(CONFIG, 2))
    wanted = [Strange(problem), Strange(dataclasses.replace(problem, hidden_size=128))]
    ahead.compile_all(wanted, "sm_90a")
    assert here == wanted
    here.clear()

    def too_many(*args: Any, **more: Any) -> None:
        raise BlockingIOError("too many processes")

    with monkeypatch.context() as patch:
        patch.setattr(prepare.subprocess, "Popen", too_many)
        ahead.compile_all(wanted, "sm_90a")
    assert here == wanted
    monkeypatch.setattr(prepare.subprocess, "Popen", lambda *args, **more: pytest.fail("started for nothing"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "frozen", True, raising=False)  # sys.executable is the program
        prepare.prepare_all(wanted, "sm_90a", 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # a folder that is read only
        prepare.prepare_all(wanted, "sm_90a", 2)
    monkeypatch.setenv("EP_OPS_CACHE_DIR", "")
    prepare.prepare_all(wanted, "sm_90a", 2)


SPY = """
import pathlib, sys

class Spy:
    def on(self, arch):
        pathlib.Path(__file__).with_name(arch).write_text(str(sys.modules["torch"]))
        raise RuntimeError("not a kernel")
"""


def test_processes_have_no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process compiles kernels without importing PyTorch."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    (tmp_path / "ep_ops_spy.py").write_text(SPY)
    monkeypatch.setenv("EP_OPS_CACHE_DIR", str(folder))
    monkeypatch.syspath_prepend(tmp_path)
    import ep_ops_spy

    monkeypatch.setattr(jit, "prepared", lambda kernel, arch: False)
    monkeypatch.setattr(prepare.random.Random, "shuffle", lambda self, given: None)
    kernels = all_kernels(planned(CONFIG, 2))[-2:]
    prepare.prepare_all([*kernels, ep_ops_spy.Spy()], "sm_90a", 2)
    assert (tmp_path / "sm_90a").read_text() == "None"  # after the first of the kernels, in the same process
    assert {path.stem for path in folder.glob("*.o")} == {jit.object_name(kernel, "sm_90a") for kernel in kernels}


class Process:
    """Stands for a process that compiles."""

    started: list[Process] = []
    interrupted = False

    def __init__(self, command: list[str], stdin: Any, env: dict[str, str], **more: Any) -> None:
        self.paths, self.given, self.env = pickle.load(stdin), pickle.load(stdin), env
        self.waited_for = self.killed = False
        self.started.append(self)

    def wait(self) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.waited_for = True

    def kill(self) -> None:
        self.killed = True


def test_how_processes_are_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes see no GPU, share what is missing on disk, each rank in an order of its own, and are all waited for. An
    interrupted program kills them."""
    monkeypatch.setenv("EP_OPS_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(jit, "prepared", lambda kernel, arch: kernel % 10 == 0)
    monkeypatch.setattr(prepare.subprocess, "Popen", Process)
    missing, orders = [kernel for kernel in range(100) if kernel % 10], []
    for rank in (11, 12):
        monkeypatch.setattr(os, "getpid", lambda rank=rank: rank)
        monkeypatch.setattr(Process, "started", [])
        prepare.prepare_all(range(100), "sm_90a", 4)
        processes = Process.started
        assert len(processes) == 4 and all(process.waited_for for process in processes)
        kernels = [process.given[0] for process in processes]
        assert sorted(kernel for some in kernels for kernel in some) == missing and max(map(len, kernels)) == 23
        assert {process.given[1:] for process in processes} == {("sm_90a", rank)}
        for process in processes:
            assert process.env == os.environ | {"CUDA_VISIBLE_DEVICES": ""}
            assert process.paths[-1] == str(Path(jit.__file__).parents[1])
        orders.append(kernels)
    assert orders[0] != orders[1]
    monkeypatch.setattr(Process, "interrupted", True)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare_all(range(100), "sm_90a", 4)
    assert all(process.killed for process in Process.started) and len(Process.started) == 8


def test_processes_end_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process compiles nothing more when the one that started it has been killed."""
    compiled: list[Any] = []
    monkeypatch.setattr(jit, "prepare", lambda kernel, arch: compiled.append(kernel))
    for parent in (os.getppid(), 0):
        given = types.SimpleNamespace(buffer=io.BytesIO(pickle.dumps((["kernel"], "sm_90a", parent))))
        monkeypatch.setattr(sys, "stdin", given)
        prepare.prepare_given()
    assert compiled == ["kernel"]


@pytest.mark.parametrize(("more", "text"), [
    (["--top-k", "40"], "top_k is 40; allowed: an int from 1 to 32"),
    (["--ranks", "80", "--num-experts", "80"], "80 ranks are in one NVLink domain; backend 'cute' takes at most 72"),
    (["--ranks", "1088", "--num-experts", "1088", "--domain-size", "64"], "world_size is 1088; backend 'cute' takes"),
    (["--ranks", str(2**31 - 1)], "world_size is 2147483647; backend 'cute' takes at most 1024 ranks"),
    (["--domain-size", "3"], "domain_size is 3; allowed: a divisor of the 2 ranks"),
    (["--experts-per-rank", "3,3"], "adds up to 6, but num_experts is 4"),
    (["--format", "e4m3/128/pow2"], "hidden_size is 64; format 'e4m3/128/pow2' takes multiples of 128"),
    (["--format", "e4m3/32/mx=columns"], "scales_as is 'columns'; allowed for format 'e4m3/32/mx'"),
])  # fmt: skip
def test_what_is_rejected(more: list[str], text: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["compile", *SIZES, *more, "--arch", "sm_90a"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_arch_is_to_be_said(capsys: pytest.CaptureFixture) -> None:
    assert main(["compile", *SIZES]) == 2
    assert "--arch sm_90a" in capsys.readouterr().err


def no_space(path: Path, *given: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_folder_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A folder that cannot be used or written to is an error, and the command does not say that kernels are there."""
    monkeypatch.setenv("EP_OPS_CACHE_DIR", str(tmp_path / "full"))
    with monkeypatch.context() as patch:
        patch.setattr(
            ahead,
            "compile_communicator",
            lambda *given: ahead.compile_all([RaiseAlarm(problem_of(planned(CONFIG, 2)))], "sm_90a"),
        )
        patch.setattr(jit, "_compile_to", no_space)
        assert main(["compile", *SIZES, "--arch", "sm_90a"]) == 2
    said = capsys.readouterr()
    assert "full cannot keep compiled kernels: " in said.err and "No space left" in said.err and not said.out
    monkeypatch.delenv("EP_OPS_CACHE_DIR")
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, and a user whom the system does not know
        assert main(["compile", *SIZES, "--arch", "sm_90a"]) == 2
        assert "cannot keep compiled kernels: ~/.cache/ep_ops: HOME is not set" in capsys.readouterr().err
        with pytest.warns(RuntimeWarning, match="~/.cache/ep_ops is not used, .* HOME is not set"):
            assert not jit.keeps()
        assert "HOME is not set" in "".join(doctor.caches())

    monkeypatch.setattr(ahead, "compile_all", lambda wanted, arch: pytest.fail("compiled for nobody"))
    (tmp_path / "file").touch()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    for folder, why in (("file/below", "Not a directory"), ("shared", "other users can write into it")):
        monkeypatch.setenv("EP_OPS_CACHE_DIR", str(tmp_path / folder))
        assert main(["compile", *SIZES, "--arch", "sm_90a"]) == 2
        said = capsys.readouterr()
        assert f"{tmp_path / folder} cannot keep compiled kernels: " in said.err and why in said.err and not said.out
