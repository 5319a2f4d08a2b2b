"""The area under a curve: every rank sums some strips, a sum over ranks gives the whole."""

import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()

strips = np.array(64 if rank == 0 else 0, dtype="i")
comm.Bcast([strips, MPI.INT], root=0)
bounds = comm.bcast({"low": 0.0, "high": 2.0} if rank == 0 else None, root=0)

width = (bounds["high"] - bounds["low"]) / int(strips)
middles = bounds["low"] + width * (np.arange(rank, int(strips), size) + 0.5)
part = np.array([np.sum(middles**3) * width])
area = np.zeros(1)
comm.Reduce([part, MPI.DOUBLE], [area, MPI.DOUBLE], op=MPI.SUM, root=0)
largest = comm.reduce(float(part[0]), op=MPI.MAX, root=0)
if rank == 0:
    np.save(f"{sys.argv[1]}/integral.npy", [area[0], largest])
