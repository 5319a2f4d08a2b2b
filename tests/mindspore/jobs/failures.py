"""A job that fails in the way that its argument names."""

import os
import signal
import sys
import time

import numpy as np
from mindspore import Tensor

import alltoallv.mindspore as am

comm = am.init(timeout=60)
two = [2] * comm.size
x = Tensor(np.ones(2 * comm.size, np.float32))
am.all_to_all_v(x, two, two)
begin = time.monotonic()
try:
    if comm.rank == 1:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        am.all_to_all_v(Tensor(np.ones(2 * comm.size + 1, np.float32)), [3, *two[1:]], two)
    am.all_to_all_v(x, two, two)
finally:
    print(f"ended after {time.monotonic() - begin:.2f} s", flush=True)
