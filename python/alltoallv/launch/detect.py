"""Finds out which launcher started this process, and which rank of which job it is.

Launchers may be nested: the variables that the nearest process has set decide, this process's own first
(`ancestry.setter`). Where one process has set several launchers' variables, as ``python -m alltoallv run`` does, the
first of these decides:

1. our own: ``ALLTOALLV_RANK``, ``ALLTOALLV_WORLD_SIZE``, ``ALLTOALLV_JOB_ID``, and optionally
   ``ALLTOALLV_LOCAL_RANK``, ``ALLTOALLV_LOCAL_WORLD_SIZE``, ``ALLTOALLV_RESTART_COUNT``
   (``python -m alltoallv run`` sets them all);
2. torchrun and whatever else sets ``RANK`` and ``WORLD_SIZE``;
3. msrun: ``RANK_ID`` with ``RANK_SIZE`` or ``MS_WORKER_NUM``;
4. ``paddle.distributed.launch``: ``PADDLE_TRAINER_ID``, ``PADDLE_TRAINERS_NUM``;
5. Open MPI: ``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_SIZE``;
6. MPICH, Intel MPI and other users of PMI: ``PMI_RANK``, ``PMI_SIZE``;
7. a rank table: ``RANK_TABLE_FILE`` with ``RANK_ID`` or, for one server, ``DEVICE_ID``;
8. Slurm's srun: ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS``, ``SLURM_STEP_ID``;
9. none: rank 0 of 1.

A launcher that replaces lost ranks also sets ``ALLTOALLV_REPLACEMENT``, whichever it is.

Variables that are malformed, incomplete or contradict each other raise InvalidParamError.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from alltoallv.errors import InvalidParamError
from alltoallv.launch import ancestry
from alltoallv.launch.ancestry import Setter, pid_namespace, process_id
from alltoallv.launch.job import GROWN, GROWN_HOSTS, Launch
from alltoallv.launch.rank_table import RankTable
from alltoallv.launch.variables import Environ, integer, optional, required, value_of

BY_ADDRESS = "tcp:"  # begins an ALLTOALLV_JOB_ID that is an address
_LOCAL_SIZE = "ALLTOALLV_LOCAL_WORLD_SIZE"
_REPLACEMENT = "ALLTOALLV_REPLACEMENT"


class _Kind(NamedTuple):
    """A launcher.

    Attributes:
        read: Returns what its variables say; None if they are not all there.
        signs: The variables of which one tells that it was there.
        names: The variables by which one of its jobs differs from another, rank and size first.
        more: Others, which only some of those who set ``names`` set too.
        alone: Others that are also alone, and that the same process has set, must say the same.
    """

    read: Callable[[Environ, Setter], Launch | None]
    signs: tuple[str, ...]
    names: tuple[str, ...]
    more: tuple[str, ...] = ()
    alone: bool = False


def detect(environ: Environ | None = None) -> Launch:
    """Reads the launcher's variables from ``environ`` (default: ``os.environ``)."""
    env = os.environ if environ is None else environ
    nowhere = Setter(None, math.inf, {})
    present = [kind for kind in _KINDS if any(value_of(env, name) is not None for name in kind.signs)]
    by = {kind: nowhere if environ is not None else ancestry.setter(env, kind.names) for kind in present}
    chosen: tuple[_Kind, Launch] | None = None
    for kind in sorted(present, key=lambda kind: by[kind].distance):  # stable
        if chosen is None:
            seen = _without_outer(env, kind, by[kind])
            launch = kind.read(seen, by[kind])
            replaced = optional(seen, _REPLACEMENT)
            if launch is not None and replaced is not None:
                launch = replace(launch, replacement=replaced)
            chosen = None if launch is None else (kind, launch)
        elif by[chosen[0]].distance == by[kind].distance and chosen[0].alone and kind.alone:
            _compare(env, *chosen, kind, by[kind])
    if chosen is not None:
        return replace(chosen[1], rank_table=_table(env), depth=by[chosen[0]].depth)
    for size, rank in (("WORLD_SIZE", "RANK"), ("RANK_SIZE", "RANK_ID")):
        if integer(env, size, 1) > 1:
            raise InvalidParamError(f"{size} is {env[size]!r} but {rank} is not set: expected both or neither", id=1245)
    return Launch("single", 0, 1, 0, f"single:{process_id(os.getpid())}", local_size=1, rank_table=_table(env))


def depth_of_torch() -> int:
    """Returns how many processes above this one the one is that gave it torch's variables; 1 if there are none."""
    return ancestry.setter(os.environ, _TORCHRUN.names).depth if _TORCHRUN.signs[0] in os.environ else 1


