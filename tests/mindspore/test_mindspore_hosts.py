"""An msrun job on two hosts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

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
