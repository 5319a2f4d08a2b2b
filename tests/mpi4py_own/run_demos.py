"""On every rank: programs of mpi4py's demos, one after the other, with one import changed; most assert what they get.

python -m alltoallv run -n 3 tests/mpi4py_own/run_demos.py FOLDER, which is demo of its source distribution
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from alltoallv.mpi import MPI

DEMOS = (
    *("helloworld", "compute-pi/cpi-cco", "mandelbrot/mandelbrot", "nxtval/nxtval-threads", "threads/sendrecv"),
    *(f"mpi-ref-v1/ex-{number}" for number in ("2.01", "2.08", "2.16", "2.29", "2.32", "2.34", "2.35", "3.01")),
)
for name in DEMOS:
    path = Path(sys.argv[1], f"{name}.py")
    text = path.read_text()
    changed = text.replace("from mpi4py import MPI", "from alltoallv.mpi import MPI")
    assert changed.count("alltoallv") == 1
    sys.stdin = io.StringIO("1000\n")  # the intervals of cpi-cco
    try:
        exec(compile(changed, path, "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if end.code:
            raise
    MPI.COMM_WORLD.Barrier()  # what the next one receives from anybody is its own
if MPI.COMM_WORLD.Get_rank() == 0:
    print(f"{len(DEMOS)} programs ended as they should")
