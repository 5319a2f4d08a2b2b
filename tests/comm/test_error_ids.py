"""Every message ends with the id of its condition: of the cause, on every rank, however long the message is."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from on_ranks import on_both

from alltoallv import Communicator, errors
from alltoallv.numpy import all_to_all_v


def id_of(call: Callable[[], object]) -> str:
    with pytest.raises(errors.AllToAllVError) as caught:
        call()
    return caught.value.id


@on_both(2)
def test_all_ranks_have_the_id_of_the_cause(comm: Communicator) -> None:
    x, ones = np.arange(2), [1] * comm.size

    def fails_with_a_long_message() -> None:
        if comm.rank == 1:
            error = errors.InvalidTensorError("ä" * 2000, id=2999)
            comm.fail("all_to_all_v", error)
            raise error
        all_to_all_v(x, ones, ones, group=comm)

    def fails_in_python(error: Exception) -> None:
        if comm.rank == 1:
            comm.fail("all_to_all_v", error)
            raise errors.AllToAllVError("without", id=2998)
        all_to_all_v(x, ones, ones, group=comm)

    assert id_of(lambda: all_to_all_v(x, ones + [1] * comm.rank, ones, group=comm)) == "A2A-1054"
    for error, number in ((KeyError("x"), 1030), (MemoryError(), 5003), (errors.OutOfMemoryError("y", id=5024), 5024)):
        assert id_of(partial(fails_in_python, error)) == f"A2A-{number if comm.rank != 1 else 2998}"
    assert id_of(fails_with_a_long_message) == "A2A-2999"
    assert all_to_all_v(x, ones, ones, group=comm).tolist() == [comm.rank] * comm.size


def test_a_message_has_one_id() -> None:
    cause = errors.InvalidParamError("x is 3, expected 2", id=1234)
    assert str(cause) == "x is 3, expected 2 [A2A-1234]"
    assert cause.id == "A2A-1234"
    outer = errors.PeerMismatchError(f"rank 1: {cause}", id=3001)
    assert (str(outer), outer.id) == (f"rank 1: {cause}", cause.id)
    copy = pickle.loads(pickle.dumps(outer))
    assert (type(copy), str(copy), copy.id, copy.code) == (type(outer), str(outer), outer.id, outer.code)
    assert errors.ResourceError("without").id == ""
