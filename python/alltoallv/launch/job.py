"""Describes a process's place in its job, and finds the job that its own has grown into."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

from alltoallv.errors import BackendUnavailableError, InvalidParamError
from alltoallv.launch.ancestry import ranks_here
from alltoallv.launch.variables import integer, port, utf8, value_of

GROWN, GROWN_HOSTS = "grown-", "grown-hosts-"  # begin the names of jobs that `Communicator.grow` has made


@dataclass(frozen=True)
class Launch:
    """This process's place in its job.

    Attributes:
        launcher: one of alltoallv, torchrun, msrun, paddle, openmpi, pmi, rank_table, slurm, single.
        rank: 0 <= rank < size.
        size: number of ranks of the job.
        local_rank: index among the job's ranks on this host.
        job_id: equal on all ranks of a job that share a host, different between concurrent jobs.
        restart_count: how often an elastic launcher has restarted the job.
        local_size: number of the job's ranks on this host; None where the launcher does not say.
        master_addr: host of rank 0 as the launcher gives it, or "".
        master_port: port that goes with it, or 0.
        rank_table: path in RANK_TABLE_FILE, or "".
        hosts: number of hosts on which the job's ranks are; None where the launcher does not say.
        name: what the launcher calls the job on all hosts, or "".
        by_address: True where nothing but an address tells the job from another, which may have been given the same.
        replacement: how often this rank has been replaced by another process; None where lost ranks are not replaced.
        depth: how many processes above this one is the one that made it a rank.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    job_id: str
    restart_count: int = 0
    local_size: int | None = None
    master_addr: str = ""
    master_port: int = 0
    rank_table: str = ""
    hosts: int | None = None
    name: str = ""
    by_address: bool = False
    replacement: int | None = None
    depth: int = field(default=1, compare=False)

    def __post_init__(self) -> None:
        where = f"the variables of launcher {self.launcher!r}"
        for what, text in (("job id", self.job_id + self.name), ("address of rank 0", self.master_addr)):
            utf8(f"the {what} of {where}", text)
        if self.size < 1:
            raise InvalidParamError(f"{where} give world size {self.size}, expected at least 1", id=1262)
        if not 0 <= self.rank < self.size:
            raise InvalidParamError(
                f"{where} give rank {self.rank}, expected 0 <= rank < {self.size} (the world size)", id=1263
            )
        if self.local_rank < 0:
            raise InvalidParamError(f"{where} give local rank {self.local_rank}, expected at least 0", id=1264)
        if self.restart_count < 0:
            raise InvalidParamError(f"{where} give restart count {self.restart_count}, expected at least 0", id=1265)
        if self.local_size is not None and not 1 <= self.local_size <= self.size:
            raise InvalidParamError(
                f"{where} give {self.local_size} ranks on this host, expected 1 to {self.size}", id=1266
            )

    @property
    def key(self) -> str:
        """Returns the name by which ranks on one host find each other."""
        return f"{self.job_id}#{self.restart_count}"

    @property
    def several_hosts(self) -> bool:
        """True if the launcher says that the job's ranks are on more than one host."""
        return self.local_size is not None and self.local_size < self.size

    def require_one_host(self, size: int) -> None:
        """Raises BackendUnavailableError if ``size`` ranks of the job are known to be on several hosts."""
        if self.local_size is None and (self.hosts or 1) > 1:
            raise BackendUnavailableError(
                f"the job has {self.size} ranks on {self.hosts} hosts, and launcher {self.launcher!r} does not say how "
                "many are on this one: set ALLTOALLV_LOCAL_WORLD_SIZE to that number, or use Communicator.from_mpi",
                id=5030,
            )
        here, variable = self.local_size, {"pmi": "PMI_RANK", "msrun": "RANK_ID"}.get(self.launcher)
        if here is None and variable is not None:
            here = ranks_here(variable, size)
        if here is not None and here < size:
            raise BackendUnavailableError(
                f"the job has {self.size} ranks, {here} of them on this host, and shared memory needs all "
                "on one host: between hosts use backend='tcp', Communicator.from_mpi, or backend='hccl' on NPUs",
                id=5031,
            )

    def variables(self, rank: int, secret: str, replaced: int) -> dict[str, str]:
        """Returns the environment of a process that is to be a rank of this job, which is one of our own launcher.

        Args:
            secret: The job's, or "".
            replaced: How often the rank has been replaced, this process included.
        """
        local_rank = 0 if self.several_hosts else rank  # on which host the process starts is not known here
        places = {"RANK": rank, "WORLD_SIZE": self.size}
        places |= {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": self.local_size or self.size}
        variables = {name: str(value) for name, value in places.items()}
        variables |= {f"ALLTOALLV_{name}": value for name, value in variables.items()}
        if self.several_hosts:
            address, port = self.root()
            variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(port - 1), "ALLTOALLV_ROOT_PORT": str(port)}
        return variables | {
            "ALLTOALLV_JOB_ID": self.job_id.removeprefix("alltoallv:"),
            "ALLTOALLV_JOB_SECRET": secret,
            "ALLTOALLV_RESTART_COUNT": str(self.restart_count),
            "ALLTOALLV_REPLACEMENT": str(replaced),
        }

    def root(self) -> tuple[str, int]:
        """Returns host and port at which rank 0 listens for ranks of other hosts.

        The port is ``ALLTOALLV_ROOT_PORT``, or the one after the launcher's or ``MASTER_PORT``.
        """
        address = self.master_addr if self.master_port else os.environ.get("MASTER_ADDR", self.master_addr)
        near = self.master_port or integer(os.environ, "MASTER_PORT", 0)
        if not address or not (near or value_of(os.environ, "ALLTOALLV_ROOT_PORT")):
            raise BackendUnavailableError(
                f"the job has {self.size} ranks, {self.local_size} of them on this host, and launcher "
                f"{self.launcher!r} gives no address of rank 0: set MASTER_ADDR and MASTER_PORT to it, or use "
                "Communicator.from_mpi or RANK_TABLE_FILE",
                id=5032,
            )
        return address, port("ALLTOALLV_ROOT_PORT", near + 1)


