"""Runs the command line: ``python -m alltoallv``."""

import sys

from alltoallv_tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
