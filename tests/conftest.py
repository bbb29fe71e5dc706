"""Its place makes ``tests/`` importable: ``import cases`` works in every test below."""

import os

# Inductor would start processes of its own beside each of pytest's, for a few small kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
