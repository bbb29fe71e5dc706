"""For all tests of this folder, and for the processes that they start."""

import os
import sys

import pytest

# Inductor would start processes of its own beside each of pytest's, for a few small kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Inductor would start five processes in each process that compiles C++, to test whether vector instructions work.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


@pytest.fixture(scope="module", autouse=True)
def nothing_is_compiled() -> None:
    """Begin each file without code that was compiled for others: Dynamo keeps few versions of a function, and raises
    beyond them."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
