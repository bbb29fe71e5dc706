"""Kernels for many tokens, as of training and prefill: bounded by bytes, not by latency."""
