"""A job of which one rank is killed."""

import os
import signal
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
        os.kill(os.getpid(), signal.SIGKILL)
    am.all_to_all_v(x, two, two)
finally:
    print(f"ended after {time.monotonic() - begin:.2f} s", flush=True)
