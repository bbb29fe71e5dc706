"""What a release states about itself: required versions of other packages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
