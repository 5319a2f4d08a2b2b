"""Reads what a communicator is made from: the caller's arguments, and variables of the environment."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real

from alltoallv import _core
from alltoallv.errors import InvalidParamError
from alltoallv.launch import seat, variables
from alltoallv.launch.ancestry import runs, strangers
from alltoallv.launch.job import Launch

_LATE_SECONDS = 20.0  # in which late ranks of a job that has met another are refused


def take_place(job: Launch, options: _core.CommunicatorOptions) -> None:
    """Gives ``options`` the job's name, and makes this process the only one that is this rank of it.

    Raises:
        InvalidParamError: another process is, and only an address tells the jobs apart, or lost ranks are replaced.
    """
    options.job = job.key
    if job.size > 1 and (job.by_address or job.replacement is not None):
        cure = seat.CURE if job.replacement is None else "no other can take its place while it lives; end it"
        seat.take(job.key, job.rank, f"rank {job.rank} of job {job.job_id!r}", options.timeout, cure)


def on_this_host(
    job: Launch, options: _core.CommunicatorOptions, members: Sequence[int] | None = None
) -> _core.Communicator:
    """Returns the communicator of ranks of the job that share this host: of all, or of these members.

    Raises:
        InvalidParamError: its ranks are of different jobs, which have been given one address.
    """
    take_place(job, options)
    processes = _core.processes_of(options.job, job.size)
    if members is not None and processes:
        options.processes = [processes[rank] for rank in members]
    communicator = _core.communicator(options)
    if job.by_address and job.size > 1:
        pids = {member["rank"]: member["pid"] for member in json.loads(communicator.flight_record())["ranks"]}
        # Where another process has claimed this rank there are two jobs, however few ranks of this one are left.
        refuse_strangers(job.depth, pids, 0 if seat.contested(job.key) else job.size, communicator)
    return communicator


def refuse_strangers(depth: int, pids: Mapping[int, int], size: int, communicator: _core.Communicator) -> None:
    """Ends a communicator, on all its ranks, if some of them are of another job of ``size`` ranks.

    The others of both jobs may also be about to meet: they are refused as long as this process is there.
    """
    outside, late = strangers(depth, pids, size)
    if not outside:
        return
    text = (
        f"rank {outside[0]} is process {pids[outside[0]]}, which has not been started with this rank, process "
        f"{os.getpid()}: two jobs have one address; give each job its own"
    )
    communicator.abort(text)
    end = time.monotonic() + _LATE_SECONDS
    if any(map(runs, late)):
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    while any(map(runs, late)) and time.monotonic() < end:
        time.sleep(0.1)
    raise InvalidParamError(text, id=1481)


def between_hosts(job: Launch, options: _core.CommunicatorOptions) -> _core.Communicator:
    """Returns the communicator of a job on several hosts, whose ranks meet at rank 0.

    Raises:
        InvalidParamError: another process of this host has rank 0's port.
    """
    if job.replacement is not None:
        take_place(job, options)
    options.job = f"hosts#{job.name}#{job.restart_count}"  # job_id may differ between hosts
    address, port = job.root()
    if job.rank == 0:
        seat.take(f"port {port}", 0, f"rank 0 of the job at {address}:{port}", options.timeout)
    return _core.hosts_communicator(options, address, port)


def make_options(domain: str, timeout: float = 600.0, check: str | None = None) -> _core.CommunicatorOptions:
    """Returns the options of a communicator without its ranks; for the arguments see `Communicator.from_env`."""
    if not (isinstance(timeout, Real) and timeout > 0):
        raise InvalidParamError(f"timeout is {timeout!r}, expected seconds above 0", id=1268)
    if check not in (None, "always", "off"):
        raise InvalidParamError(f"check is {check!r}, expected 'always' or 'off' for shared memory", id=1269)
    options = _core.CommunicatorOptions()
    options.domain, options.budget_mb = _core.parse_domain(variables.utf8("domain", domain))
    options.timeout = float(min(timeout, 1e18))  # an int may have more digits than a float
    options.check = check != "off"
    options.secret = variables.utf8("ALLTOALLV_JOB_SECRET", os.environ.get("ALLTOALLV_JOB_SECRET", ""), secret=True)
    options.path = variables.utf8("ALLTOALLV_PATH", os.environ.get("ALLTOALLV_PATH") or "auto")
    options.copy_threads = variables.integer(os.environ, "ALLTOALLV_COPY_THREADS", 0)
    options.warn_after = variables.seconds(os.environ, "ALLTOALLV_WARN_AFTER", options.warn_after)
    for name in ("ALLTOALLV_POOL", "ALLTOALLV_ALLOW_PTRACE"):  # the core reads these
        variables.switch(os.environ, name)
    variables.folder(os.environ, "ALLTOALLV_FLIGHT_DIR")
    return options
