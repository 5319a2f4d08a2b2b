"""Holds the functions of alltoallv.torch that are called with tensors."""
