"""Under mpi4py's name, so that its tests import what stands in for it."""
