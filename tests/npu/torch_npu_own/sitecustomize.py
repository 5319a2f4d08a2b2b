"""For torch_npu's own tests, on PYTHONPATH: processes that a test has spawned end as late as with a device.

Their workers put tensors into a queue and end. The parent fetches a tensor's memory from the worker, which must still
be there; here a process ends within milliseconds, and the parent found it gone (FileNotFoundError, EOFError).
"""

from __future__ import annotations

import sys
import time
from multiprocessing import util

SECONDS = 3.0

if "--multiprocessing-fork" in sys.orig_argv:
    util.Finalize(None, time.sleep, args=(SECONDS,), exitpriority=100)  # before its sockets go
