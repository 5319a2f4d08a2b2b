"""What a device says of an all_to_all_v whose counts lie on it."""

from __future__ import annotations

from collections.abc import Sequence

from alltoallv.errors import AllToAllVError, CommTimeoutError, InvalidParamError, PeerMismatchError

COUNT_NAMES = "send_counts", "sdispls", "recv_counts"
STATUS_SHAPE = (48, 8)  # words for the most cores that a kernel has

_LATE = CommTimeoutError, "rank {} did not come in time, now or in an earlier call"
_ERRORS: dict[int, tuple[type[AllToAllVError], str]] = {
    4: (InvalidParamError, "rank {} receives more than its capacity"),
    5: (InvalidParamError, "rank {} has a negative count in send_counts, or a region outside of its input"),
    6: (PeerMismatchError, "rank {} has rows of another size than rank 0"),
    7: (PeerMismatchError, "rank {} receives other counts than its recv_counts"),
}


def raise_for(status: Sequence[Sequence[int]]) -> None:
    """Raises what a status of `STATUS_SHAPE` says, if it says anything."""
    for code, rank, *_ in status:
        if code != 0:
            kind, text = _ERRORS.get(code, _LATE)
            raise kind(f"all_to_all_v with a capacity: {text.format(rank)}")
