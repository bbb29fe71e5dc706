"""Device code of ep_ops: CuTe DSL kernels that move rows between ranks, and some that work on the rows of one rank.

Imports cutlass, cuda.bindings and the standard library alone. Every kernel takes addresses (Int64) and integers; the
host side (`ep_ops.backends.cute`) owns tensors, streams and lifetimes.
"""
