"""Text that is not UTF-8, as names of files may have: an error or no concern, and never the end of the process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import alltoallv
from alltoallv import Communicator
from alltoallv.errors import AllToAllVError, InvalidTensorError, PeerLostError
from alltoallv.numpy import all_to_all_v, barrier

TEXT = "jos\udce9"


class Count:
    def __repr__(self) -> str:
        return TEXT

    def __index__(self) -> int:
        raise ValueError(TEXT)


def test_arguments() -> None:
    (comm,) = Communicator.threads(1)
    x = np.ones(3)
    with pytest.raises(ValueError, match=TEXT):
        all_to_all_v(x, [Count()], group=comm)
    with pytest.raises(AllToAllVError, match=r"timeout is jos\\udce9, expected seconds.*A2A-1055"):
        barrier(group=comm, timeout=Count())
    with pytest.raises(InvalidTensorError, match=r"dtype is .*A2A-2075"):
        alltoallv.empty(3, TEXT)
    for out in (TEXT, Count()):
        with pytest.raises(InvalidTensorError, match=r"out is a (str|Count), expected a NumPy array.*A2A-2061"):
            all_to_all_v(x, [3], out=out, group=comm)
    comm.fail("barrier", ValueError(TEXT))
    barrier(group=comm)
    comm.abort(OSError(TEXT))
    with pytest.raises(PeerLostError, match=r"jos\\udce9"):
        barrier(group=comm)


def test_folder_of_a_trace(tmp_path: Path) -> None:
    (comm,) = Communicator.threads(1)
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/jos\xe9"))
    with alltoallv.trace(folder):
        barrier(group=comm)
    assert len(list(folder.glob("*.trace"))) == 1
