"""Reads the arguments of `all_to_all_v` for front ends that run it by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alltoallv import _core
from alltoallv._calls.counts import Counts, Unit
from alltoallv.errors import InvalidParamError


def read_request(
    size: int,
    shape: Sequence[int],
    send_counts: Counts,
    recv_counts: Counts | None,
    sdispls: Counts | None,
    rdispls: Counts | None,
    unit: Unit | None,
    out: Any,
    gradient_later: bool,
    *,
    empty_rows: bool = False,
) -> _core.Request:
    """Checks the arguments of a call on an input of that shape over ``size`` ranks, and returns the request.

    ``out`` is a tensor or None. ``gradient_later``: the call is asynchronous, and its input wants a gradient.
    ``empty_rows``: the counts of rows without elements may be learnt.

    Raises:
        InvalidParamError, InvalidTensorError: an argument is wrong, or two do not go together.
    """
    into = None if out is None else out.shape
    request = _core.Request.all_to_all_v(size, shape, send_counts, recv_counts, sdispls, rdispls, unit, into)
    # An exchange of elements cannot announce rows that have none.
    if request.learns and request.row == 0 and not empty_rows:
        raise InvalidParamError("input has rows without elements, expected recv_counts to be given for it")
    if request.learns and gradient_later:
        raise InvalidParamError(
            "async_op is True for an input that wants a gradient and recv_counts is None, expected recv_counts"
        )
    return request
