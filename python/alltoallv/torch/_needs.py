"""Imported first: without torch it says how to install it."""

from alltoallv.extras import extra

extra("torch", "torch")
