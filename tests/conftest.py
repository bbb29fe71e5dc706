"""Its place makes ``tests/`` importable: ``import cases`` works in every test below."""

import pytest

LONG = ("test_ptx.py", "test_many_ranks.py", "test_emulated.py", "test_formats_ptx.py", "test_cli.py", "test_wheel.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that none of them is left to one process at the end."""
    items.sort(key=lambda item: item.path.name not in LONG)
