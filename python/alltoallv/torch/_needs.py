"""Modules import this one first: without torch it raises an error that explains how to install it."""

from alltoallv.extras import extra

extra("torch", "torch")
