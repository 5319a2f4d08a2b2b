"""A job of which one rank is killed; the others call again, which no call joins anew for."""

import os
import signal
import time

import numpy as np
from mindspore import Tensor

import alltoallv.mindspore as am
from alltoallv.errors import PeerLostError
from alltoallv.mindspore import distributed as dist

comm = am.init(timeout=60)
two = [2] * comm.size
x = Tensor(np.ones(2 * comm.size, np.float32))
calls = [
    lambda: am.all_to_all_v(x, two, two),
    lambda: am.all_reduce(x),
    lambda: dist.all_reduce(x),
    lambda: am.all_reduce(x, group=three),
    lambda: am.send(x, (comm.rank + 1) % comm.size),
]
three = am.new_group(list(range(comm.size)))
for call in calls[:-1]:
    call()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
for call in calls:
    try:
        call()
    except PeerLostError as found:
        error = found
    else:
        print("a call has not failed", flush=True)
print(f"ended after {time.monotonic() - begin:.2f} s", flush=True)
print(f"is {dist.get_rank()} of {dist.get_world_size()}, {dist.is_initialized()}", flush=True)
raise error
