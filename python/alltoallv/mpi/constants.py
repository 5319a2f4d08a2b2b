"""MPI's numbers and marks. An MPI chooses the numbers; programs use the names."""

from __future__ import annotations

ANY_SOURCE, ANY_TAG, PROC_NULL, ROOT, UNDEFINED = -1, -1, -2, -3, -32766
SUCCESS, ERR_OTHER = 0, 15
IDENT, CONGRUENT, SIMILAR, UNEQUAL = range(4)
GRAPH, CART, DIST_GRAPH = 1, 2, 3
ORDER_C, ORDER_FORTRAN = 56, 57
THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
TAG_UB = 0  # an attribute
HIGHEST_TAG = 2**31 - 1


class Mark:
    """A value that stands for a place or for nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"MPI.{self._name}"

    def __reduce__(self) -> str:
        return self._name


IN_PLACE, BOTTOM = Mark("IN_PLACE"), Mark("BOTTOM")
INFO_NULL = Mark("INFO_NULL")
UNWEIGHTED, WEIGHTS_EMPTY = Mark("UNWEIGHTED"), Mark("WEIGHTS_EMPTY")
ERRORS_RETURN, ERRORS_ARE_FATAL, ERRORS_ABORT = Mark("ERRORS_RETURN"), Mark("ERRORS_ARE_FATAL"), Mark("ERRORS_ABORT")
