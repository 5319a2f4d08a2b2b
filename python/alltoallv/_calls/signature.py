"""The meaning of `all_to_all_v` in every front end, and the types of its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from alltoallv._calls.counts import Counts, Unit

F = TypeVar("F", bound=Callable[..., Any])
A = TypeVar("A")  # the framework's tensor
G = TypeVar("G")  # its groups

if TYPE_CHECKING:
    from typing_extensions import TypedDict

    class ExchangeOptions(TypedDict, Generic[A, G], total=False):
        """The keyword arguments of `all_to_all_v` except ``async_op``, which decides the type of the result."""

        sdispls: Counts | None
        rdispls: Counts | None
        unit: Unit | None
        out: A | None
        group: G
        timeout: float | None


def described(by: Callable[..., object]) -> Callable[[F], F]:
    """Gives a function the docstring of another with the same meaning."""

    def describe(function: F) -> F:
        function.__doc__ = by.__doc__
        return function

    return describe


def all_to_all_v() -> None:
    """Sends a region of ``input`` to every rank and receives one from each.

    For every rank j, with this rank called r::

        out_r[rdispls_r[j] : rdispls_r[j] + recv_counts_r[j]] = input_j[sdispls_j[r] : sdispls_j[r] + send_counts_j[r]]

    Args:
        input: A tensor (in NumPy an array) of any shape and any dense dtype; taken flat, or by rows of dimension 0.
            Copied first if it is not contiguous.
        send_counts, recv_counts: One integer >= 0 per rank: a list, tuple, array or integer tensor. ``send_counts`` of
            rank i for j and ``recv_counts`` of rank j for i must agree. ``recv_counts=None`` learns them from the
            peers; the output is then packed.
        sdispls, rdispls: Where the regions begin; packed in rank order if left out. Send regions may overlap and leave
            gaps; receive regions may leave gaps.
        unit: What counts and displacements count: ``"element"``, or ``"row"`` of dimension 0; None: rows of an input of
            2 dimensions or more, elements of others.
        out: Where to receive; contiguous, of the input's dtype, apart from it in memory. Elements that no region covers
            keep their value. Left out, the output is allocated in shared memory, just large enough, gaps zero. In torch
            and Paddle not with gradients.
        group: A group of the framework (in torch a ProcessGroup, in MindSpore a name), a `Communicator`, or None for
            all ranks.
        async_op: Return ``(output, handle)`` at once. With learnt counts the output is not known yet:
            ``(None, handle)``, and ``handle.result()`` returns it.
        timeout: Seconds to wait for the peers, in host memory, in MindSpore and Paddle in the gradient's exchange, too;
            default: the communicator's. In torch not with gradients.

    Returns:
        ``out`` if given, else a new tensor: of one dimension if counts are elements; if they are rows, with the other
        dimensions of the input. In torch, Paddle, and MindSpore's PyNative mode it is differentiable, to any order: the
        gradient is the exchange with sends and receives swapped.

    Raises:
        TypeError: ``input`` is no tensor.
        InvalidParamError, InvalidTensorError: an argument of this rank, or of a peer, is wrong.
        PeerMismatchError: two ranks disagree about operator, dtype or counts; nothing has been written.
        PeerLostError, CommTimeoutError: a rank died, left, aborted, or did not come.
    """
