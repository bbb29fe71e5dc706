"""`python -m ep_ops` is the command `ep-ops`."""

import sys

from .commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
