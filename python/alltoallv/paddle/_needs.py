"""Imported first: without paddle it says how to install it."""

from alltoallv.extras import extra

extra("paddle", "paddle")