def grown_job(name: str, rank: int, size: int, root: tuple[str, int] | None) -> Launch:
    """Returns a place in a job that `Communicator.grow` has made; ``root``: where rank 0 listens, on several hosts."""
    address, port = root or ("", 1)
    local_rank, local_size = (rank, size) if root is None else (0, 1)
    fields = {"local_size": local_size, "master_addr": address, "master_port": port - 1, "name": name}
    return Launch("alltoallv", rank, size, local_rank, f"alltoallv:{name}", replacement=0, **fields)  # type: ignore[arg-type]


# A process that replaces a lost rank finds the job that its own has grown into, which its launcher does not know: every
# rank of such a job holds an abstract Unix socket, until it ends, whose name, which the kernel lists, says it.


_held: dict[str, socket.socket] = {}  # by beginning of the name


def announce_growth(job: Launch, domain: str, grown: Launch) -> None:
    """Says that a job's ranks in a domain are, with others, the ranks of another job from now on."""
    withdraw_growth(job, domain)
    own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.bind(f"\0{_beginning(job, domain)}{job.rank}-{grown.size}-{grown.name}")
    own.listen(1024)  # who asks is not answered: the name says all
    _held[_beginning(job, domain)] = own


def withdraw_growth(job: Launch, domain: str) -> None:
    """Says that the ranks of a job meet in this job again."""
    if (own := _held.pop(_beginning(job, domain), None)) is not None:
        own.close()


def follow_growth(job: Launch, domain: str) -> Launch:
    """Returns the job that a job, through others perhaps, has grown into as far as this host knows; or itself."""
    beginning = f"@{_beginning(job, domain)}"
    names = ""
    with contextlib.suppress(OSError):
        names = Path("/proc/net/unix").read_text("utf-8", "replace")
    for line in names.splitlines():
        name = line.rpartition(" ")[2]
        size, _, grown = name.removeprefix(beginning).partition("-")[2].partition("-")
        if name.startswith(beginning) and size.isdecimal() and grown.startswith(GROWN) and _is_own(name):
            successor = grown_job(grown, job.rank, int(size), job.root() if grown.startswith(GROWN_HOSTS) else None)
            announce_growth(job, domain, successor)
            return follow_growth(successor, domain)
    return job


def _beginning(job: Launch, domain: str) -> str:
    text = f"{os.geteuid()}\n{job.key}\n{domain}"
    return f"alltoallv-grown-{hashlib.sha256(text.encode()).hexdigest()[:24]}-"


def _is_own(name: str) -> bool:
    """Returns whether a process of this user holds the name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking, contextlib.suppress(OSError):
        asking.setblocking(False)
        asking.connect(f"\0{name[1:]}")
        _, user, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(user) == os.geteuid()
    return False


def _forget() -> None:
    for own in _held.values():
        own.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget)
