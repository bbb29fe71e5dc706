"""Kernels' way to ranks of other NVLink domains."""
