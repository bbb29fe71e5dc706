"""Kernels on the rows of one rank: no other rank takes part."""
