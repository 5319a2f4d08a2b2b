"""An msrun job on two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from alltoallv.errors import BackendUnavailableError
from alltoallv.testing.hosts import HostRanks, joined_hosts, no_launcher


def test_mint_on_two_hosts() -> None:
    def environment(rank: int) -> dict[str, str]:
        names = {"RANK_ID": str(rank), "RANK_SIZE": "4", "MS_WORKER_NUM": "4", "MS_ROLE": "MS_WORKER"}
        return (
            no_launcher()
            | names
            | {"MS_SCHED_HOST": hosts[0].address, "MS_SCHED_PORT": "8118", "ALLTOALLV_LOCAL_WORLD_SIZE": "2"}
        )

    try:
        with joined_hosts() as hosts:
            place = [host for host in hosts for _ in range(2)]
            ranks = HostRanks(Path(__file__).with_name("hosts_program.py"), place, environment=environment)
            texts = ranks.outputs()
    except BackendUnavailableError as error:
        pytest.skip(f"no two hosts on this machine: {error}")
    assert ranks.codes() == [0] * 4, "\n".join(texts)
