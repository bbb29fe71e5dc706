"""Where a process was that is ended from outside: faulthandler writes the stacks of its threads at a signal."""

from __future__ import annotations

import faulthandler
import re
import signal
from pathlib import Path

SIGNAL = signal.SIGUSR1
INNERMOST, MOST = 3, 12
"""The innermost frames are listed even if they are those of a library; at most MOST frames are listed."""
THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*:$", re.M)
LIBRARY = re.compile(r"/lib/python|/site-packages/|^<")
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)


def write_at_signal(path: Path) -> None:
    """Let this process write the stacks of all threads to a file when it gets the signal. The file is its own: pytest
    redirects the standard streams while a test runs, and what was written there is lost if the process is killed."""
    faulthandler.register(SIGNAL, file=open(path, "w"), all_threads=True)


def place(path: Path) -> str:
    """Return where the main thread was when the process got the signal: its frames up to pytest's, innermost first,
    without those of libraries, except the innermost ones."""
    text = path.read_text(errors="replace") if path.exists() else ""
    threads = THREAD.split(text)[1:]
    if not threads:
        return "an unknown place: it has written no stack"
    frames = []
    for file, line, name in FRAME.findall(threads[-1]):  # the thread that began first comes last
        if "/_pytest/" in file or "/pluggy/" in file:
            break
        if len(frames) < INNERMOST or not LIBRARY.search(file):
            frames.append(f"{name} ({Path(file).name}:{line})")
    return " < ".join([*frames[: MOST - 1], *frames[MOST - 1 :][-1:]]) or "no frame"
