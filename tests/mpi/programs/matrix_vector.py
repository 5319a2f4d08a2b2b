"""A matrix with rows of all ranks times a vector, some rows more on the first ranks."""

import sys

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
rows, columns = 11, 6

share = [rows // size + (r < rows % size) for r in range(size)]
counts = np.array(share) * columns
begins = np.concatenate(([0], np.cumsum(counts)[:-1]))
matrix = np.arange(rows * columns, dtype="d").reshape(rows, columns) if rank == 0 else None

own = np.empty((share[rank], columns))
comm.Scatterv([matrix, counts, begins, MPI.DOUBLE], own, root=0)
vector = np.arange(columns) - 2.0 if rank == 0 else np.empty(columns)
comm.Bcast(vector, root=0)

product = np.empty(rows)
comm.Allgatherv(own @ vector, [product, share])
column = np.empty(size) if rank == 0 else None
comm.Gather(np.array([product.max() + rank]), column, root=0)
if rank == 0:
    np.save(f"{sys.argv[1]}/matrix_vector.npy", np.concatenate([product, column]))
