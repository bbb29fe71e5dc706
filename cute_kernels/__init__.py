"""Device code of ep_ops: CuTe DSL kernels that move rows between the ranks of one NVLink domain.

Imports cutlass, cuda.bindings and the standard library alone. Every kernel takes addresses (Int64) and integers; the
host side (`ep_ops.backends.cute`) owns tensors, streams and lifetimes.
"""
