"""Finds out which launcher started this process, and which rank of which job it is.

The first of these whose variables are present decides, even if others are present too. A launcher that tends
to be started by another one comes first, so that ``srun`` may start one ``torchrun`` per node:

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

Variables that are malformed, incomplete or contradict each other raise InvalidParamError.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from alltoallv.errors import InvalidParamError
from alltoallv.launch.job import Launch
from alltoallv.launch.processes import launcher_number, launcher_process, pid_namespace, process_id
from alltoallv.launch.rank_table import RankTable
from alltoallv.launch.variables import Environ, integer, optional, required

_LOCAL_SIZE = "ALLTOALLV_LOCAL_WORLD_SIZE"


def detect(environ: Environ | None = None) -> Launch:
    """Reads the launcher's variables from ``environ`` (default: ``os.environ``)."""
    env = os.environ if environ is None else environ
    for read in _READERS:
        launch = read(env)
        if launch is not None:
            return replace(launch, rank_table=_table(env))
    for size, rank in (("WORLD_SIZE", "RANK"), ("RANK_SIZE", "RANK_ID")):
        if integer(env, size, 1) > 1:
            raise InvalidParamError(f"{size} is {env[size]!r} but {rank} is not set: expected both or neither")
    return Launch("single", 0, 1, 0, f"single:{process_id(os.getpid())}", local_size=1, rank_table=_table(env))


def _own(env: Environ) -> Launch | None:
    if "ALLTOALLV_RANK" not in env and "ALLTOALLV_WORLD_SIZE" not in env:
        return None
    rank, size = required(env, "ALLTOALLV_RANK"), required(env, "ALLTOALLV_WORLD_SIZE")
    job = env.get("ALLTOALLV_JOB_ID", "")
    if not job:
        raise InvalidParamError(
            "ALLTOALLV_RANK is set but ALLTOALLV_JOB_ID is not: expected a text that is equal on all ranks "
            "of this job and different from every other job's"
        )
    local_rank, restarts = integer(env, "ALLTOALLV_LOCAL_RANK", rank), integer(env, "ALLTOALLV_RESTART_COUNT", 0)
    local_size, root = optional(env, _LOCAL_SIZE), (env.get("MASTER_ADDR", ""), integer(env, "MASTER_PORT", 0))
    return Launch("alltoallv", rank, size, local_rank, f"alltoallv:{job}", restarts, local_size, *root)


def _torchrun(env: Environ) -> Launch | None:
    if "RANK" not in env:  # WORLD_SIZE alone is common in job scripts whose ranks come from srun or mpirun
        return None
    rank, size = required(env, "RANK"), required(env, "WORLD_SIZE")
    address, port = env.get("MASTER_ADDR", ""), integer(env, "MASTER_PORT", 0)
    run = env.get("TORCHELASTIC_RUN_ID", "")
    job = f"{run}@{address}:{port}" if run or (address and port) else launcher_process("RANK")
    local_rank, restarts = integer(env, "LOCAL_RANK", rank), integer(env, "TORCHELASTIC_RESTART_COUNT", 0)
    local_size = optional(env, "LOCAL_WORLD_SIZE")
    return Launch("torchrun", rank, size, local_rank, f"torchrun:{job}", restarts, local_size, address, port)


def _msrun(env: Environ) -> Launch | None:
    if env.get("MS_ROLE") == "MS_SCHED":
        raise InvalidParamError("MS_ROLE is 'MS_SCHED': msrun's scheduler process has no rank, expected 'MS_WORKER'")
    cluster = "MS_WORKER_NUM" in env or env.get("MS_ROLE") == "MS_WORKER"
    if not cluster and ("RANK_ID" not in env or "RANK_TABLE_FILE" in env):
        return None
    rank = required(env, "RANK_ID")
    sizes = {name: integer(env, name, 0) for name in ("RANK_SIZE", "MS_WORKER_NUM") if name in env}
    if not sizes:
        raise InvalidParamError(f"RANK_ID is {env['RANK_ID']!r} but neither RANK_SIZE nor MS_WORKER_NUM is set")
    if len(set(sizes.values())) > 1:
        raise InvalidParamError(
            f"RANK_SIZE is {env['RANK_SIZE']!r} but MS_WORKER_NUM is {env['MS_WORKER_NUM']!r}: expected equal values"
        )
    address, port = env.get("MS_SCHED_HOST", ""), integer(env, "MS_SCHED_PORT", 0)
    return Launch(
        "msrun",
        rank,
        next(iter(sizes.values())),
        integer(env, "DEVICE_ID", rank),
        f"msrun:{address}:{port}" if port else f"msrun:{launcher_process('RANK_ID')}",
        local_size=optional(env, _LOCAL_SIZE) or launcher_number("RANK_ID", "--local_worker_num"),
        master_addr=address,
        master_port=port,
    )


def _paddle(env: Environ) -> Launch | None:
    if "PADDLE_TRAINER_ID" not in env:
        return None
    rank, size = required(env, "PADDLE_TRAINER_ID"), required(env, "PADDLE_TRAINERS_NUM")
    endpoints = [e for e in env.get("PADDLE_TRAINER_ENDPOINTS", "").split(",") if e]
    if endpoints and len(endpoints) != size:
        raise InvalidParamError(
            f"PADDLE_TRAINER_ENDPOINTS lists {len(endpoints)} endpoints, expected {size}, PADDLE_TRAINERS_NUM"
        )
    root = env.get("PADDLE_MASTER") or (endpoints[0] if endpoints else "")
    address, _, port = root.rpartition(":")
    return Launch(
        "paddle",
        rank,
        size,
        integer(env, "PADDLE_LOCAL_RANK", integer(env, "PADDLE_RANK_IN_NODE", rank)),
        f"paddle:{root}" if root else f"paddle:{launcher_process('PADDLE_TRAINER_ID')}",
        local_size=optional(env, "PADDLE_LOCAL_SIZE"),
        master_addr=address,
        master_port=int(port) if port.isdecimal() else 0,
    )


