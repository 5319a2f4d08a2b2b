"""Makes the communicator in host memory of ranks that have met."""

from __future__ import annotations

from alltoallv import _core
from alltoallv.communicator import Communicator
from alltoallv.launch.options import make_options
from alltoallv.torch.engines.rendezvous import Gather, Meeting


def domain_of(name: str) -> str:
    """Returns the domain of a group of this name."""
    return f"torch-{name}".replace(":", "-").encode()[:128].decode(errors="ignore")  # a colon would begin a size


def connect(
    meeting: Meeting, gather: Gather, rank: int, size: int, name: str, timeout: float, check: str | None = None
) -> Communicator:
    """Connects over shared memory on one host; over TCP between hosts, with shared memory inside each host.

    Args:
        gather: Lets ranks on several hosts find each other.
        name: The group's name.
        timeout: Seconds, here and in every operator.
        check: See `Communicator.from_env`.

    Raises:
        CommTimeoutError: ranks did not come; the message names them.
        BackendUnavailableError: hosts do not reach each other over TCP.
    """
    options = make_options(domain_of(name), timeout, check)
    options.rank, options.size = rank, size
    options.job = "torch:" + meeting.key
    if meeting.hosts == 1:
        return Communicator(_core.communicator(options), options)
    return Communicator(_core.engine_communicator(options, gather, None), options)
