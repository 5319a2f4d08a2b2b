"""The communicator in host memory of ranks that have met at a group's store."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch.distributed as dist

from alltoallv import _core, communicator
from alltoallv.communicator import Communicator
from alltoallv.errors import CommTimeoutError
from alltoallv.torch.engines.rendezvous import GroupStore, Meeting, Ready


def domain_of(name: str) -> str:
    """The domain of a group of this name."""
    return f"torch-{name}".replace(":", "-").encode()[:128].decode(errors="ignore")  # a colon would begin a size


def connect(
    meeting: Meeting, store: dist.Store, rank: int, size: int, name: str, timeout: float, check: str | None = None
) -> Communicator:
    """Shared memory for ranks on one host; TCP between hosts, with what goes inside a host in shared memory.

    Args:
        store: Of the group, through which ranks on several hosts find each other.
        name: Of the group.
        timeout: Seconds, here and in every operator.
        check: As `Communicator.from_env` has it.

    Raises:
        CommTimeoutError: ranks did not come; the message names them.
        BackendUnavailableError: hosts do not reach each other over TCP.
    """
    options = communicator.make_options(domain_of(name), timeout, check)
    options.rank, options.size = rank, size
    options.job = "torch:" + meeting.key
    if meeting.hosts == 1:
        return Communicator(_core.communicator(options), options)
    gather = gatherer(meeting.store(store, rank, size), timeout)
    return Communicator(_core.engine_communicator(options, gather, None), options)


def gatherer(store: GroupStore, timeout: float) -> Callable[[bytes], list[bytes]]:
    """Hands everybody the bytes that all ranks give, through a part of a store of its own."""
    numbers = itertools.count()

    def gather(mine: bytes) -> list[bytes]:
        end = time.monotonic() + timeout

        def wait(ready: Ready, missing: Callable[[], list[int]]) -> None:
            while not ready(0.5):
                if time.monotonic() >= end:
                    raise CommTimeoutError(f"rank {store.rank} waited {timeout:.1f} s for ranks {missing()} to join")

        key = f"gather/{next(numbers)}"
        store.post(f"{key}/{store.rank}", mine)
        return store.collect(key, wait)

    return gather
