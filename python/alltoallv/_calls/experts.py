"""Row counts of mixture-of-experts exchanges, with the meaning of Paddle's global_scatter and global_gather.

Each of W cards has E experts. ``local_count`` and ``global_count`` have W * E entries, entry ``e + j * E`` standing for
expert e of card j: ``local_count[e + j * E]`` rows of this card belong to expert e of card j, and
``global_count[e + j * E]`` rows of card j belong to expert e of this card.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from alltoallv import _core
from alltoallv._calls.counts import Counts, Layout, as_counts, packed, rows_of
from alltoallv._calls.guard import Member, guard
from alltoallv.communicator import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError

Matrix = npt.NDArray[np.int64]  # [card, expert]


def read(
    size: int, shape: Sequence[int], local_count: Counts, global_count: Counts, rows_of_x: str
) -> tuple[Matrix, Matrix]:
    """Returns both counts as ``[card, expert]`` matrices, for an x of that shape whose rows ``rows_of_x`` counts."""
    local, global_ = _matrix("local_count", local_count, size), _matrix("global_count", global_count, size)
    if local.shape != global_.shape:
        raise InvalidParamError(
            f"local_count has {local.size} entries and global_count {global_.size}, expected one length", id=1130
        )
    total, rows = int((local if rows_of_x == "local_count" else global_).sum()), rows_of(shape, "x")
    if total != rows:
        raise InvalidParamError(f"{rows_of_x} sums to {total}, expected {rows}, the rows of x", id=1131)
    return local, global_


def _matrix(name: str, counts: Counts, size: int) -> Matrix:
    try:
        array = np.asarray(
            counts.tolist() if hasattr(counts, "tolist") and not isinstance(counts, np.ndarray) else counts
        )
    except (TypeError, ValueError) as error:
        raise InvalidTensorError(
            f"{name} is a {type(counts).__name__}, expected values that NumPy converts to an array ({error})", id=2042
        ) from error
    flat = array.ndim == 1 or (array.ndim == 2 and len(array) == size)  # Paddle's layers also give a row for each card
    if not flat or array.dtype.kind not in "iu" or array.size % size or not array.size:
        dtype = getattr(counts, "dtype", array.dtype)
        raise InvalidParamError(
            f"{name} has dtype {dtype} and shape {array.shape}, expected integers, "
            f"{size} cards times the number of experts",
            id=1132,
        )
    matrix = np.ascontiguousarray(array, np.int64).reshape(size, -1)
    _core.check_signs(name, matrix.reshape(-1).tolist())
    return matrix


def layout(local: Matrix) -> Layout:
    """Returns the layout of the exchange by which cards send each other their rows of ``local_count``."""
    each = [local.shape[1]] * local.shape[0]
    return each, packed(each), each, packed(each)


def check_received(comm: Member, operator: str, received: Matrix, global_: Matrix) -> None:
    """Raises PeerMismatchError if the counts that peers announced are not the expected ones.

    The exchange of rows compares only sums per card; wrong counts of single experts would mix up rows.
    """
    with guard(comm, operator):
        for card, expert in np.argwhere(received != global_):
            raise PeerMismatchError(
                f"rank {card} sends {received[card, expert]} rows to expert {expert} of rank {comm.rank}, "
                f"which expects {global_[card, expert]}",
                id=3015,
            )


def agree(comm: Communicator, operator: str, local: Matrix, global_: Matrix) -> None:
    """Sends the counts to the peers over shared memory, and raises if theirs do not match."""
    check_received(comm, operator, _exchanged(comm, local), global_)


def exchange_counts(comm: Communicator, send_counts: Counts) -> npt.NDArray[np.int64]:
    """Returns what every rank will send to this one, over shared memory: entry j is rank j's entry for this rank."""
    with guard(comm, "exchange_counts"):
        counts = read_counts(send_counts, comm.size)
    return _exchanged(comm, counts.reshape(-1, 1)).reshape(-1)


def gathered(comm: Communicator, numbers: Sequence[int] | npt.NDArray[np.int64]) -> Matrix:
    """Returns the numbers of all ranks, equally many from each, one row per rank."""
    return _exchanged(comm, np.array([numbers] * comm.size, np.int64))


def _exchanged(comm: Communicator, rows: Matrix) -> Matrix:
    """Sends row j to rank j, over shared memory; returns the rows that arrive."""
    received = np.empty_like(rows)
    plan = _core.Plan(comm.core, "exchange_counts", "int64", *layout(rows))
    plan.run(rows.ctypes.data, received.ctypes.data)
    return received


def read_counts(send_counts: Counts, size: int) -> npt.NDArray[np.int64]:
    """Checks and returns one count >= 0 per rank."""
    counts = as_counts("send_counts", send_counts, size)
    _core.check_signs("send_counts", counts)
    return np.array(counts, np.int64)


def transposition(counts: Matrix) -> npt.NDArray[np.int64] | None:
    """Returns the order that sorts rows by (k, i) which lie by (i, k), ``counts[i, k]`` each; None: they already are.

    Row n of the result is row ``order[n]`` of the given rows.
    """
    if 1 in counts.shape:
        return None
    flat = counts.ravel()
    block = np.arange(flat.size).reshape(counts.shape).T.ravel()
    lengths = flat[block]
    begin = (np.cumsum(flat) - flat)[block] - (np.cumsum(lengths) - lengths)
    return np.repeat(begin, lengths) + np.arange(lengths.sum())
