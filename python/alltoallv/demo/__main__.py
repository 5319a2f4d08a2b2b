"""One rank of the demo: ``python -m alltoallv run -n 4 -m alltoallv.demo``, or under torchrun or mpirun."""

import sys

from alltoallv.demo.program import main

if __name__ == "__main__":
    sys.exit(main())
