"""Two hosts: two network namespaces joined by a cable (a veth pair), two ranks in each, everything over gloo.

Needs root, and iproute2 and util-linux (``ip``, ``nsenter``); where they are missing the test is skipped and says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SECONDS = 100  # for all ranks


@dataclass
class Host:
    """A network namespace: its own interfaces, addresses and abstract sockets."""

    name: str
    interface: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.name}", *arguments]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def joined_hosts() -> Iterator[list[Host]]:
    """Two hosts on one wire; gone afterwards, whatever happens. Skips where the machine forbids them."""
    missing = [tool for tool in ("ip", "nsenter") if not shutil.which(tool)]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} (Debian, Ubuntu: apt-get install iproute2 util-linux)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    tag = f"a2av{os.getpid()}"
    hosts = [Host(f"{tag}-{i}", f"{tag[-8:]}e{i}", f"10.87.123.{i + 1}") for i in range(2)]
    with contextlib.ExitStack() as stack:
        try:
            for host in hosts:
                ip("netns", "add", host.name)
                # Takes the wire along.
                stack.callback(subprocess.run, ["ip", "netns", "delete", host.name], capture_output=True)
            a, b = hosts
            wire = ("link", "add", a.interface, "netns", a.name, "type", "veth")
            ip(*wire, "peer", "name", b.interface, "netns", b.name)
            for host in hosts:
                ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
                ip("-n", host.name, "link", "set", host.interface, "up")
                ip("-n", host.name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine forbids network namespaces: {' '.join(error.cmd)}: {error.stderr.strip()}")
        yield hosts


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def test_two_hosts(tmp_path: Path) -> None:
    """All parts of two_hosts_program.py on 2 + 2 ranks; the namespaces are gone afterwards."""
    processes: list[subprocess.Popen[bytes]] = []
    logs = [tmp_path / f"rank{rank}.log" for rank in range(4)]
    with joined_hosts() as hosts:
        try:
            for rank, log in enumerate(logs):
                host = hosts[rank // 2]
                env = {
                    **{name: value for name, value in os.environ.items() if not name.startswith("ALLTOALLV")},
                    "RANK": str(rank),
                    "WORLD_SIZE": "4",
                    "MASTER_ADDR": hosts[0].address,
                    "MASTER_PORT": "29500",
                    "GLOO_SOCKET_IFNAME": host.interface,
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]),
                }
                command = host.command(sys.executable, str(FOLDER / "two_hosts_program.py"))
                with log.open("wb") as output:
                    processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
            end = time.monotonic() + SECONDS
            while any(process.poll() is None for process in processes) and time.monotonic() < end:
                if any(process.returncode for process in processes):
                    end = min(end, time.monotonic() + 5)
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        names = {host.name for host in hosts}
    codes = [process.returncode for process in processes]
    texts = "\n".join(f"--- rank {rank}, status {codes[rank]}\n{log.read_text()}" for rank, log in enumerate(logs))
    print(texts)
    assert codes == [0] * 4, texts
    assert not names & namespaces()


def test_namespaces_are_removed_after_a_failure() -> None:
    names: set[str] = set()

    def fail() -> None:
        with joined_hosts() as hosts:
            names.update(host.name for host in hosts)
            assert names <= namespaces()
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert not names & namespaces()
