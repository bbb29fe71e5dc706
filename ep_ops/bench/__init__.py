"""Benchmarks of `ep-ops bench`."""
