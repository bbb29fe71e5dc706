"""The text that determines the random subset of tests of a run."""

from __future__ import annotations

import os
import secrets
import subprocess
from pathlib import Path

NAME = "EP_OPS_TEST_DRAW"


def text() -> str:
    """Return the value of EP_OPS_TEST_DRAW, which repeats a run's subset. Without it, it is set for this process and
    those that it starts: to the commit, or to a random text where there is no git."""
    if NAME not in os.environ:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        try:
            found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        except OSError:
            found = ""
        os.environ[NAME] = found or secrets.token_hex(8)
    return os.environ[NAME]
