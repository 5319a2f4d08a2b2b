"""Imported first: without mindspore it explains how to install it."""

from alltoallv.extras import extra

extra("mindspore", "mindspore")
