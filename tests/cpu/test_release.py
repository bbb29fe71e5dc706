"""A release states facts about itself that are right, contains what it must, and has workflows that test and publish
it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ep_ops
from ep_ops import Config
from ep_ops.commands import cli

if sys.version_info < (3, 11):
    pytest.skip("reads pyproject.toml: needs Python 3.11", allow_module_level=True)
import tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLCHAIN = {"nvidia-cutlass-dsl": ("4.8.0", "4.8.1"), "apache-tvm-ffi": ("0.1.11", "0.1.15.post2")}
"""By package of the kernels' compiler: versions that were tested; vLLM 0.33 and SGLang 0.5.23 require the first."""


def required(extra: str) -> dict[str, Requirement]:
    found = map(Requirement, PROJECT["optional-dependencies"][extra])
    return {requirement.name: requirement for requirement in found}


@pytest.mark.parametrize("package", TOOLCHAIN)
def test_all_extras_accept_the_same_tested_toolchain(package: str) -> None:
    extras = {extra: required(extra)[package].specifier for extra in ("cu12", "cu13", "dev")}
    assert len(set(extras.values())) == 1, extras
    accepted = extras["cu13"]
    assert list(accepted.filter(TOOLCHAIN[package])) == list(TOOLCHAIN[package])
    oldest = {s.version for s in accepted if s.operator == ">="}
    assert oldest == {TOOLCHAIN[package][0]}, "the oldest accepted version is one that was tested"
    assert not accepted.contains("4.9.0") and not accepted.contains("0.2.0")


def test_the_weekly_workflow_tests_the_oldest_toolchain() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    (oldest,) = re.findall(r"- (nvidia-cutlass-dsl==4\.8\.0 apache-tvm-ffi==0\.1\.11) ", workflow)
    assert oldest.split() == [f"{package}=={versions[0]}" for package, versions in TOOLCHAIN.items()]


def test_links_of_the_published_readme(tmp_path: Path) -> None:
    """The workflow makes links to files absolute, because package indexes show the README without them."""
    shutil.copy(ROOT / "README.md", tmp_path)
    commands = re.findall(r"^ +(sed .* README\.md)$", (ROOT / ".github/workflows/publish.yml").read_text(), re.M)
    env = {"GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "o/r", "GITHUB_REF_NAME": "v1"}
    subprocess.run(
        ["bash", "-ec", "\n".join(commands)], cwd=tmp_path, env={"PATH": os.environ["PATH"], **env}, check=True
    )
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]*)\)", (tmp_path / "README.md").read_text())
    assert {bool(image) for image, _ in links} == {True, False}
    for image, link in links:
        folder = f"https://host/o/r/{'raw' if image else 'blob'}/v1/"
        assert link[0] == "#" or (ROOT / link.removeprefix(folder).partition("#")[0]).is_file(), link
        assert link[0] == "#" or link.startswith(folder)


def test_the_installation_test_runs_every_command() -> None:
    """`.ci/commands` runs each command and benchmark of `ep-ops`."""
    ran = set(re.findall(r"^run (bench \w+|[\w-]+)", (ROOT / ".ci/commands").read_text(), re.M))
    (commands,) = (action.choices for action in cli.parser()._actions if isinstance(action.choices, dict))
    assert ran == {"--version", *set(commands) - {"bench"}, *(f"bench {kind}" for kind in cli.BENCHMARKS)}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="compares with the files of a checkout")
def test_the_source_distribution_contains_every_file(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="builds a source distribution: needs setuptools>=77")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = {name for name in listed if (ROOT / name).exists()}  # not those that are about to be removed
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    build = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    built = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stderr
    with tarfile.open(tmp_path / "dist" / f"ep_ops-{ep_ops.__version__}.tar.gz") as archive:
        contained = {name.partition("/")[2] for name in archive.getnames()}
        metadata = archive.extractfile(f"ep_ops-{ep_ops.__version__}/PKG-INFO").read().decode()  # type: ignore[union-attr]
    assert files - contained == {".gitignore"}
    assert f"\nVersion: {ep_ops.__version__}\n" in metadata


def test_the_version_has_one_place() -> None:
    assert "version" not in PROJECT and "version" in PROJECT["dynamic"]
    assert not re.search("^version:", (ROOT / "CITATION.cff").read_text(), re.M)


def test_actions_are_pinned_by_commit() -> None:
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        for used in re.findall(r"uses: (?!\./)(.*)", workflow.read_text()):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", used), f"{workflow.name}: {used}"


def test_the_bug_template_asks_for_an_allowed_check() -> None:
    (asked,) = re.findall(r"EP_OPS_CHECK=(\w+)", (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    assert Config(num_experts=2, hidden_size=64, top_k=1, max_tokens_per_rank=1, check=asked).check == "1"
