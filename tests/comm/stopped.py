"""What the tests of ranks that are stopped in the middle of a copy share: who sends how much to whom."""

from __future__ import annotations

from trouble import check_works, join

MB = 1 << 20
BYTES = 64 * MB
SENDER, RECEIVER, OTHER = 1, 0, 2
FOREIGN, FILL = 0xEE, 0x5A


def counts_of(rank: int, amount: int = BYTES) -> tuple[list[int], list[int]]:
    """The sender has something for the receiver, and nobody else for anybody."""
    sends, recvs = [0, 0, 0], [0, 0, 0]
    if rank == SENDER:
        sends[RECEIVER] = amount
    if rank == RECEIVER:
        recvs[SENDER] = amount
    return sends, recvs


def all_again(comm, suffix: str) -> None:
    """All three, in a new communicator of the same processes."""
    with join(comm.rank, 3, f"all-{suffix}", comm.domain) as everybody:
        check_works(everybody)
