"""What the rank of a job on two hosts raises, or computes, in a case of trouble. Arguments: the case."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import numpy as np

from alltoallv import Communicator, _core
from alltoallv.launch.options import make_options
from alltoallv.numpy import all_gather_object, all_reduce, barrier

N = 100_000


def other_counts(comm: Communicator) -> str:
    """Rank 0 sends more than rank 1 expects, and nobody compares the counts beforehand."""
    sends, recvs = ([0, 4 * N], [0, 0]) if comm.rank == 0 else ([0, 0], [N, 0])
    x, out = np.ones(4 * N, "float32"), np.empty(N, "float32")
    plan = _core.Plan(comm.core, "all_to_all_v", "float32", sends, [0, sends[0]], recvs, [0, recvs[0]])
    plan.run(x.ctypes.data, out.ctypes.data)
    barrier(group=comm)
    return "nothing"


def no_memory(comm: Communicator) -> str:
    """Rank 1 has no memory for the parts that it adds."""
    x = np.ones(1 << 22, "float32")
    barrier(group=comm)
    if comm.rank == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
    all_reduce(x, out=x, group=comm)
    return "nothing"


def empty_part(comm: Communicator) -> str:
    """One group of elements, so that rank 1 has no part, and no memory for its errors."""
    x, out, error = np.linspace(-1, 1, 100, dtype="float32"), np.empty(100, "float32"), np.zeros(100, "float32")
    plan = _core.QuantPlan(comm.core, "quantized_all_reduce", "float32", "float32", [100], requantizes=True)
    own = np.zeros(100, "float32").ctypes.data if comm.rank == 0 else 0
    plan.run(x.ctypes.data, out.ctypes.data, error.ctypes.data, own)
    return f"off by {np.abs(out - comm.size * x).max():.3f}"


def many_rows(comm: Communicator) -> str:
    """The data travel with the rows."""
    return str(all_reduce(np.ones(2048, "float32"), group=comm)[-1])


class BrokenEngine:
    """Stands for an engine between hosts, such as MPI's, that raises an exception of its own."""

    name = "broken"

    def begin(self, out: object, into: object) -> None:
        raise RuntimeError("the engine is broken")

    def close(self) -> None:
        pass


def broken_engine(comm: Communicator) -> str:
    """The call is asked twice, after the queue's own thread has run it."""
    options = make_options("engine", 5.0)
    options.rank, options.size, options.job = comm.rank, comm.size, "job"
    core = _core.engine_communicator(options, lambda mine: all_gather_object(mine, group=comm), BrokenEngine())
    _, handle = all_reduce(np.ones(N, "float32"), group=Communicator(core, options), async_op=True)
    while not handle.is_completed():
        time.sleep(0.01)
    return f"{handle.exception()}, {handle.exception()}"


comm = Communicator.from_env(timeout=20, check="off" if sys.argv[1] == "other_counts" else "always")
barrier(group=comm)
began = time.monotonic()
try:
    made = globals()[sys.argv[1]](comm)
except Exception as error:
    made = f"{type(error).__name__}: {error}"
print(f"after {time.monotonic() - began:.1f} s: {made}", flush=True)
comm.destroy()