def _openmpi(env: Environ) -> Launch | None:
    if "OMPI_COMM_WORLD_RANK" not in env and "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    rank, size = required(env, "OMPI_COMM_WORLD_RANK"), required(env, "OMPI_COMM_WORLD_SIZE")
    # Both names hold the pid of mpirun, so they need that pid's namespace to be unique between containers.
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or launcher_process("OMPI_COMM_WORLD_RANK")
    local_rank = integer(env, "OMPI_COMM_WORLD_LOCAL_RANK", rank)
    local_size = optional(env, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return Launch("openmpi", rank, size, local_rank, f"openmpi:{job}:{pid_namespace()}", local_size=local_size)


def _pmi(env: Environ) -> Launch | None:
    if "PMI_RANK" not in env and "PMI_SIZE" not in env:
        if "PMI_PORT" in env and "PMI_ID" in env:
            raise InvalidParamError(
                f"PMI_ID is {env['PMI_ID']!r} but PMI_SIZE is not set, so the world size is unknown: "
                "start mpiexec without -pmi-port"
            )
        return None
    rank, size = required(env, "PMI_RANK"), required(env, "PMI_SIZE")
    by_slurm = {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": size}  # the ranks, not Hydra's proxies, one per host
    slurm = all(integer(env, name, -1) == value for name, value in by_slurm.items()) and "SLURM_STEP_ID" in env
    local_rank = optional(env, "MPI_LOCALRANKID", "PMI_LOCAL_RANK", *["SLURM_LOCALID"] * slurm)
    # Hydra gives its ranks no job id (Intel MPI's does); the proxy that starts them on this host is one.
    job = env.get("I_MPI_HYDRA_UUID") or launcher_process("PMI_RANK")
    return Launch(
        "pmi",
        rank,
        size,
        rank if local_rank is None else local_rank,
        f"pmi:{job}",
        local_size=optional(env, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", _LOCAL_SIZE)
        or (_tasks_here(env) if slurm else None),
        hosts=optional(env, "SLURM_STEP_NUM_NODES") if slurm else None,
    )


def _rank_table(env: Environ) -> Launch | None:
    path = _table(env)
    if not path or ("RANK_ID" not in env and "DEVICE_ID" not in env):
        return None
    table = RankTable.load(path)
    if "RANK_ID" in env:
        rank = required(env, "RANK_ID")
        if rank >= table.size:
            raise InvalidParamError(f"RANK_ID is {rank}, expected less than {table.size}, the ranks in {path!r}")
    else:
        device = required(env, "DEVICE_ID")
        if len(table.servers) > 1:
            raise InvalidParamError(f"RANK_ID is not set, but {path!r} lists {len(table.servers)} servers: set RANK_ID")
        found = [d.rank for d in table.servers[0].devices if d.device == device]
        if not found:
            raise InvalidParamError(f"DEVICE_ID is {device}, which {path!r} does not list; set RANK_ID or correct it")
        rank = found[0]
    if "RANK_SIZE" in env and required(env, "RANK_SIZE") != table.size:
        raise InvalidParamError(f"RANK_SIZE is {env['RANK_SIZE']!r}, expected {table.size}, the ranks in {path!r}")
    server = table.server_of(rank)
    local = [d.rank for d in server.devices]
    where = os.path.realpath(path) if len(table.servers) == 1 else "hosts"  # several hosts may have other paths
    return Launch(
        "rank_table",
        rank,
        table.size,
        local.index(rank),
        f"rank_table:{where}:{table.digest}",
        local_size=len(local),
        master_addr=table.server_of(0).server_id,
    )


def _slurm(env: Environ) -> Launch | None:
    # A batch script itself has SLURM_PROCID too; only srun's tasks have a step with a number of tasks.
    if any(name not in env for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID")):
        return None
    rank = required(env, "SLURM_PROCID")
    return Launch(
        "slurm",
        rank,
        required(env, "SLURM_STEP_NUM_TASKS"),
        integer(env, "SLURM_LOCALID", rank),
        f"slurm:{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}",
        local_size=optional(env, _LOCAL_SIZE) or _tasks_here(env),
        master_addr=env.get("SLURM_LAUNCH_NODE_IPADDR", ""),
        hosts=optional(env, "SLURM_STEP_NUM_NODES"),
    )


def _tasks_here(env: Environ) -> int | None:
    """Returns how many of a Slurm step's tasks are on this host; None if Slurm does not say."""
    if "SLURM_STEP_TASKS_PER_NODE" not in env or "SLURM_NODEID" not in env:
        return required(env, "SLURM_STEP_NUM_TASKS") if integer(env, "SLURM_STEP_NUM_NODES", 0) == 1 else None
    text, node, counts = env["SLURM_STEP_TASKS_PER_NODE"], integer(env, "SLURM_NODEID", 0), list[int]()
    for part in text.split(","):  # counts host by host, "4(x2),3" for 4, 4 and 3
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip(), re.ASCII)
        if found is None:
            raise InvalidParamError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}, expected counts of tasks like '4(x2),3'")
        counts += [int(found[1])] * int(found[2] or 1)
    if node >= len(counts):
        raise InvalidParamError(f"SLURM_NODEID is {node}, expected less than {len(counts)}, the hosts of {text!r}")
    return counts[node]


_READERS = (_own, _torchrun, _msrun, _paddle, _openmpi, _pmi, _rank_table, _slurm)


def _table(env: Environ) -> str:
    return env.get("RANK_TABLE_FILE", "")
