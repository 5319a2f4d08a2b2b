"""Root info for ranks on several hosts: rank 0 listens, every other rank asks it once.

For programs whose launcher gives an address and no store, such as msrun. Who knows the name of the job gets the bytes:
the network between the hosts is trusted, as HCCL's own is.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import time
from collections.abc import Callable

from alltoallv.errors import CommTimeoutError, PeerLostError

_PAUSE = 0.05  # seconds between attempts
_STEP = 5.0  # seconds for a peer that has connected to say who it is
_QUESTION = struct.Struct("!32sI")  # name of the domain, hashed; rank
_OK, _FAILED = b"+", b"!"


def share(
    make: Callable[[], bytes], rank: int, size: int, address: tuple[str, int], *, name: str, timeout: float
) -> bytes:
    """What rank 0 makes, on all ranks.

    Args:
        make: Called on rank 0. What it raises is raised there; the others raise `PeerLostError` with its text.
        address: Of rank 0: host and port.
        name: Equal on all ranks, different between jobs and domains.
        timeout: Seconds.

    Raises:
        CommTimeoutError: ranks did not come; the message names them.
    """
    token = hashlib.sha256(name.encode()).digest()
    end = time.monotonic() + timeout
    if rank:
        return _ask(rank, address, token, end, timeout)
    with _listen(address, size, end, timeout) as listener:
        try:
            info = make()
        except Exception as error:
            soon = min(end, time.monotonic() + _STEP)
            with contextlib.suppress(CommTimeoutError):
                _serve(listener, _FAILED + str(error).encode(), size, token, soon, timeout)
            raise
        _serve(listener, _OK + info, size, token, end, timeout)
    return info


def _listen(address: tuple[str, int], size: int, end: float, timeout: float) -> socket.socket:
    while True:
        try:
            return socket.create_server(("", address[1]), backlog=size)
        except OSError as error:
            if time.monotonic() > end:
                raise CommTimeoutError(
                    f"rank 0 could not listen on port {address[1]} within {timeout:.1f} s: {error.strerror}; "
                    "ALLTOALLV_ROOT_PORT chooses another"
                ) from None
        time.sleep(_PAUSE)


def _serve(listener: socket.socket, answer: bytes, size: int, token: bytes, end: float, timeout: float) -> None:
    waiting = set(range(1, size))
    while waiting:
        if time.monotonic() > end:
            late = ", ".join(f"rank {j}" for j in sorted(waiting))
            raise CommTimeoutError(f"rank 0 waited {timeout:.1f} s for {late} to ask for HCCL's root info")
        listener.settimeout(_PAUSE)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_STEP)
            asked, rank = _QUESTION.unpack(_receive(connection, _QUESTION.size))
            if asked == token and rank in waiting:
                connection.sendall(struct.pack("!I", len(answer)) + answer)
                waiting.discard(rank)


def _ask(rank: int, address: tuple[str, int], token: bytes, end: float, timeout: float) -> bytes:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=_STEP) as connection:
            connection.sendall(_QUESTION.pack(token, rank))
            connection.settimeout(max(end - time.monotonic(), 0.1))
            (length,) = struct.unpack("!I", _receive(connection, 4))
            answer = _receive(connection, length)
            if answer.startswith(_FAILED):
                raise PeerLostError(f"rank 0 could not make HCCL's root info: {answer[1:].decode(errors='replace')}")
            return answer[1:]
        if time.monotonic() > end:
            raise CommTimeoutError(
                f"rank {rank} waited {timeout:.1f} s for HCCL's root info from rank 0 at {address[0]}:{address[1]}"
            )
        time.sleep(_PAUSE)


def _receive(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the connection ended early")
        data += part
    return data
