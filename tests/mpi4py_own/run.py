"""On every rank: mpi4py's own tests, from its sources' folder ``test``, on alltoallv.mpi.

python -m alltoallv run -n 3 tests/mpi4py_own/run.py FOLDER [MODULE ...]
"""

from __future__ import annotations

import importlib
import re
import sys
import types
import unittest
from collections import Counter
from typing import Any

from alltoallv.mpi import MPI

MODULES = (
    "cco_buf cco_nb_buf cco_nb_vec cco_ngh_buf cco_ngh_obj cco_obj cco_vec comm_topo group msgzero p2p_buf p2p_obj"
    " request"
)
# Tests that are left out, by a part of their names, and what they ask for.
LEFT_OUT = {
    "Cancel": "Request.Cancel, which is refused: a receive that stays would take what later tests send",
    "Bottom": "addresses",
    "Constructor": "handles of an MPI, and constructors of them",
    "Pickle": "handles of an MPI",
    "test_cco_obj.*testReduce$": "error classes of an MPI",
    "comm_topo.*(Cartcomm|Graphcomm|graphcomm)": "handles of an MPI",
    "testCommLock": "mpi4py's own locks",
    "testGetStatus(All|Any|Some)": "Request.Get_status_all and the like",
    "test_group.*testNull": "GROUP_NULL as a handle",
}

stand_in: Any = types.ModuleType("mpi4py")
stand_in.MPI, stand_in.__path__ = MPI, []
sys.modules |= {"mpi4py": stand_in, "mpi4py.MPI": MPI}
sys.path.insert(0, sys.argv[1])
arrays: Any = importlib.import_module("arrayimpl")
# The others: DLPack of its own making, whose memory ends before NumPy lets go of it, and what says it is a GPU's.
arrays.ArrayBackends[:] = [each for each in arrays.ArrayBackends if each.__name__ in ("ArrayArray", "ArrayNumPy")]


def chosen(suite: unittest.TestSuite) -> unittest.TestSuite:
    """Returns the tests that are not left out."""
    kept = unittest.TestSuite()
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            kept.addTest(chosen(each))
        elif not any(re.search(part, each.id()) for part in LEFT_OUT):
            kept.addTest(each)
    return kept


total: Counter[str] = Counter()
for module in sys.argv[2:] or MODULES.split():
    every = unittest.defaultTestLoader.loadTestsFromName(f"test_{module}")
    suite = chosen(every)
    result = unittest.TextTestRunner(verbosity=0, stream=sys.stdout).run(suite)
    bad = len(result.failures) + len(result.errors)
    left_out = every.countTestCases() - suite.countTestCases()
    count = {
        "passed": result.testsRun - bad - len(result.skipped),
        "failed": bad,
        "skipped": len(result.skipped),
        "left out": left_out,
    }
    total.update(count)
    if MPI.COMM_WORLD.rank == 0:
        print(f"test_{module}: " + ", ".join(f"{each} {number}" for each, number in count.items()), flush=True)
print("all: " + ", ".join(f"{each} {number}" for each, number in total.items()), flush=True)
sys.exit(total["failed"] > 0)
