"""The wheel, installed elsewhere: its command line runs from there, wherever it is called and whatever lies there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77", reason="builds a wheel: needs setuptools>=77")

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cute_kernels", "ep_ops", "meta_kernels")
SOURCES = (*PACKAGES, "benchmarks", "tests", "pyproject.toml", "setup.cfg", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-cache-dir")
SMALL = ("--device", "cpu", "--ranks", "1")


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Standard output of a process for which `path` is what PYTHONPATH names; it must succeed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what `pip install` of the wheel leaves; the wheel is built from a copy, which leaves nothing here."""
    here = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, here / "sources" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, here / "sources" / name)
    run(*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", "wheels", "./sources", cwd=here)
    (wheel,) = (here / "wheels").glob("*.whl")
    run(*PIP, "install", "--no-deps", "--no-index", "--target", "installed", str(wheel), cwd=here)
    return here / "installed"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder of somebody else's, whose own `benchmarks` and `tests` come first on the path of `python -m`."""
    for name in ("benchmarks", "benchmarks/throughput", "benchmarks/latency", "bench", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('this is not part of ep_ops')")
    return tmp_path


def test_what_is_installed(installed: Path) -> None:
    """Our packages, which say that they have types, and nothing else."""
    found = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert found - {"__pycache__"} == {*PACKAGES, "bin"}
    for package in PACKAGES:
        assert (installed / package / "py.typed").is_file()
        ours = {path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py")}
        assert {path.relative_to(installed) for path in (installed / package).rglob("*.py")} == ours
    assert (installed / "ep_ops" / "backends" / "cute" / "tuning.json").is_file()


def test_it_is_what_runs(installed: Path, foreign: Path) -> None:
    """The wheel is imported, and not the checkout, of which there may be an editable installation; `import ep_ops`
    loads no benchmark."""
    script = (
        "import importlib.util, sys, ep_ops, meta_kernels\n"
        "assert not [name for name in sys.modules if name.startswith('ep_ops.bench')]\n"
        "for name in ('ep_ops', 'meta_kernels', 'cute_kernels', 'ep_ops.bench.throughput'):\n"
        "    print(importlib.util.find_spec(name).origin)"
    )
    for line in run(sys.executable, "-c", script, cwd=foreign, path=installed).splitlines():
        assert Path(line).is_relative_to(installed), line


def test_doctor(installed: Path, foreign: Path) -> None:
    """The script that pip has made runs the doctor."""
    said = run(installed / "bin" / "ep-ops", "doctor", cwd=foreign, path=installed)
    assert f"({installed / 'ep_ops'})" in said and "could not tell" not in said


@pytest.mark.drawn
def test_demo(installed: Path, foreign: Path) -> None:
    """The demo runs in a process that the command starts."""
    said = run(
        sys.executable, "-m", "ep_ops", "demo", *SMALL, "--backend", "reference", "--eager",
        "--steps", "2", "--hidden-size", "32", "--sequences", "2", cwd=foreign, path=installed,
    )  # fmt: skip
    assert "1 rank(s)" in said and "self-check: loss and all gradients equal the dense model's" in said


@pytest.mark.drawn  # test_doctor runs each time
@pytest.mark.parametrize(
    "kind, options",
    [
        ("throughput", "--preset tiny --only dispatch --iterations 2"),
        ("latency", "--tokens 1 --hidden 64 --experts 8 --top-k 2 --pairs 2 --replays 2 --only pair"),
    ],
)
def test_bench(installed: Path, foreign: Path, kind: str, options: str) -> None:
    """Results go where the user says, seen from where the user is."""
    command = (
        sys.executable,
        "-m",
        "ep_ops",
        "bench",
        kind,
        *SMALL,
        *options.split(),
        "--out",
        "new/found.json",
    )
    assert "dispatch" in run(*command, cwd=foreign, path=installed)
    found = json.loads((foreign / "new" / "found.json").read_text())
    assert found["world_size"] == 1 and found["results"] and all(result["us"] > 0 for result in found["results"])
