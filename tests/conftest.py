"""Its place makes ``tests/`` importable: ``import cases`` works in every test below."""

import os

import pytest

LONG = ("test_ptx.py", "test_many_ranks.py", "test_emulated.py", "test_formats_ptx.py", "test_cli.py", "test_wheel.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files come first, so that none of them is left to one process at the end. What is marked `release` is
    left out, unless EP_OPS_ALL_CHECKS says otherwise."""
    items.sort(key=lambda item: item.path.name not in LONG)
    if os.environ.get("EP_OPS_ALL_CHECKS") != "1":
        left_out = [item for item in items if item.get_closest_marker("release")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
