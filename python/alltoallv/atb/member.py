"""Finds or makes the communicator that an operation's param describes."""

from __future__ import annotations

import os
import sys

from alltoallv import _core
from alltoallv.errors import BackendUnavailableError, InvalidParamError
from alltoallv.launch import detect as launch
from alltoallv.launch import hccl
from alltoallv.launch.ancestry import process_id
from alltoallv.launch.job import Launch
from alltoallv.launch.options import between_hosts, make_options, on_this_host, take_place
from alltoallv.launch.rank_table import RankTable

_connected: dict[tuple[str, str, int], _core.Communicator] = {}


def connect(param: _core.AllToAllVParam, npu: bool = False) -> _core.Communicator:
    """Returns the communicator that an `AllToAllVParam` describes: found by its domain, or made with its ranks.

    Args:
        npu: Whether the tensors are on an NPU instead of in host memory.
    """
    if param.backend not in (("hccl", "auto") if npu else ("hccl", "auto", "shm")):
        raise BackendUnavailableError(
            f"backend is {param.backend!r}, which AllToAllVOperation cannot make by itself", id=5027
        )
    options = make_options(param.comm_domain or "default", 600.0, None)
    options.rank, options.size = param.rank, param.rank_size
    options.threads = int(param.comm_mode) == int(_core.CommMode.MULTI_THREAD)
    job = launch.detect()
    if param.rank_table_file and not npu:
        _check_table(param)
    if options.threads:
        _require_threads(param, job)
        options.job = f"pid-{os.getpid()}"
    else:
        take_place(job, options)
        if job.launcher == "single":  # ranks that no launcher started, such as the children of one test
            options.job = f"parent-{process_id(os.getppid())}"
        if not npu and job.several_hosts:
            if param.backend == "shm" or param.rank_size != job.size:
                job.require_one_host(param.rank_size)
            return _kept(options, between_hosts(job, options), "/tcp")
        if not npu and job.launcher != "single":
            return _kept(options, on_this_host(job, options), "")
    core = hccl.from_param(param, options) if npu else _core.communicator(options)
    return _kept(options, core, "/hccl" * npu)


def _require_threads(param: _core.AllToAllVParam, job: Launch) -> None:
    """Raises InvalidParamError for ranks that would wait in vain for others to be threads of this process."""
    alone = param.rank_size > 1 and len(sys._current_frames()) == 1
    if alone or 1 < job.size == param.rank_size:
        why = "this process has one thread" if alone else f"launcher {job.launcher!r} made each rank a process"
        raise InvalidParamError(
            f"comm_mode is MULTI_THREAD, which means {param.rank_size} ranks that are threads of one process, but "
            f"{why}: expected MULTI_PROCESS",
            id=1203,
        )


def _check_table(param: _core.AllToAllVParam) -> None:
    table = RankTable.load(param.rank_table_file).of_size(param.rank_size)
    here = len(table.server_of(param.rank).devices)
    if here < param.rank_size:
        raise BackendUnavailableError(
            f"rank_table_file {param.rank_table_file!r} has {here} of {param.rank_size} ranks on the server of rank "
            f"{param.rank}, and in host memory an operation's ranks share a server",
            id=5028,
        )


def _kept(options: _core.CommunicatorOptions, core: _core.Communicator, transport: str) -> _core.Communicator:
    """Keeps the communicator beyond the operations that use it, as ATB does; destroy() ends it."""
    key = (options.job + transport, options.domain, options.rank)
    for other in [k for k, kept in list(_connected.items()) if k != key and not kept.usable]:
        _connected.pop(other, None)
    _connected[key] = core
    return core
