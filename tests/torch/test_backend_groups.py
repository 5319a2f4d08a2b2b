"""How groups of backend alltoallv come together: again on the store of before, many of them, on what devices."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from backend_groups import joined

import alltoallv.torch as at
from alltoallv.testing import Ranks
from alltoallv.torch.engines import rendezvous


def test_ranks_do_not_meet_those_of_before() -> None:
    """On a store that holds an earlier meeting, whose place a rank finds first."""
    store = dist.HashStore()

    def meet(rank: int) -> None:
        found[rank] = rendezvous.meet(store, rank, 2, "g", 30)

    keys = set()
    for first in (0, 1, 1, 0):
        found: dict[int, rendezvous.Meeting] = {}
        place = store.get("alltoallv/place").decode() if keys else ""
        old = store.get(f"alltoallv/{place}/1") if keys else b""
        thread = threading.Thread(target=meet, args=(first,))
        thread.start()
        if keys:  # until it has been to the store
            while place == store.get("alltoallv/place").decode() and old == store.get(f"alltoallv/{place}/1"):
                assert thread.is_alive()
                time.sleep(0.001)
        meet(1 - first)
        thread.join()
        assert found[0] == found[1]
        keys.add(found[0].key)
    assert len(keys) == 4


def test_meetings_that_follow_each_other(ranks: Ranks, tmp_path: Path) -> None:
    def run(rank: int, size: int, file: str) -> list[str]:
        store = dist.FileStore(file, size)
        return [rendezvous.meet(store, rank, size, "g", 30).key for _ in range(30)]

    found = ranks(3, communicator=False)(run, str(tmp_path / "store"))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 30


def test_again_on_the_store_of_before(ranks: Ranks, tmp_path: Path) -> None:
    """Groups of before are still held, and one rank comes back first."""

    def run(rank: int, size: int, file: str) -> None:
        store = dist.FileStore(file, size)
        held = []
        for i in range(4):
            dist.init_process_group("alltoallv", store=store, rank=rank, world_size=size)
            dist.all_reduce(x := torch.tensor([rank + i]))
            assert x.item() == 2 * i + 1
            group = dist.new_group([0, 1])
            dist.gather(x, [torch.empty_like(x) for _ in range(size)] if rank == 0 else None)
            dist.all_to_all_single(y := torch.empty(2), torch.tensor([10.0 * rank, 10.0 * rank + 1]), group=group)
            assert y.tolist() == [rank, 10 + rank]
            held += [dist.group.WORLD, group]
            dist.destroy_process_group()
            if rank == i % 2:
                store.wait([f"ahead/{i}"])
            else:
                store.set(f"ahead/{i}", "")

    ranks(2, communicator=False, timeout=60)(run, str(tmp_path / "store"))


@pytest.mark.parametrize("world", ["alltoallv", "gloo"])
def test_many_groups(ranks: Ranks, tmp_path: Path, world: str) -> None:
    """No group waits for another connection to the store, which takes 5 s for one of twelve."""

    def run(rank: int, size: int, file: str) -> None:
        port = dist.FileStore(file, size)
        if rank == 0:
            store = dist.TCPStore("localhost", 0, size, True, wait_for_workers=False)
            port.set("port", str(store.port))
        else:
            store = dist.TCPStore("localhost", int(port.get("port")), size, False)
        dist.init_process_group(world, store=store, rank=rank, world_size=size)
        begin = time.perf_counter()
        for i in range(26):
            group = dist.new_group([0, 1]) if i % 2 else dist.new_subgroups(1)[0]
            if world == "gloo":
                assert at.from_group(group).backend == "shm"
            dist.all_reduce(x := torch.tensor([rank]), group=group)
            assert x.item() == (1 if i % 2 else rank)
        assert time.perf_counter() - begin < 5
        dist.destroy_process_group()

    ranks(2, communicator=False, timeout=60)(run, str(tmp_path / "port"))


@pytest.mark.parametrize("backend", ["alltoallv", "cpu:alltoallv"])
def test_only_devices_that_are_there(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    """Torch puts tensors of its own on the devices that a group claims, here those of `ShardedTensor.gather`."""

    def run(rank: int, size: int, file: str) -> None:
        from torch.distributed._shard import sharded_tensor
        from torch.distributed._shard.sharding_spec import ChunkShardingSpec

        with joined(rank, size, file, backend=backend) as group:
            named = dist.BackendConfig(dist.Backend(dist.get_backend_config(group))).get_device_backend_map()
            assert list(named) == [device.type for device in group._device_types]
            assert ("cuda" in named) == (torch.cuda.is_available() and backend == "alltoallv")
            if "cuda" not in named:
                spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
                sharded = sharded_tensor.full(spec, (4, 4), float(rank))
                sharded.gather(0, whole := torch.empty(4, 4)) if rank == 0 else sharded.gather(0)
                assert rank or whole.tolist() == [[0.0] * 4] * 2 + [[1.0] * 4] * 2

    ranks(2, communicator=False)(run, str(tmp_path / "store"))
