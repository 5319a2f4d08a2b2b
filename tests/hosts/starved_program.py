"""One rank has no descriptor when it joins: all tell what they hear, and after how long; with descriptors they meet."""

from __future__ import annotations

import os
import resource
import sys
import time

import alltoallv.numpy as an
from alltoallv import Communicator
from alltoallv.errors import ResourceError

begin = time.monotonic()
before = resource.getrlimit(resource.RLIMIT_NOFILE)
if os.environ["RANK"] == sys.argv[1]:
    used = set(map(int, os.listdir("/proc/self/fd")))
    lowest = next(number for number in range(len(used) + 1) if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
try:
    Communicator.from_env("starved", timeout=60)
except ResourceError as error:
    print(f"after {time.monotonic() - begin:.3f} s: {error}")
resource.setrlimit(resource.RLIMIT_NOFILE, before)
an.barrier(group=Communicator.from_env("fed", timeout=60))
print("met")
