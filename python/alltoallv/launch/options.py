"""Reads what a communicator is made from: the caller's arguments, and variables of the environment."""

from __future__ import annotations

import os
from numbers import Real

from alltoallv import _core
from alltoallv.errors import InvalidParamError
from alltoallv.launch import variables
from alltoallv.launch.job import Launch


def between_hosts(job: Launch, options: _core.CommunicatorOptions) -> _core.Communicator:
    """Returns the communicator of a job on several hosts, whose ranks meet at rank 0."""
    options.job = f"hosts#{job.restart_count}"  # the launcher's names of a job may differ between hosts
    return _core.hosts_communicator(options, *job.root())


def make_options(domain: str, timeout: float = 600.0, check: str | None = None) -> _core.CommunicatorOptions:
    """Returns the options of a communicator without its ranks; for the arguments see `Communicator.from_env`."""
    if not (isinstance(timeout, Real) and timeout > 0):
        raise InvalidParamError(f"timeout is {timeout!r}, expected seconds above 0")
    if check not in (None, "always", "off"):
        raise InvalidParamError(f"check is {check!r}, expected 'always' or 'off' for shared memory")
    options = _core.CommunicatorOptions()
    options.domain, options.budget_mb = _core.parse_domain(variables.utf8("domain", domain))
    options.timeout = float(min(timeout, 1e18))  # an int may have more digits than a float
    options.check = check != "off"
    options.secret = variables.utf8("ALLTOALLV_JOB_SECRET", os.environ.get("ALLTOALLV_JOB_SECRET", ""), secret=True)
    options.path = variables.utf8("ALLTOALLV_PATH", os.environ.get("ALLTOALLV_PATH", "auto"))
    options.copy_threads = variables.integer(os.environ, "ALLTOALLV_COPY_THREADS", 0)
    options.warn_after = variables.seconds(os.environ, "ALLTOALLV_WARN_AFTER", options.warn_after)
    for name in ("ALLTOALLV_POOL", "ALLTOALLV_ALLOW_PTRACE"):  # the core reads these
        variables.switch(os.environ, name)
    variables.folder(os.environ, "ALLTOALLV_FLIGHT_DIR")
    return options
