"""A rank that gives out tasks one by one, and others that do them until they are told to stop."""

import sys

import numpy as np
from mpi4py import MPI

READY, TASK, RESULT, STOP = range(1, 5)
comm = MPI.COMM_WORLD
rank, status = comm.Get_rank(), MPI.Status()

if rank == 0:
    tasks = list(range(20))
    results, at_work = {}, comm.Get_size() - 1
    while at_work:
        said = comm.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
        worker = status.Get_source()
        if status.Get_tag() == RESULT:
            results[said[0]] = said[1]
        elif tasks:
            comm.send(tasks.pop(), dest=worker, tag=TASK)
        else:
            comm.send(None, dest=worker, tag=STOP)
            at_work -= 1
    comm.Barrier()
    # Arrays whose sizes only the message tells.
    ends = []
    for _ in range(comm.Get_size() - 1):
        comm.Probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        end = np.empty(status.Get_count(MPI.DOUBLE))
        comm.Recv(end, source=status.Get_source(), tag=status.Get_tag())
        ends.append((status.Get_source(), end.tolist()))
    np.save(f"{sys.argv[1]}/tasks.npy", [results[task] for task in range(20)])
    assert sorted(ends) == [(r, [float(r)] * r) for r in range(1, comm.Get_size())]
else:
    while True:
        comm.send(None, dest=0, tag=READY)
        task = comm.recv(source=0, tag=MPI.ANY_TAG, status=status)
        if status.Get_tag() == STOP:
            break
        comm.send((task, task * task + 0.5), dest=0, tag=RESULT)
    comm.Barrier()
    comm.Send(np.full(rank, float(rank)), dest=0, tag=10 + rank)
