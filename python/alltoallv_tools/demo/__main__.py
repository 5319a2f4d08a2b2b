"""One rank of the demo: ``python -m alltoallv run -n 4 -m alltoallv_tools.demo``, or under torchrun or mpirun."""

import sys

from alltoallv_tools.demo.program import main

if __name__ == "__main__":
    sys.exit(main())
