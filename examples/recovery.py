"""A rank dies in the middle of training, and the others train on in milliseconds.

    python -m alltoallv run -n 4 --keep-going examples/recovery.py

Every rank fits its share of the points; gradients are averaged over the ranks that live. Rank 1 kills itself.
"""

import os
import signal
import time

import numpy as np

from alltoallv import Communicator
from alltoallv.errors import PeerLostError
from alltoallv.numpy import all_reduce

STEPS, LAST_STEP_OF_RANK_1 = 200, 60


def main() -> None:
    comm = Communicator.from_env(timeout=30)
    me = comm.rank
    rng = np.random.default_rng(7)  # the same points on every rank, which uses every W-th of them
    points = rng.normal(size=(1200, 3))
    targets = points @ [1.0, -2.0, 0.5] + 0.01 * rng.normal(size=1200)
    weights = np.zeros(3)
    step = 0
    while step < STEPS:
        if me == 1 and comm.size > 1 and step == LAST_STEP_OF_RANK_1:
            os.kill(os.getpid(), signal.SIGKILL)
        mine = slice(comm.rank, None, comm.size)
        gradient = points[mine].T @ (points[mine] @ weights - targets[mine]) / len(targets[mine])
        try:
            gradient = all_reduce(gradient, "avg", group=comm)
        except PeerLostError as error:
            begin = time.perf_counter()
            comm = comm.shrink()  # of the ranks that live, in the old order
            took = time.perf_counter() - begin
            if comm.rank == 0:
                print(f"step {step}: {str(error).split(': ', 1)[1]}")
                print(f"step {step}: {comm.size} ranks go on after {took * 1e3:.0f} ms")
            continue  # repeat the step with the new shares
        weights -= 0.1 * gradient
        step += 1
    if comm.rank == 0:
        print(f"after {STEPS} steps the weights are {weights.round(2).tolist()}")
    comm.destroy()


if __name__ == "__main__":
    main()
