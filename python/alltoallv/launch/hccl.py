"""Makes communicators over HCCL: chooses the device, and lets the ranks find each other.

The ranks agree about calls over a control plane of their own. On one host that is shared memory; between hosts it is
TCP to rank 0, which listens at the launcher's address. Where there is none, for a rank table or the caller's HcclComm,
HCCL itself carries rank 0's addresses. The control plane also carries root info.
"""

from __future__ import annotations

import os

from alltoallv import _core
from alltoallv.errors import InvalidParamError
from alltoallv.launch import detect as launch
from alltoallv.launch.job import Launch
from alltoallv.launch.rank_table import RankTable

CHECKS = ("first", "always", "off")


def from_launch(job: Launch, options: _core.CommunicatorOptions, check: str | None) -> _core.Communicator:
    """Returns the communicator of all ranks of a job; the same one again while it is usable.

    Args:
        options: Domain, budget (here the size of HCCL's buffer), timeout and job; its ranks are the ranks of ``job``.
        check: See `Communicator.from_env`.
    """
    hccl = _options(options, job.rank, job.size, job.local_rank, check)
    if job.rank_table:
        return _from_table(hccl, options, job.rank_table)
    if job.local_size in (None, job.size):
        return _core.hccl_communicator_on_host(hccl, options)
    return _core.hccl_communicator_across_hosts(hccl, options, *job.root())


def from_param(param: _core.AllToAllVParam, options: _core.CommunicatorOptions) -> _core.Communicator:
    """Returns the communicator that an ATB-shaped param describes, for tensors on an NPU."""
    hccl = _options(options, param.rank, param.rank_size, param.rank)
    hccl.comm = param.hccl_comm
    if hccl.comm:
        options.job += f"/{_core.hccl_comm_name(hccl.comm)}"
        job = launch.detect()
        # Ranks of one parent, or all ranks of this job on one host, share memory.
        if not (job.launcher == "single" or job.local_size == job.size == param.rank_size):
            return _core.hccl_communicator_across_hosts(hccl, options)
    elif param.rank_table_file:
        return _from_table(hccl, options, param.rank_table_file)
    return _core.hccl_communicator_on_host(hccl, options)


def over(control: _core.Communicator, options: _core.CommunicatorOptions) -> _core.Communicator:
    """Returns the communicator for NPU tensors of the ranks that ``control`` connects in host memory.

    They may be only some of the job's ranks.
    """
    hccl = _options(options, control.rank, control.size, launch.detect().local_rank)
    return _core.hccl_communicator(hccl, control)


def _from_table(hccl: _core.HcclOptions, options: _core.CommunicatorOptions, path: str) -> _core.Communicator:
    table = RankTable.load(path).of_size(hccl.size)
    here = table.server_of(hccl.rank)
    hccl.rank_table = os.path.realpath(path)
    if _core.npu_current_device() < 0:
        hccl.device = next(device.device for device in here.devices if device.rank == hccl.rank)
    if len(table.servers) == 1:
        return _core.hccl_communicator_on_host(hccl, options)
    options.job += f"/{table.digest}"
    return _core.hccl_communicator_across_hosts(hccl, options)


def _options(
    options: _core.CommunicatorOptions, rank: int, size: int, device: int, check: str | None = None
) -> _core.HcclOptions:
    """Returns HCCL's options; ``device`` is taken if the thread has no current one."""
    _core.cann_available()  # raises with the missing part
    if check not in (None, *CHECKS):
        raise InvalidParamError(f"check is {check!r}, expected 'first', 'always' or 'off'", id=1261)
    hccl = _core.HcclOptions()
    hccl.domain, hccl.buffer_mb, hccl.timeout = options.domain, options.budget_mb, options.timeout
    hccl.check, hccl.rank, hccl.size = check or "first", rank, size
    current = _core.npu_current_device()
    hccl.device = current if current >= 0 else device
    return hccl
