"""Its place makes ``tests/`` importable: ``import cases`` works in every test below."""
