"""Two hosts: the program of one host, the same bits, and one error on all ranks when two hosts disagree.

On two machines, with the same `export ALLTOALLV_JOB_SECRET=...` on both:

    torchrun --nnodes=2 --nproc-per-node=2 --rdzv-endpoint=HOST0:29400 examples/several_hosts.py

Alone it makes two hosts of two ranks each on this machine: network namespaces with a cable of 1 Gbit/s. It needs root:

    sudo .venv/bin/python examples/several_hosts.py
"""

import os
import sys
import time

import numpy as np

from alltoallv import Communicator
from alltoallv.errors import BackendUnavailableError, PeerMismatchError
from alltoallv.numpy import all_reduce, all_to_all_v
from alltoallv.testing.hosts import HostRanks, joined_hosts

COUNT = 1 << 20  # float32 elements for one peer: 4 MiB


def main() -> None:
    """What every rank does."""
    with Communicator.from_env(timeout=60) as comm:
        total = all_reduce(np.array([0.1, 0.2, 0.3]) * (comm.rank + 1), group=comm)
        print(f"rank {comm.rank} has the sum {' '.join(map(float.hex, total.tolist()))}", flush=True)

        on_host = int(os.environ.get("LOCAL_WORLD_SIZE", comm.size))
        first = comm.rank - comm.rank % on_host
        peers = {"same": first + (comm.rank + 1) % on_host, "next": (comm.rank + on_host) % comm.size}
        if on_host == comm.size:
            del peers["next"]
        for host, peer in peers.items():
            counts = [COUNT if rank == peer else 0 for rank in range(comm.size)]
            numbers = np.full(COUNT, comm.rank, np.float32)
            begin = time.perf_counter()
            for _ in range(5):
                all_to_all_v(numbers, counts, group=comm)
            rate = 5 * numbers.nbytes / (time.perf_counter() - begin)
            if comm.rank == 0:
                print(f"every rank sends {rate / 1e9:.2f} GB/s to a rank of the {host} host", flush=True)

        try:
            all_reduce(np.ones(4 if comm.rank == comm.size - 1 > 0 else 3), group=comm)
        except PeerMismatchError as error:
            print(f"rank {comm.rank}: {error}", flush=True)


def make_hosts() -> int:
    """Runs the program on two hosts of this machine; returns the first exit code that is not 0."""
    try:
        with joined_hosts(limit=("1gbit", "256kb", "100ms")) as (a, b):
            ranks = HostRanks(__file__, [a, a, b, b])
            print("".join(ranks.outputs()), end="")
            return next((code for code in ranks.codes() if code), 0)
    except BackendUnavailableError as error:
        print(f"no hosts can be made on this machine: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    launched = any(name in os.environ for name in ("RANK", "ALLTOALLV_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"))
    sys.exit(main() if launched else make_hosts())
