"""How groups of backend alltoallv come together: again on the store of before, many of them, on what devices."""

from __future__ import annotations

import inspect
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from backend_groups import Grouped, carrier, joined, on_group, operators
from on_ranks import on_ranks
from started import wait_for

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
        found: dict[int, rendezvous.Peers] = {}
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


@on_ranks(2, communicator=False, timeout=60)
def test_again_on_the_store_of_before(rank: int, size: int, file: str) -> None:
    """Groups of before are still held, and one rank comes back first."""
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


@pytest.mark.parametrize("world", ["alltoallv", "gloo"])
def test_many_groups(ranks: Ranks, tmp_path: Path, world: str) -> None:
    """They share at most one more connection to the store: to make one takes 5 s for one of twelve."""

    def run(rank: int, size: int, file: str) -> None:
        port = dist.FileStore(file, size)
        if rank == 0:
            store = dist.TCPStore("localhost", 0, size, True, wait_for_workers=False)
            port.set("port", str(store.port))
        else:
            store = dist.TCPStore("localhost", int(port.get("port")), size, False)
        dist.init_process_group(world, store=store, rank=rank, world_size=size)
        made, clone = [], dist.TCPStore.clone

        def connect(store: dist.TCPStore) -> dist.Store:
            made.append(store)
            return clone(store)

        with mock.patch.object(dist.TCPStore, "clone", connect):
            for i in range(26):
                group = dist.new_group([0, 1]) if i % 2 else dist.new_subgroups(1)[0]
                if world == "gloo":
                    assert at.from_group(group).backend == "shm"
                dist.all_reduce(x := torch.tensor([rank]), group=group)
                assert x.item() == (1 if i % 2 else rank)
        assert len(made) <= 1
        dist.destroy_process_group()

    ranks(2, communicator=False, timeout=60)(run, str(tmp_path / "port"))


@on_group(3)
def test_split_group(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """By torch's own function, of the default group and of another; also where there is an accelerator."""
    with mock.patch.object(torch.accelerator, "is_available", return_value=True):
        assert dist.get_world_size(dist.split_group(split_ranks=[[0], [1], [2]])) == 1
    for parent in (None, dist.new_group([2, 0, 1])):
        text = r"split_ranks is \[\[0, 1\], \[1\]\], expected lists of ranks 0 to 2"
        with pytest.raises(ValueError, match=text if rank == 1 else f"rank 1.*{text}"):
            dist.split_group(parent, [[0, 1], [1] if rank == 1 else [2]])
        for more, error, text in (
            ({"backend": "gloo"}, ValueError, "backend is 'gloo', expected None or"),
            ({"bakcend": "gloo"}, TypeError, "bakcend"),
        ):
            with pytest.raises(error, match=text):  # they were ignored
                dist.split_group(parent, [[2, 0]], **more)
        kept = {"backend": "alltoallv"} if "backend" in inspect.signature(dist.split_group).parameters else {}
        in_none = (None, dist.GroupMember.NON_GROUP_MEMBER)  # before torch 2.14, and since
        assert (dist.split_group(parent, [[0, 2]], **kept) in in_none) == (rank == 1)
        group = dist.split_group(parent, [[0, 2]], timeout=timedelta(seconds=40), group_desc="some")
        assert (group in in_none) == (rank == 1)
        if group not in in_none:
            assert dist.get_process_group_ranks(group) == [0, 2]
            assert (group.group_desc, group.timeout) == ("some", timedelta(seconds=40))
            dist.all_reduce(x := torch.tensor([rank + 1]), group=group)
            assert x.item() == 4
            dist.broadcast(x := torch.tensor([rank]), 2, group=group)
            assert x.item() == 2
            dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["alltoallv", "cpu:alltoallv"])
def test_only_devices_that_are_there(grouped: Grouped, backend: str) -> None:
    """Torch puts tensors of its own on the devices that a group claims, here the tensors of `ShardedTensor.gather`."""

    def run(rank: int, size: int, group: dist.ProcessGroup) -> None:
        from torch.distributed._shard import sharded_tensor
        from torch.distributed._shard.sharding_spec import ChunkShardingSpec

        named = dist.BackendConfig(dist.Backend(dist.get_backend_config(group))).get_device_backend_map()
        assert list(named) == [device.type for device in group._device_types]
        assert ("cuda" in named) == (torch.cuda.is_available() and backend == "alltoallv")
        if "cuda" not in named:
            spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
            sharded = sharded_tensor.full(spec, (4, 4), float(rank))
            sharded.gather(0, whole := torch.empty(4, 4)) if rank == 0 else sharded.gather(0)
            assert rank or whole.tolist() == [[0.0] * 4] * 2 + [[1.0] * 4] * 2

    grouped(2, backend=backend)(run)


@on_group(2)
def test_functions_use_the_backends_communicator(rank: int, size: int, group: dist.ProcessGroup) -> None:
    sub = dist.new_group([0, 1])
    assert at.from_group(group) is carrier(group)
    before = operators(sub), operators(group)
    out = at.all_to_all_v(torch.arange(3) + 10 * rank, [1, 2], [rank + 1] * 2, group=sub)
    assert out.tolist() == [[0, 10], [1, 2, 11, 12]][rank]
    at.all_gather_into_tensor(both := torch.empty(2).long(), torch.tensor([rank]))
    assert both.tolist() == [0, 1]
    dist.all_reduce(both, group=sub)
    assert (operators(sub), operators(group)) == (before[0] + 2, before[1] + 1)


@on_group(4)
def test_groups_of_some_ranks(rank: int, size: int, group: dist.ProcessGroup) -> None:
    for members in ([0, 1], [3, 1], [2], [0, 1, 2, 3]):
        sub = dist.new_group(members)
        x = torch.ones(3)
        if rank in members:
            dist.all_reduce(x, group=sub)
            dist.broadcast(y := torch.tensor([rank]), src=members[-1], group=sub)
            assert y.item() == members[-1]
            assert x[0].item() == len(members)
            dist.destroy_process_group(sub)
        else:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert dist.all_reduce(x, group=sub) is None
                assert at.all_gather_into_tensor(torch.empty(3), x, group=sub) is None
            assert len(caught) == 2
            assert x[0].item() == 1
    pairs, _ = dist.new_subgroups(2)
    dist.all_reduce(x := torch.tensor([rank]), group=pairs)
    assert x.item() == (1 if rank < 2 else 5)


def test_again_in_the_same_processes(ranks: Ranks, tmp_path: Path) -> None:
    """Nothing of a destroyed group is left: descriptors, mappings, threads."""

    def run(rank: int, size: int, directory: str) -> None:
        import os
        import threading

        def held() -> tuple[int, int, int]:
            with open("/proc/self/maps") as maps:
                ours = sum("alltoallv" in line for line in maps)
            return len(os.listdir("/proc/self/fd")), ours, threading.active_count()

        found = []
        for attempt in range(4):
            with joined(rank, size, f"{directory}/{attempt}"):
                sub = dist.new_group()
                dist.all_reduce(torch.ones(50_000), async_op=True).get_future().wait()
                dist.all_reduce(torch.ones(3), group=sub)
            found.append(held())
        # A thread that has ended may keep its descriptors for a moment.
        wait_for(lambda: all(now <= then for now, then in zip(held(), found[1], strict=True)), f"{found}, then no more")

    ranks(2, communicator=False)(run, str(tmp_path))
