"""A job that fails in the way that its argument names."""

import os
import signal
import sys
import time

import numpy as np
from mindspore import Tensor

import alltoallv.mindspore as am

comm = am.init(timeout=60)
x = Tensor(np.ones(4, np.float32))
am.all_to_all_v(x, [2, 2], [2, 2])
begin = time.monotonic()
try:
    if comm.rank == 1:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        x = Tensor(np.ones(5, np.float32))
    out = am.all_to_all_v(x, [2, 2] if comm.rank == 0 else [3, 2], [2, 2])
finally:
    print(f"ended after {time.monotonic() - begin:.2f} s", flush=True)
