#!/usr/bin/env python3
"""`python3 run.py demo` shows the pack at work, `python3 run.py test` checks it. Standard library only."""

import sys

if sys.version_info < (3, 10):
    sys.exit("run.py: Python 3.10 or newer is needed, this is " + sys.version.split()[0])

from tools.runner.cli import main  # noqa: E402  (the version check must come first)

if __name__ == "__main__":
    sys.exit(main())
