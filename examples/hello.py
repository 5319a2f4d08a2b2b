"""The smallest program: rank r sends r + j + 1 copies of its number to rank j."""

import numpy as np

from alltoallv import Communicator
from alltoallv.numpy import all_to_all_v

with Communicator.from_env() as comm:
    counts = [comm.rank + j + 1 for j in range(comm.size)]
    received = all_to_all_v(np.full(sum(counts), comm.rank, np.float32), counts, group=comm)
    print(f"rank {comm.rank} of {comm.size} received {received.astype(int).tolist()}")
