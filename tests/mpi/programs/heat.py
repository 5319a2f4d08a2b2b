"""Heat on a plate, in blocks of a grid of ranks that exchange their edges: rows as they lie, columns by a type."""

import sys

import numpy as np
from mpi4py import MPI

height, width, steps = 12, 12, 25
comm = MPI.COMM_WORLD
dims = MPI.Compute_dims(comm.Get_size(), 2)
grid = comm.Create_cart(dims, periods=[False, False], reorder=False)
y, x = grid.Get_coords(grid.Get_rank())
tall, wide = height // dims[0], width // dims[1]

heat = np.zeros((tall + 2, wide + 2))
if y == 0:
    heat[0, :] = 1.0
column = MPI.DOUBLE.Create_vector(tall, 1, wide + 2).Commit()
up, down = grid.Shift(0, 1)
left, right = grid.Shift(1, 1)
flat = heat.reshape(-1)

for _ in range(steps):
    grid.Sendrecv(heat[1, :], dest=up, recvbuf=heat[-1, :], source=down)
    grid.Sendrecv(heat[-2, :], dest=down, recvbuf=heat[0, :], source=up)
    requests = [
        grid.Irecv([flat[wide + 2 :], 1, column], source=left),
        grid.Irecv([flat[2 * (wide + 2) - 1 :], 1, column], source=right),
        grid.Isend([flat[wide + 3 :], 1, column], dest=left),
        grid.Isend([flat[2 * (wide + 2) - 2 :], 1, column], dest=right),
    ]
    MPI.Request.Waitall(requests)
    inner = (heat[:-2, 1:-1] + heat[2:, 1:-1] + heat[1:-1, :-2] + heat[1:-1, 2:]) / 4
    change = grid.allreduce(np.abs(inner - heat[1:-1, 1:-1]).max(), op=MPI.MAX)
    heat[1:-1, 1:-1] = inner
column.Free()

blocks = grid.gather(((y, x), inner), root=0)
if grid.Get_rank() == 0:
    plate = np.empty((height, width))
    for (i, j), block in blocks:
        plate[i * tall : (i + 1) * tall, j * wide : (j + 1) * wide] = block
    np.savez(f"{sys.argv[1]}/heat.npz", plate=plate, change=change)
