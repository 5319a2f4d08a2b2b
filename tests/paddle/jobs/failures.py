"""A job that fails in the way that its argument names."""

import contextlib
import os
import signal
import sys
import time

import paddle

import alltoallv
import alltoallv.paddle as ap
from alltoallv.errors import PeerLostError

comm = alltoallv.Communicator.from_env(timeout=60)
both = ap.new_group()
x, out = paddle.ones([4]), paddle.full([4], -1.0)
ap.alltoall_single(out, x)
ap.barrier(both)
out[:] = -1.0
begin = time.monotonic()
try:
    if comm.rank == 1:
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        x, split = paddle.ones([5]), [3, 2]
    else:
        split = [2, 2]
    ap.alltoall_single(out, x, split, [2, 2])
except PeerLostError:
    for group in (None, both):  # no call joins anew
        with contextlib.suppress(PeerLostError):
            ap.barrier(group)
            print("a call has not failed")
    raise
finally:
    print(f"ended after {time.monotonic() - begin:.2f} s, {out.tolist()}", flush=True)