def _without_outer(env: Environ, kind: _Kind, by: Setter) -> Environ:
    """Leaves out what an outer job has set, where the inner launcher did not set it anew."""
    outer = by.before
    stale = {name for name in kind.more if kind.names[0] in outer and env.get(name) == outer.get(name)}
    if kind is not _OWN and _OWN.names[0] in env:
        stale |= {*_OWN.names, *_OWN.more}
    return {name: value for name, value in env.items() if name not in stale} if stale else env


def _compare(env: Environ, kind: _Kind, launch: Launch, other: _Kind, by: Setter) -> None:
    """Raises InvalidParamError if another launcher's variables, of the same process, say different things."""
    try:
        said = other.read(env, by)
    except InvalidParamError:  # they are not complete, and say nothing
        return
    if said is None or (said.rank, said.size) == (launch.rank, launch.size):
        return
    what = 0 if said.rank != launch.rank else 1
    a, b = ((name := next(n for n in k.names[what:] if n in env), env[name]) for k in (kind, other))
    raise InvalidParamError(
        f"{a[0]} is {a[1]!r} but {b[0]} is {b[1]!r}: the variables of {launch.launcher} and {said.launcher} "
        "contradict each other; set only the variables of one launcher",
        id=1246,
    )


def _rank_and_size(env: Environ, rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = required(env, rank_name), required(env, size_name)
    least = 1
    if size < least:
        raise InvalidParamError(f"{size_name} is {size}, expected at least {least}", id=1079)
    if rank >= size:
        raise InvalidParamError(
            f"{rank_name} is {env[rank_name]!r}, expected less than {size_name}, which is {size}", id=1248
        )
    return rank, size


def _identity(launcher: str, address: str, by: Setter) -> tuple[str, bool]:
    """Returns what tells the job from others on this host, and whether that is but an address."""
    if address and not by.is_launcher:
        return f"{launcher}:{address}", True
    return f"{launcher}:{address} by {by}" if address else f"{launcher}:{by}", False


def _own(env: Environ, by: Setter) -> Launch | None:
    rank, size = _rank_and_size(env, "ALLTOALLV_RANK", "ALLTOALLV_WORLD_SIZE")
    job = value_of(env, "ALLTOALLV_JOB_ID")
    if job is None:
        raise InvalidParamError(
            "ALLTOALLV_RANK is set but ALLTOALLV_JOB_ID is not: expected a text that is equal on all ranks "
            "of this job and different from every other job's",
            id=1249,
        )
    local_rank, restarts = integer(env, "ALLTOALLV_LOCAL_RANK", rank), integer(env, "ALLTOALLV_RESTART_COUNT", 0)
    local_size, root = optional(env, _LOCAL_SIZE), (env.get("MASTER_ADDR", ""), integer(env, "MASTER_PORT", 0))
    grown = job.startswith(GROWN)
    if grown:  # whoever started this process may have had the same numbers
        local_size = 1 if job.startswith(GROWN_HOSTS) else size
    return Launch(
        "alltoallv",
        rank,
        size,
        local_rank,
        f"alltoallv:{job}",
        restarts,
        local_size,
        *root,
        name=job if grown else "",
        by_address=job.startswith(BY_ADDRESS),
        replacement=0 if grown else None,
    )


def _torchrun(env: Environ, by: Setter) -> Launch | None:
    rank, size = _rank_and_size(env, "RANK", "WORLD_SIZE")
    address, port = env.get("MASTER_ADDR", ""), integer(env, "MASTER_PORT", 0)
    run = env.get("TORCHELASTIC_RUN_ID", "")
    job_id, by_address = _identity("torchrun", f"{run}@{address}:{port}" if run or (address and port) else "", by)
    if run and math.isfinite(by.distance):  # its agent starts all ranks of a host
        job_id, by_address = f"{job_id} by {by}", False
    return Launch(
        "torchrun",
        rank,
        size,
        integer(env, "LOCAL_RANK", rank),
        restart_count=integer(env, "TORCHELASTIC_RESTART_COUNT", 0),
        local_size=optional(env, "LOCAL_WORLD_SIZE"),
        master_addr=address,
        master_port=port,
        name=run,
        job_id=job_id,
        by_address=by_address,
    )


def _msrun(env: Environ, by: Setter) -> Launch | None:
    if env.get("MS_ROLE") == "MS_SCHED":
        raise InvalidParamError(
            "MS_ROLE is 'MS_SCHED': msrun's scheduler process has no rank, expected 'MS_WORKER'", id=1250
        )
    cluster = "MS_WORKER_NUM" in env or env.get("MS_ROLE") == "MS_WORKER"
    if not cluster and ("RANK_ID" not in env or "RANK_TABLE_FILE" in env):
        return None
    required(env, "RANK_ID")
    sizes = {name: integer(env, name, 0) for name in ("RANK_SIZE", "MS_WORKER_NUM") if name in env}
    if not sizes:
        raise InvalidParamError(
            f"RANK_ID is {env['RANK_ID']!r} but neither RANK_SIZE nor MS_WORKER_NUM is set", id=1251
        )
    if len(set(sizes.values())) > 1:
        raise InvalidParamError(
            f"RANK_SIZE is {env['RANK_SIZE']!r} but MS_WORKER_NUM is {env['MS_WORKER_NUM']!r}: expected equal values",
            id=1252,
        )
    rank, size = _rank_and_size(env, "RANK_ID", next(iter(sizes)))
    address, port = env.get("MS_SCHED_HOST", ""), integer(env, "MS_SCHED_PORT", 0)
    job_id, by_address = _identity("msrun", f"{address}:{port}" if port else "", by)
    return Launch(
        "msrun",
        rank,
        size,
        integer(env, "DEVICE_ID", rank),
        local_size=optional(env, _LOCAL_SIZE) or ancestry.number_of(by.process, "--local_worker_num"),
        master_addr=address,
        master_port=port,
        job_id=job_id,
        by_address=by_address,
    )


def _paddle(env: Environ, by: Setter) -> Launch | None:
    rank, size = _rank_and_size(env, "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")
    endpoints = [e for e in env.get("PADDLE_TRAINER_ENDPOINTS", "").split(",") if e]
    if endpoints and len(endpoints) != size:
        raise InvalidParamError(
            f"PADDLE_TRAINER_ENDPOINTS lists {len(endpoints)} endpoints, expected {size}, PADDLE_TRAINERS_NUM", id=1253
        )
    root = env.get("PADDLE_MASTER") or (endpoints[0] if endpoints else "")
    address, _, port = root.rpartition(":")
    job_id, by_address = _identity("paddle", root, by)
    return Launch(
        "paddle",
        rank,
        size,
        integer(env, "PADDLE_LOCAL_RANK", integer(env, "PADDLE_RANK_IN_NODE", rank)),
        local_size=optional(env, "PADDLE_LOCAL_SIZE"),
        master_addr=address,
        master_port=int(port) if port.isdecimal() else 0,
        job_id=job_id,
        by_address=by_address,
    )


def _openmpi(env: Environ, by: Setter) -> Launch | None:
    rank, size = _rank_and_size(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    # Both names hold the pid of mpirun, so they need that pid's namespace to be unique between containers.
    name = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or ""
    job = f"openmpi:{name or by}:{pid_namespace()}"
    local_rank = integer(env, "OMPI_COMM_WORLD_LOCAL_RANK", rank)
    local_size = optional(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return Launch("openmpi", rank, size, local_rank, job, local_size=local_size, name=name)


def _pmi(env: Environ, by: Setter) -> Launch | None:
    if "PMI_RANK" not in env and "PMI_SIZE" not in env:
        if "PMI_PORT" in env and "PMI_ID" in env:
            raise InvalidParamError(
                f"PMI_ID is {env['PMI_ID']!r} but PMI_SIZE is not set, so the world size is unknown: "
                "start mpiexec without -pmi-port",
                id=1254,
            )
        return None
    rank, size = _rank_and_size(env, "PMI_RANK", "PMI_SIZE")
    by_slurm = {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size}  # the ranks, not Hydra's proxies, one per host
    slurm = all(integer(env, name, -1) == value for name, value in by_slurm.items()) and "SLURM_STEP_ID" in env
    local_rank = optional(env, "MPI_LOCALRANKID", "PMI_LOCAL_RANK", *["SLURM_LOCALID"] * slurm)
    # Hydra gives its ranks no job id (Intel MPI's does); the proxy that starts them on this host is one.
    name = env.get("I_MPI_HYDRA_UUID", "")
    return Launch(
        "pmi",
        rank,
        size,
        rank if local_rank is None else local_rank,
        f"pmi:{name or by}",
        local_size=optional(env, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", _LOCAL_SIZE)
        or (_tasks_here(env) if slurm else None),
        hosts=optional(env, "SLURM_STEP_NUM_NODES") if slurm else None,
        name=name,
    )


def _rank_table(env: Environ, by: Setter) -> Launch | None:
    path = _table(env)
    if not path:
        return None
    table = RankTable.load(path)
    if "RANK_ID" in env:
        rank = required(env, "RANK_ID")
        if rank >= table.size:
            raise InvalidParamError(
                f"RANK_ID is {rank}, expected less than {table.size}, the ranks in {path!r}", id=1255
            )
    else:
        device = required(env, "DEVICE_ID")
        if len(table.servers) > 1:
            raise InvalidParamError(
                f"RANK_ID is not set, but {path!r} lists {len(table.servers)} servers: set RANK_ID", id=1256
            )
        ranks = [d.rank for d in table.servers[0].devices if d.device == device]
        if not ranks:
            raise InvalidParamError(
                f"DEVICE_ID is {device}, which {path!r} does not list; set RANK_ID or correct it", id=1257
            )
        rank = ranks[0]
    if "RANK_SIZE" in env and required(env, "RANK_SIZE") != table.size:
        raise InvalidParamError(
            f"RANK_SIZE is {env['RANK_SIZE']!r}, expected {table.size}, the ranks in {path!r}", id=1258
        )
    server = table.server_of(rank)
    local = [d.rank for d in server.devices]
    where = os.path.realpath(path) if len(table.servers) == 1 else "hosts"  # several hosts may have other paths
    job_id, by_address = _identity("rank_table", f"{where}:{table.digest}", by)
    return Launch(
        "rank_table",
        rank,
        table.size,
        local.index(rank),
        local_size=len(local),
        master_addr=table.server_of(0).server_id,
        job_id=job_id,
        by_address=by_address,
    )


def _slurm(env: Environ, by: Setter) -> Launch | None:
    # A batch script itself has SLURM_PROCID too; only srun's tasks have a step with a number of tasks.
    if any(name not in env for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID")):
        return None
    rank, size = _rank_and_size(env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    name = f"{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"
    return Launch(
        "slurm",
        rank,
        size,
        integer(env, "SLURM_LOCALID", rank),
        f"slurm:{name}",
        local_size=optional(env, _LOCAL_SIZE) or _tasks_here(env),
        master_addr=env.get("SLURM_LAUNCH_NODE_IPADDR", ""),
        hosts=optional(env, "SLURM_STEP_NUM_NODES"),
        name=name,
    )


def _tasks_here(env: Environ) -> int | None:
    """Returns how many of a Slurm step's tasks are on this host; None if Slurm does not say."""
    if "SLURM_STEP_TASKS_PER_NODE" not in env or "SLURM_NODEID" not in env:
        return required(env, "SLURM_STEP_NUM_TASKS") if integer(env, "SLURM_STEP_NUM_NODES", 0) == 1 else None
    text, node, counts = env["SLURM_STEP_TASKS_PER_NODE"], integer(env, "SLURM_NODEID", 0), list[int]()
    for part in text.split(","):  # counts host by host, "4(x2),3" for 4, 4 and 3
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip(), re.ASCII)
        if match is None:
            raise InvalidParamError(
                f"SLURM_STEP_TASKS_PER_NODE is {text!r}, expected counts of tasks like '4(x2),3'", id=1259
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise InvalidParamError(
            f"SLURM_NODEID is {node}, expected less than {len(counts)}, the hosts of {text!r}", id=1260
        )
    return counts[node]


_OWN = _Kind(
    _own,
    ("ALLTOALLV_RANK", "ALLTOALLV_WORLD_SIZE"),
    ("ALLTOALLV_RANK", "ALLTOALLV_WORLD_SIZE", "ALLTOALLV_JOB_ID"),
    ("ALLTOALLV_LOCAL_RANK", _LOCAL_SIZE, "ALLTOALLV_RESTART_COUNT", _REPLACEMENT),
    alone=True,
)
_TORCHRUN = _Kind(
    _torchrun,
    ("RANK",),  # WORLD_SIZE alone is common in job scripts whose ranks come from srun or mpirun
    ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    alone=True,
)
_KINDS = (
    _OWN,
    _TORCHRUN,
    _Kind(
        _msrun,
        ("RANK_ID", "MS_WORKER_NUM", "MS_ROLE"),
        ("RANK_ID", "RANK_SIZE", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT"),
        alone=True,
    ),
    _Kind(
        _paddle,
        ("PADDLE_TRAINER_ID",),
        ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS"),
        alone=True,
    ),
    _Kind(
        _openmpi,
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"),
    ),
    _Kind(_pmi, ("PMI_RANK", "PMI_SIZE", "PMI_ID"), ("PMI_RANK", "PMI_SIZE", "I_MPI_HYDRA_UUID")),
    _Kind(_rank_table, ("RANK_ID", "DEVICE_ID"), ("RANK_ID", "DEVICE_ID", "RANK_TABLE_FILE")),
    _Kind(
        _slurm,
        ("SLURM_PROCID",),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)


def _table(env: Environ) -> str:
    return env.get("RANK_TABLE_FILE", "")
