"""mpi4py's names on `alltoallv.numpy`: a program that starts ``from alltoallv.mpi import MPI`` runs without an MPI.

Ranks come from ``python -m alltoallv run`` or any launcher that `alltoallv.Communicator.from_env` knows. What of
mpi4py is here, and what is refused, is in docs/migration.md. Calls have mpi4py's arguments and meaning; errors are
from `alltoallv.errors`, and are also raised on the peers of a collective call.
"""
