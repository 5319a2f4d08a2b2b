"""``python -m alltoallv``."""

import sys

from alltoallv.cli import main

if __name__ == "__main__":
    sys.exit(main())
