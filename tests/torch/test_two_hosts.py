"""Two hosts (alltoallv.testing.hosts), two ranks on each, everything over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from alltoallv.testing.hosts import Host, HostRanks, gloo_environment, no_launcher

FOLDER = Path(__file__).parent
TwoHosts = Callable[..., AbstractContextManager[list[Host]]]


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines()}


def test_two_hosts(two_hosts: TwoHosts) -> None:
    """All parts of two_hosts_program.py on 2 + 2 ranks; the namespaces are gone afterwards."""
    path = os.pathsep.join(filter(None, [str(FOLDER.parent / "support"), os.environ.get("PYTHONPATH")]))
    with two_hosts() as hosts:

        def environment(rank: int) -> dict[str, str]:
            return gloo_environment(hosts, rank, 4, 29500) | {"PYTHONPATH": path}

        place = [host for host in hosts for _ in range(2)]
        ranks = HostRanks(FOLDER / "two_hosts_program.py", place, environment=environment)
        texts = "\n---\n".join(ranks.outputs(200))
        names = {host.name for host in hosts}
    assert ranks.codes() == [0] * 4, texts
    assert not names & namespaces()


@pytest.mark.slow  # half a minute
@pytest.mark.timeout(450)
def test_torchrun_on_three_hosts(two_hosts: TwoHosts, tmp_path: Path) -> None:
    """Random collectives of alltoallv.torch, with the bits of the reference, on ranks that torchrun has started."""
    program = FOLDER.parent / "hosts/cut_program.py"
    with two_hosts(count=3) as hosts:
        processes = []
        for node, host in enumerate(hosts):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3", f"--node-rank={node}"]
            command += ["--nproc-per-node=2", f"--master-addr={hosts[0].address}", "--master-port=29500"]
            command += [str(program), str(tmp_path / "at-it"), "60", "60", "torch"]
            env = no_launcher() | {"OMP_NUM_THREADS": "1"}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(subprocess.Popen(host.command(*command), env=env, **pipes))
        texts = "\n".join(process.communicate(timeout=400)[0] for process in processes)
    assert [process.returncode for process in processes] == [0] * 3, texts
    assert texts.count("60 operators, 0 wrong") == 6, texts
