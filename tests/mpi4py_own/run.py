"""On every rank: mpi4py's own tests, from its sources' folder ``test``, on alltoallv.mpi.

python -m alltoallv run -n 3 tests/mpi4py_own/run.py FOLDER [MODULE ...]
"""

from __future__ import annotations

import importlib
import sys
import types
import unittest
from collections import Counter
from typing import Any

from alltoallv.mpi import MPI

MODULES = (
    "cco_buf cco_nb_buf cco_nb_vec cco_ngh_buf cco_ngh_obj cco_obj cco_vec comm_topo group msgspec msgzero op p2p_buf"
    " p2p_obj request status comm datatype environ pickle"
)

stand_in: Any = types.ModuleType("mpi4py")
stand_in.MPI, stand_in.__path__ = MPI, []
sys.modules |= {"mpi4py": stand_in, "mpi4py.MPI": MPI}
sys.path.insert(0, sys.argv[1])
arrays: Any = importlib.import_module("arrayimpl")
# The others: DLPack of its own making, whose memory ends before NumPy lets go of it, and what says it is a GPU's.
arrays.ArrayBackends[:] = [each for each in arrays.ArrayBackends if each.__name__ in ("ArrayArray", "ArrayNumPy")]


class Result(unittest.TextTestResult):
    """Prints a line for every test that does not pass."""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        if "-v" in sys.argv:
            print(test.id(), flush=True)


total: Counter[str] = Counter()
for module in [each for each in sys.argv[2:] if each != "-v"] or MODULES.split():
    suite = unittest.defaultTestLoader.loadTestsFromName(f"test_{module}")
    result = unittest.TextTestRunner(verbosity=0, resultclass=Result, stream=sys.stdout).run(suite)
    bad = len(result.failures) + len(result.errors)
    count = {"passed": result.testsRun - bad - len(result.skipped), "failed": bad, "skipped": len(result.skipped)}
    total.update(count)
    if MPI.COMM_WORLD.rank == 0:
        print(f"test_{module}: " + ", ".join(f"{each} {number}" for each, number in count.items()), flush=True)
print("all: " + ", ".join(f"{each} {number}" for each, number in total.items()), flush=True)
sys.exit(total["failed"] > 0)
