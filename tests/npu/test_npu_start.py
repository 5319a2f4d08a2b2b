"""How communicators over HCCL come about: launchers, rank tables, several hosts; and what goes wrong then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from npu_ranks import caught, emulated, meet, memory_used, use_device
from npu_starts import exchange_works, start_as_msrun, start_with_table, write_table
from on_ranks import on_ranks

from alltoallv import Communicator, _core
from alltoallv.errors import AllToAllVError, CommTimeoutError, HcclError, PeerLostError
from alltoallv.testing import Ranks
from alltoallv_tools.ports import free_port


def test_started_by_msrun(ranks: Ranks) -> None:
    def check(rank: int, size: int, port: int) -> None:
        start_as_msrun(rank, size, port, DEVICE_ID=rank)
        # No set_device: the launcher's number of the device counts.
        with Communicator.from_env(backend="hccl", timeout=30) as comm:
            assert (comm.rank, comm.size, comm.backend) == (rank, size, "hccl")
            import torch_npu  # noqa: F401  # behind us: it finds ACL set up

            exchange_works(comm, torch.device(f"npu:{rank}"))

    ranks(4, communicator=False, fresh=True)(check, free_port())


def test_on_several_hosts_the_launchers_address_carries_root_info(ranks: Ranks) -> None:
    """Two "hosts" of two ranks each, as msrun would start them."""

    def check(rank: int, size: int, port: int) -> None:
        start_as_msrun(rank, size, port - 1, ALLTOALLV_LOCAL_WORLD_SIZE=2)
        device = use_device(rank)
        for domain in ("one", "two"):
            with Communicator.from_env(domain, backend="hccl", timeout=30) as comm:
                assert comm.core.control is not None
                assert comm.core.control.backend == "tcp"
                for _ in range(2):
                    exchange_works(comm, device)
                assert comm.stats()["agreed_operators"] == 2
                assert Communicator.from_env(domain, backend="hccl", timeout=30).core is comm.core

    # ALLTOALLV_LOCAL_WORLD_SIZE alone would be our own launcher's.
    ranks(4, communicator=False, fresh=True)(check, free_port())


@pytest.mark.parametrize(("servers", "version"), [([4], "1.0"), ([2, 2], "1.0"), ([2, 2], "1.2")])
def test_started_with_a_rank_table(ranks: Ranks, tmp_path: Path, servers: list[int], version: str) -> None:
    def check(rank: int, size: int, table: str, hosts: int) -> None:
        start_with_table(rank, table)
        device = use_device(rank)
        with Communicator.from_env(backend="hccl", timeout=30) as comm:
            assert comm.core.control is not None
            assert comm.core.control.backend == ("tcp" if hosts > 1 else "shm")
            exchange_works(comm, device)

    path = write_table(tmp_path / "table.json", servers, version)
    ranks(4, communicator=False)(check, path, len(servers))


def test_hosts_may_have_the_rank_table_at_different_paths(ranks: Ranks, tmp_path: Path) -> None:
    """HCCL's name for the communicator, which must be equal on all ranks, comes from its content."""

    def check(rank: int, size: int, tables: list[str]) -> None:
        start_with_table(rank, tables[rank])
        device = use_device(rank)
        with emulated(connect_timeout=20), Communicator.from_env(backend="hccl", timeout=30) as comm:
            assert comm.core.control is not None  # the hosts have met at once
            exchange_works(comm, device)

    for host in "ab":
        (tmp_path / host).mkdir()
    ranks(2, communicator=False)(check, [write_table(tmp_path / host / "table.json", [1, 1]) for host in "ab"])


@pytest.mark.parametrize("hosts", [1, 2])
def test_rank_0_fails_and_all_hear_why(ranks: Ranks, hosts: int) -> None:
    def check(rank: int, size: int, port: int) -> Exception:
        use_device(rank)
        if port:
            start_as_msrun(rank, size, port, ALLTOALLV_LOCAL_WORLD_SIZE=1, ALLTOALLV_ROOT_PORT=port)
        with emulated(faults="HcclGetRootInfo=fail:15"):
            return caught(lambda: Communicator.from_env(backend="hccl", timeout=20))

    errors = ranks(2, communicator=False)(check, free_port() if hosts > 1 else 0)
    for error in errors:
        assert isinstance(error, HcclError)
        for part in ("HcclGetRootInfo", "15", "HCCL_E_RUNTIME"):
            assert part in str(error)


