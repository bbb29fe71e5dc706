"""`ep-ops demo --decode` runs, and says how long a step takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import ep_ops


def test_decode_steps():
    root = os.path.dirname(ep_ops.__path__[0])
    command = [sys.executable, "-m", "ep_ops", "demo", "--decode", "--device", "cpu", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=root)
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 decode steps: \d+ µs per step.*the same steps again: \d", done.stdout), done.stdout
