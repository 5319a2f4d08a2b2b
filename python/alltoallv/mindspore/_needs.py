"""Imported first: without mindspore it says how to install it."""

from alltoallv.extras import extra

extra("mindspore", "mindspore")
