"""On every rank: mpi4py's own vector tests, from its sources' folder ``test``, on alltoallv.numpy.

python -m alltoallv run -n 3 tests/mpi4py_own/run.py FOLDER
"""

from __future__ import annotations

import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), sys.argv[1]]  # ours before an mpi4py that is installed

suite = unittest.defaultTestLoader.loadTestsFromName("test_cco_vec")
result = unittest.TextTestRunner(verbosity=0).run(suite)
bad = len(result.failures) + len(result.errors)
print(f"passed {result.testsRun - bad - len(result.skipped)}, failed {bad}, skipped {len(result.skipped)}", flush=True)
sys.exit(bad > 0)
