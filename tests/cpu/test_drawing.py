"""The random subset of tests of a run can be repeated."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drawing
import pytest


@pytest.fixture(autouse=True)
def no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(drawing.NAME, "")  # restored at the end, whatever the test does
    monkeypatch.delenv(drawing.NAME)


def test_it_follows_from_the_variable_or_else_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(drawing.__file__).parent
    found = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True)
    if found.returncode == 0:
        assert drawing.text() == found.stdout.strip()
    monkeypatch.setenv(drawing.NAME, "given")
    assert drawing.text() == "given"


def test_without_git_it_is_random_and_kept_for_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise OSError("no git")

    monkeypatch.setattr(subprocess, "run", missing)
    first = drawing.text()
    assert first and drawing.text() == first and drawing.os.environ[drawing.NAME] == first
    monkeypatch.delenv(drawing.NAME)
    assert drawing.text() != first


def test_a_value_selects_the_same_cases_and_another_value_others(pytestconfig: pytest.Config) -> None:
    plugin = next(p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "DRAWN"))

    def subset(value: str) -> list[bool]:
        marked: Any = lambda number: SimpleNamespace(nodeid=f"test[{number}]", get_closest_marker=lambda name: True)  # noqa: E731
        return [plugin.drawn(marked(number), value) for number in range(400)]

    assert subset("a") == subset("a") != subset("b")
    assert 20 < sum(subset("a")) < 90  # one in eight
