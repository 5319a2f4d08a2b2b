"""The column of `alltoallv.numpy`."""

from __future__ import annotations

from column import Column


class NumpyColumn(Column):
    name, module, package = "numpy", "alltoallv.numpy", "numpy"
