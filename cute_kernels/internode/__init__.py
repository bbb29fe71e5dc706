"""Communication of kernels with ranks of other NVLink domains."""
