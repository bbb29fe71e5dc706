"""Kernels for training and prefill on one NVLink domain: bounded by bytes, not by latency."""
