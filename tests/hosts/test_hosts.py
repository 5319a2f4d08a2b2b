"""Communicators over two and three hosts: the bits of one host, errors that name ranks, and no wait without end."""

from __future__ import annotations

import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from alltoallv.testing.hosts import Host, HostRanks, no_launcher, torchrun_environment

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module")
def hosts(two_hosts: Callable[..., AbstractContextManager[list[Host]]]) -> Iterator[list[Host]]:
    with two_hosts(count=3) as joined:
        yield joined


def lines_of(place: Sequence[Host | None], folder: Path) -> list[list[str]]:
    """What every collective gives on ranks placed so, by rank."""
    ranks = HostRanks(FOLDER / "numpy_program.py", place, "env", str(folder))
    texts = ranks.outputs()
    assert ranks.codes() == [0] * len(place), "\n".join(texts)
    return read_lines(folder, len(place))


def read_lines(folder: Path, size: int) -> list[list[str]]:
    return [(folder / f"rank{rank}.txt").read_text().splitlines() for rank in range(size)]


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return lines_of([None] * 4, tmp_path_factory.mktemp("one-host"))


def test_every_collective_has_the_bits_of_one_host(
    hosts: list[Host], one_host: list[list[str]], tmp_path: Path
) -> None:
    a, b, _ = hosts
    assert lines_of([a, a, b, b], tmp_path) == one_host
    assert len(one_host[0]) > 250


def test_ranks_in_any_place(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hosts with unequal numbers of ranks, three hosts, and ranks that do not follow each other on a host."""
    a, b, c = hosts
    expected = lines_of([None] * 5, tmp_path_factory.mktemp("one"))
    for number, place in enumerate(([a, b, b, b, b], [a, b, c, b, a])):
        assert lines_of(place, tmp_path_factory.mktemp(f"place-{number}")) == expected


def test_mpi_carries_what_goes_between_hosts(hosts: list[Host], one_host: list[list[str]], tmp_path: Path) -> None:
    """Started by mpiexec, whose launcher enters each host's network namespace."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: the session `hosts` has it")
    enter = "".join(f'{host.address}) exec nsenter --net=/run/netns/{host.name} bash -c "$*" ;;\n' for host in hosts)
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nto=$1; shift\ncase $to in\n{enter}esac\n")
    launcher.chmod(launcher.stat().st_mode | stat.S_IXUSR)
    first, where = hosts[0], ",".join(f"{host.address}:2" for host in hosts[:2])
    command = [str(Path(sys.executable).with_name("mpiexec")), "-launcher", "ssh", "-launcher-exec", str(launcher)]
    command += ["-hosts", where, "-iface", first.interface, "-n", "4"]
    command += [sys.executable, str(FOLDER / "numpy_program.py"), "mpi", str(tmp_path)]
    ended = subprocess.run(
        first.command(*command), env=no_launcher(), capture_output=True, text=True, timeout=150, check=False
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert read_lines(tmp_path, 4) == one_host


def test_a_killed_rank_is_named_on_all_within_a_second(hosts: list[Host]) -> None:
    ranks = HostRanks(FOLDER / "lost_program.py", [*hosts, hosts[0]], port=29_510)
    texts = ranks.outputs()
    for rank in (0, 1, 2):
        assert ranks.codes()[rank] == 0, texts[rank]
        assert "rank 3 was lost" in texts[rank]
        assert float(texts[rank].split("after ")[1].split()[0]) < 1.0, texts[rank]


def test_ranks_that_end_before_others_need_nothing_of_them(hosts: list[Host]) -> None:
    """Rank 0, over which rows go, destroys its communicator while others are still receiving its data."""
    ranks = HostRanks(FOLDER / "leaving_program.py", [*hosts, hosts[0]], port=29_520)
    texts = ranks.outputs()
    assert ranks.codes() == [0] * 4, "\n".join(texts)


def test_a_job_on_several_hosts_without_an_address_is_refused_at_once(hosts: list[Host]) -> None:
    env = torchrun_environment(0, 4, 2, "", 0)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        del env[name]
    code = "import alltoallv; alltoallv.Communicator.from_env()"
    begin = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert time.monotonic() - begin < 30
    assert "set MASTER_ADDR and MASTER_PORT" in ended.stderr, ended.stderr
