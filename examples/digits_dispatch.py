"""Mixture-of-experts dispatch of real tokens between ranks, checked bit for bit, under any launcher:

    python -m alltoallv run -n 4 examples/digits_dispatch.py
    torchrun --nproc-per-node 4 examples/digits_dispatch.py
    mpirun -n 4 python examples/digits_dispatch.py

The program is part of the package, because `python -m alltoallv demo` runs it too. Copy it from
python/alltoallv_tools/demo/program.py to start your own: `plan_routing`, `send_to_experts` and `send_back` are what
an expert-parallel layer needs.
"""

import sys

from alltoallv_tools.demo.program import main

if __name__ == "__main__":
    sys.exit(main())
