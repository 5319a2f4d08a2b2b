"""An msrun job on two hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from alltoallv.testing.hosts import Host, HostRanks, no_launcher


def test_mint_on_two_hosts(two_hosts: Callable[[], AbstractContextManager[list[Host]]]) -> None:
    with two_hosts() as hosts:

        def environment(rank: int) -> dict[str, str]:
            names = {"RANK_ID": str(rank), "RANK_SIZE": "4", "MS_WORKER_NUM": "4", "MS_ROLE": "MS_WORKER"}
            address = {"MS_SCHED_HOST": hosts[0].address, "MS_SCHED_PORT": "8118"}
            return no_launcher() | names | address | {"ALLTOALLV_LOCAL_WORLD_SIZE": "2"}

        place = [host for host in hosts for _ in range(2)]
        ranks = HostRanks(Path(__file__).with_name("hosts_program.py"), place, environment=environment)
        texts = ranks.outputs()
    assert ranks.codes() == [0] * 4, "\n".join(texts)


@pytest.mark.slow  # a minute
@pytest.mark.timeout(450)
def test_msrun_on_three_hosts(two_hosts: Callable[..., AbstractContextManager[list[Host]]], tmp_path: Path) -> None:
    """Random collectives of alltoallv.mindspore, with the bits of the reference, on ranks that msrun has started."""
    program = Path(__file__).parent.parent / "hosts/cut_program.py"
    with two_hosts(count=3) as hosts:
        processes = []
        for node, host in enumerate(hosts):
            command = [str(Path(sys.executable).with_name("msrun")), "--worker_num=6", "--local_worker_num=2"]
            command += [f"--master_addr={hosts[0].address}", "--master_port=8118", f"--node_rank={node}", "--join=True"]
            command += [f"--log_dir={tmp_path / str(node)}"]
            command += [str(program), str(tmp_path / "at-it"), "60", "60", "mindspore"]
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # msrun starts "python"
            processes.append(subprocess.Popen(host.command(*command), env=no_launcher() | {"PATH": path}))
        for process in processes:
            process.wait(400)
    texts = "\n".join(log.read_text() for log in sorted(tmp_path.glob("*/worker_*.log")))
    assert [process.returncode for process in processes] == [0] * 3, texts
    assert texts.count("60 operators, 0 wrong") == 6, texts
