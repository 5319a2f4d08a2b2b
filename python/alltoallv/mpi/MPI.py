"""The names of mpi4py's module MPI. COMM_WORLD joins the job when it is first used."""

from __future__ import annotations

import pickle
import socket
import time
from typing import TYPE_CHECKING, Any

from alltoallv import __version__
from alltoallv.errors import AllToAllVError
from alltoallv.memory import empty
from alltoallv.mpi import requests as _requests
from alltoallv.mpi.communicators import Comm
from alltoallv.mpi.constants import (
    ANY_SOURCE,
    ANY_TAG,
    BOTTOM,
    CART,
    CONGRUENT,
    DIST_GRAPH,
    ERR_OTHER,
    ERRORS_ABORT,
    ERRORS_ARE_FATAL,
    ERRORS_RETURN,
    GRAPH,
    IDENT,
    IN_PLACE,
    INFO_NULL,
    ORDER_C,
    ORDER_FORTRAN,
    PROC_NULL,
    ROOT,
    SIMILAR,
    SUCCESS,
    TAG_UB,
    THREAD_FUNNELED,
    THREAD_MULTIPLE,
    THREAD_SERIALIZED,
    THREAD_SINGLE,
    UNDEFINED,
    UNEQUAL,
    UNWEIGHTED,
    WEIGHTS_EMPTY,
)
from alltoallv.mpi.datatypes import (
    BYTE,
    C_BOOL,
    C_DOUBLE_COMPLEX,
    C_FLOAT_COMPLEX,
    C_LONG_DOUBLE_COMPLEX,
    CHAR,
    DATATYPE_NULL,
    DOUBLE,
    DOUBLE_INT,
    FLOAT,
    FLOAT_INT,
    INT,
    INT8_T,
    INT16_T,
    INT32_T,
    INT64_T,
    INT_INT,
    LONG,
    LONG_DOUBLE,
    LONG_INT,
    LONG_LONG,
    PACKED,
    SHORT,
    SHORT_INT,
    SIGNED_CHAR,
    UINT8_T,
    UINT16_T,
    UINT32_T,
    UINT64_T,
    UNSIGNED,
    UNSIGNED_CHAR,
    UNSIGNED_LONG,
    UNSIGNED_LONG_LONG,
    UNSIGNED_SHORT,
    Datatype,
)
from alltoallv.mpi.groups import GROUP_EMPTY, GROUP_NULL, Group
from alltoallv.mpi.operations import (
    BAND,
    BOR,
    BXOR,
    LAND,
    LOR,
    LXOR,
    MAX,
    MAXLOC,
    MIN,
    MINLOC,
    NO_OP,
    OP_NULL,
    PROD,
    REPLACE,
    SUM,
    Op,
)
from alltoallv.mpi.requests import REQUEST_NULL, Prequest, Request, Status
from alltoallv.mpi.topologies import (
    COMM_NULL,
    COMM_SELF,
    COMM_TYPE_SHARED,
    COMM_WORLD,
    Cartcomm,
    Compute_dims,
    Distgraphcomm,
    Graphcomm,
    Intracomm,
    Topocomm,
)

__all__ = [
    "AINT",
    "ANY_SOURCE",
    "ANY_TAG",
    "BAND",
    "BOOL",
    "BOR",
    "BOTTOM",
    "BSEND_OVERHEAD",
    "BXOR",
    "BYTE",
    "CART",
    "CHAR",
    "COMM_NULL",
    "COMM_SELF",
    "COMM_TYPE_SHARED",
    "COMM_WORLD",
    "COMPLEX",
    "COMPLEX8",
    "COMPLEX16",
    "CONGRUENT",
    "COUNT",
    "CXX_BOOL",
    "CXX_DOUBLE_COMPLEX",
    "CXX_FLOAT_COMPLEX",
    "CXX_LONG_DOUBLE_COMPLEX",
    "C_BOOL",
    "C_COMPLEX",
    "C_DOUBLE_COMPLEX",
    "C_FLOAT_COMPLEX",
    "C_LONG_DOUBLE_COMPLEX",
    "DATATYPE_NULL",
    "DIST_GRAPH",
    "DOUBLE",
    "DOUBLE_COMPLEX",
    "DOUBLE_INT",
    "DOUBLE_PRECISION",
    "ERRORS_ABORT",
    "ERRORS_ARE_FATAL",
    "ERRORS_RETURN",
    "ERR_OTHER",
    "FLOAT",
    "FLOAT_INT",
    "GRAPH",
    "GROUP_EMPTY",
    "GROUP_NULL",
    "IDENT",
    "INFO_NULL",
    "INT",
    "INT8_T",
    "INT16_T",
    "INT32_T",
    "INT64_T",
    "INTEGER",
    "INTEGER1",
    "INTEGER2",
    "INTEGER4",
    "INTEGER8",
    "INT_INT",
    "IN_PLACE",
    "LAND",
    "LOGICAL",
    "LONG",
    "LONG_DOUBLE",
    "LONG_INT",
    "LONG_LONG",
    "LOR",
    "LXOR",
    "MAX",
    "MAXLOC",
    "MAX_ERROR_STRING",
    "MAX_PROCESSOR_NAME",
    "MIN",
    "MINLOC",
    "NO_OP",
    "OFFSET",
    "OP_NULL",
    "ORDER_C",
    "ORDER_FORTRAN",
    "PACKED",
    "PROC_NULL",
    "PROD",
    "REAL",
    "REAL4",
    "REAL8",
    "REPLACE",
    "REQUEST_NULL",
    "ROOT",
    "SHORT",
    "SHORT_INT",
    "SIGNED_CHAR",
    "SIMILAR",
    "SINT8_T",
    "SINT16_T",
    "SINT32_T",
    "SINT64_T",
    "SUBVERSION",
    "SUCCESS",
    "SUM",
    "TAG_UB",
    "THREAD_FUNNELED",
    "THREAD_MULTIPLE",
    "THREAD_SERIALIZED",
    "THREAD_SINGLE",
    "TWOINT",
    "UINT8_T",
    "UINT16_T",
    "UINT32_T",
    "UINT64_T",
    "UNDEFINED",
    "UNEQUAL",
    "UNSIGNED",
    "UNSIGNED_CHAR",
    "UNSIGNED_INT",
    "UNSIGNED_LONG",
    "UNSIGNED_LONG_LONG",
    "UNSIGNED_SHORT",
    "UNWEIGHTED",
    "VERSION",
    "WEIGHTS_EMPTY",
    "Alloc_mem",
    "Attach_buffer",
    "Cartcomm",
    "Comm",
    "Compute_dims",
    "Datatype",
    "Detach_buffer",
    "Distgraphcomm",
    "Exception",
    "Finalize",
    "Free_mem",
    "Get_library_version",
    "Get_processor_name",
    "Get_version",
    "Graphcomm",
    "Group",
    "Init",
    "Init_thread",
    "Intracomm",
    "Is_finalized",
    "Is_initialized",
    "Is_thread_main",
    "Op",
    "Prequest",
    "Query_thread",
    "Request",
    "Status",
    "Topocomm",
    "Wtick",
    "Wtime",
    "get_vendor",
    "pickle",
]