def test_init_fails_on_one_rank(ranks: Ranks) -> None:
    def check(rank: int, size: int) -> Exception:
        use_device(rank)
        with emulated(faults="HcclCommInitRootInfoConfig=fail:24" if rank == 1 else "", connect_timeout=5):
            return caught(lambda: Communicator.from_env(backend="hccl", timeout=20))

    first, second = ranks(2, communicator=False)(check)
    assert isinstance(second, HcclError)
    assert second.code == 26  # ATB's out of device memory
    assert "HCCL_E_OOM" in str(second)
    assert "HCCL_BUFFSIZE" in str(second)
    assert isinstance(first, AllToAllVError)
    assert "rank 1" in str(first)


def test_a_rank_dies_in_init(ranks: Ranks) -> None:
    def check(rank: int, size: int) -> Exception:
        use_device(rank)
        return caught(lambda: Communicator.from_env(backend="hccl", timeout=20))

    env = {"ALLTOALLV_EMULATOR_FAULTS": "HcclCommInitRootInfoConfig@1=die"}
    outcomes = ranks(2, communicator=False, fresh=True, preloaded=False, outcomes=True, env=env)(check)
    error = outcomes[0].result
    assert isinstance(error, PeerLostError | HcclError), outcomes[0]
    assert "rank 1" in str(error)


@on_ranks(2, communicator=False)
def test_a_rank_that_does_not_come(rank: int, size: int) -> None:
    use_device(rank)
    meet()
    if rank == 0:
        with pytest.raises(CommTimeoutError, match="rank 1"):
            Communicator.from_env(backend="hccl", timeout=1.0)


def test_the_size_of_a_domains_buffer(ranks: Ranks) -> None:
    """HCCL takes twice that; where it does not fit, every rank hears which size it was."""

    def check(rank: int, size: int) -> tuple[Exception, list[str]]:
        device = use_device(rank)
        names = []
        with emulated(memory_mb=1000):
            error = caught(lambda: Communicator.from_env("large:600", backend="hccl", timeout=20))
            for name in ("small", "other"):
                before = memory_used(device)
                with Communicator.from_env(f"{name}:250", backend="hccl", timeout=20) as comm:
                    assert memory_used(device) - before == 2 * 250 << 20
                    exchange_works(comm, device)
                    names.append(_core.hccl_comm_name(comm.core))
        return error, names

    outcomes = ranks(2, communicator=False, fresh=True)(check)  # whose device holds nothing yet
    for error, names in outcomes:
        assert isinstance(error, HcclError | PeerLostError)
        assert 'MB of domain="name:MB" (now "large:600"' in str(error)
        assert names == outcomes[0][1]
        assert [name.rsplit("-", 1)[0] for name in names] == ["small", "other"]
    assert any(isinstance(error, HcclError) and error.code == 26 for error, _ in outcomes)


def test_what_hccl_makes_when_the_time_is_up_is_destroyed(ranks: Ranks) -> None:
    def check(rank: int, size: int) -> None:
        device = use_device(rank)
        meet()
        before = memory_used(device)
        # A machine under load starts ranks seconds apart, and must not sleep through what is here for a while.
        late = ";HcclCommInitRootInfoConfig=delay:5000" if rank == 1 else ""
        with emulated(faults="HcclCommDestroy=delay:5000" + late):
            with pytest.raises(
                (CommTimeoutError, PeerLostError), match=r"HcclCommInitRootInfoConfig was not done after"
            ):
                Communicator.from_env(backend="hccl", timeout=1.5)
            wait_until(lambda: memory_used(device) == before + (2 * 200 << 20))  # there it is
            wait_until(lambda: memory_used(device) == before)
        with Communicator.from_env(backend="hccl", timeout=30) as comm:
            exchange_works(comm, device)

    def wait_until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    ranks(2, communicator=False, fresh=True)(check)  # whose device holds nothing of other tests, which may yet go
