"""Numbers of all ranks sorted over the ranks: every rank gets one bucket, by an exchange of uneven counts."""

import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()

own = np.sort((np.arange(50 + 10 * rank) * 7919 + 31 * rank) % 1000)
bounds = [1000 * (j + 1) // size for j in range(size)]
begins = np.concatenate(([0], np.searchsorted(own, bounds[:-1])))
counts = np.diff(np.concatenate((begins, [own.size])))

coming = np.empty(size, counts.dtype)
comm.Alltoall(counts, coming)
places = np.concatenate(([0], np.cumsum(coming)[:-1]))
bucket = np.empty(coming.sum(), own.dtype)
comm.Alltoallv([own, (counts, begins)], [bucket, (coming, places)])
bucket.sort()

before = comm.exscan(bucket.size, op=MPI.SUM) or 0
total = comm.allreduce(bucket.size)
sizes = comm.gather(bucket.size)
everything = np.empty(total, own.dtype) if rank == 0 else None
comm.Gatherv(bucket, [everything, sizes], root=0)
firsts = comm.gather(before)
if rank == 0:
    np.savez(f"{sys.argv[1]}/bucket_sort.npz", everything=everything, firsts=firsts)
