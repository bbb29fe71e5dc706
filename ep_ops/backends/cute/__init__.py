"""The kernels' side of ep_ops: NVIDIA GPUs, one process each.

`sizing` needs neither a GPU nor the CuTe DSL. What needs them (`backend`) is imported where it is used.
"""