# Other names that mpi4py has for them.
BOOL = CXX_BOOL = LOGICAL = C_BOOL
INTEGER, UNSIGNED_INT, REAL, DOUBLE_PRECISION = INT, UNSIGNED, FLOAT, DOUBLE
COMPLEX = C_COMPLEX = CXX_FLOAT_COMPLEX = COMPLEX8 = C_FLOAT_COMPLEX
DOUBLE_COMPLEX = CXX_DOUBLE_COMPLEX = COMPLEX16 = C_DOUBLE_COMPLEX
CXX_LONG_DOUBLE_COMPLEX = C_LONG_DOUBLE_COMPLEX
INTEGER1, INTEGER2, INTEGER4, INTEGER8 = SINT8_T, SINT16_T, SINT32_T, SINT64_T = INT8_T, INT16_T, INT32_T, INT64_T
REAL4, REAL8, TWOINT = FLOAT, DOUBLE, INT_INT
AINT = OFFSET = COUNT = INT64_T
Exception = AllToAllVError
VERSION, SUBVERSION = 4, 1
MAX_PROCESSOR_NAME, MAX_ERROR_STRING = 256, 512

BSEND_OVERHEAD = 0

_finalized = False
_attached: Any = None


def Init() -> None:
    """Does nothing: COMM_WORLD joins the job when it is first used."""


def Init_thread(required: int = THREAD_MULTIPLE) -> int:
    return THREAD_MULTIPLE


def Query_thread() -> int:
    return THREAD_MULTIPLE


def Is_thread_main() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


def Is_initialized() -> bool:
    return True


def Finalize() -> None:
    """Waits until what this rank has sent is received; a later call does nothing."""
    global _finalized
    _requests.wait_for_sends()
    _finalized = True


def Is_finalized() -> bool:
    return _finalized


def Get_version() -> tuple[int, int]:
    """Returns the version of MPI's standard whose names these are."""
    return VERSION, SUBVERSION


def Get_library_version() -> str:
    return f"alltoallv {__version__}"


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    major, minor, micro = (int(part) for part in __version__.split(".")[:3])
    return "alltoallv", (major, minor, micro)


def Get_processor_name() -> str:
    return socket.gethostname()


def Wtime() -> float:
    return time.perf_counter()


def Wtick() -> float:
    return time.get_clock_info("perf_counter").resolution


def Alloc_mem(size: int, info: Any = INFO_NULL) -> memoryview:
    """Returns memory that other ranks write into with a single copy."""
    return empty(size, "uint8").data


def Free_mem(mem: memoryview) -> None:
    mem.release()


def Attach_buffer(buf: Any) -> None:
    """Keeps ``buf`` for `Detach_buffer`; sends that are buffered copy into memory of their own."""
    global _attached
    _attached = buf


def Detach_buffer() -> Any:
    """Waits until what this rank has sent is received; returns what was attached."""
    global _attached
    _requests.wait_for_sends()
    buf, _attached = _attached, None
    return buf


if not TYPE_CHECKING:  # which shall find names that are missing

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"MPI.{name} is not in alltoallv.mpi, expected one of the names that docs/migration.md has"
        )
