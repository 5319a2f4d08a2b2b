"""Several communicators and domains at once in one process, each on its own."""

from __future__ import annotations

import gc
import random
import threading
from contextlib import nullcontext

import numpy as np
import pytest
from on_ranks import on_both, on_ranks
from scarcity import no_more_memory
from trouble import attempt, check_works, join, on_threads

import alltoallv
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, ResourceError
from alltoallv.memory import is_shared
from alltoallv.numpy import all_reduce, all_to_all_v, barrier

MB = 1 << 20


@on_ranks(3, communicator=False)
def test_domains_interleaved_in_different_order(rank, size):
    """A thread a domain on every rank, with operators that the other domains' threads overtake."""
    comms = [join(rank, size, domain=f"domain-{k}") for k in range(4)]

    def use(k: int) -> None:
        comm, rng = comms[k], random.Random(100 * k + rank)
        for step in range(60):
            if rng.random() < 0.2:
                threading.Event().wait(rng.random() / 500)
            n = 1 + (7 * step + k) % 900
            x = np.full(n * size, 1000 * k + step + rank)
            y = all_to_all_v(x, [n] * size, group=comm)
            expected = np.repeat([1000 * k + step + source for source in range(size)], n)
            np.testing.assert_array_equal(y, expected)
            assert all_reduce(np.array([k]), group=comm) == k * size

    order = list(range(4))
    random.Random(rank).shuffle(order)
    on_threads(use, order)
    counts = [comm.stats()["operators"] for comm in comms]
    assert counts == [120] * 4
    for comm in comms:
        comm.destroy()


@on_ranks(2, communicator=False)
def test_asked_for_twice_it_is_the_same(rank, size):
    first = join(rank, size)
    second = join(rank, size)
    assert first.core is second.core
    barrier(group=first)
    barrier(group=second)
    assert second.stats()["operators"] == 2
    other = join(rank, size, domain="another")
    assert other.core is not first.core
    check_works(other)
    for wrong in ((rank, size + 1), (rank ^ 1, size)):
        failure = attempt(join, *wrong)
        assert failure.name == "InvalidParamError"
        assert f"in use by rank {rank} of {size} in this process" in failure.text
    join(rank, size)
    check_works(first)
    barrier(group=first)
    second.destroy()
    assert not first.usable
    with join(rank, size) as third:
        assert third.core is not first.core
        check_works(third)
    other.destroy()


@on_ranks(2, communicator=False)
def test_default_communicator_that_has_ended_raises_until_it_is_made_anew(rank, size):
    join(rank, size)
    for k in range(3):
        x = np.arange(4 * size) + rank
        assert all_to_all_v(x, [4] * size).size == 4 * size  # group=None
        comm = alltoallv.communicator.default()
        barrier()
        if k > 0 and rank == 0:
            comm.abort()
        if k > 0:
            attempt(lambda comm=comm: [barrier(group=comm) for _ in range(10**6)])
            assert attempt(barrier).name == "PeerLostError"  # group=None does not wait for those who may be gone
            again = alltoallv.Communicator.from_env()
            assert alltoallv.communicator.default().core is again.core
        else:
            comm.destroy()
        assert not comm.usable
    alltoallv.communicator.default().destroy()


@on_ranks(3, communicator=False)
def test_poisoned_communicator_is_replaced(rank, size):
    comm = join(rank, size)
    for k in range(4):
        check_works(comm)
        if rank == k % size:
            barrier(group=comm)
            comm.abort()
        else:
            attempt(lambda comm=comm: [barrier(group=comm) for _ in range(100)])
        old, comm = comm, join(rank, size)  # the old one has not been destroyed
        assert comm.core is not old.core
        assert attempt(barrier, group=old).name == "PeerLostError"
    check_works(comm)
    old.destroy()
    check_works(comm)
    comm.destroy()


@on_both(2)
def test_use_after_destroy(comm):
    x, counts = np.ones(comm.size), [1] * comm.size
    plan = alltoallv._core.Plan(comm.core, "barrier", "uint8", *[[0] * comm.size] * 4)
    barrier(group=comm)
    pending = barrier(group=comm, async_op=True)
    comm.destroy()
    pending.wait()  # was before it
    comm.destroy()
    comm.abort()
    assert not comm.usable
    calls = [
        lambda: barrier(group=comm),
        lambda: barrier(group=comm, async_op=True).wait(),
        lambda: all_to_all_v(x, counts, counts, group=comm),
        lambda: all_to_all_v(x, counts, group=comm),
        lambda: all_to_all_v(x, [-1] * comm.size, counts, group=comm),  # its own error comes first
        lambda: all_reduce(x, group=comm),
        lambda: plan.run(0, 0),
        lambda: plan.submit(0, 0).wait(),
    ]
    failures = [attempt(call) for call in calls]
    assert all(f.name == "InvalidParamError" for f in failures), failures
    texts = [f.text for f in failures]
    assert all("has been destroyed" in text for text in texts[:4] + texts[5:]), texts
    assert "send_counts" in texts[4]
    assert repr(comm.domain) in repr(comm)
    assert comm.stats()["operators"] == 2
    comm.flight_record()


def test_destroy_while_a_call_waits(launch):
    """It takes its turn behind the call; aborting first ends that."""

    def work(comm):
        if comm.rank == 1:
            threading.Event().wait(0.5)
            comm.destroy()
            return "left"
        blocked = threading.Thread(target=attempt, args=(barrier,), kwargs={"group": comm})
        blocked.start()
        threading.Event().wait(0.1)
        comm.abort("no more")
        comm.destroy()
        blocked.join(5)
        return blocked.is_alive()

    assert launch(2, work) == [False, "left"]


def test_dropping_the_last_reference_leaves(ranks):
    def work(rank, size):
        comm = join(rank, size)
        barrier(group=comm)
        if rank == 1:
            del comm
            gc.collect()
            return None
        failure = attempt(barrier, group=comm)
        return failure.text

    assert "rank 1 has left" in ranks(2, communicator=False)(work)[0]


@pytest.mark.parametrize(
    ("domain", "message"),
    [
        ("name:199", "199"),
        ("name:0", "0"),
        ("name:-5", "-5"),
        ("name:many", "many"),
        ("name:", "name:"),
        ("x" * 129, "129"),
        ("é" * 65, "130"),
    ],
)
def test_names_that_are_refused(domain, message):
    with pytest.raises(InvalidParamError, match=message):
        Communicator.threads(1, domain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": "2"}, "n is '2', expected an integer"),
        ({"n": 2.0}, "n is 2.0, expected an integer"),
        ({"n": 0}, "n is 0, expected an integer from 1 to 4096"),
        ({"timeout": "5"}, "timeout is '5', expected seconds above 0"),
        ({"timeout": None}, "timeout is None, expected seconds above 0"),
        ({"timeout": float("nan")}, "timeout is nan, expected seconds above 0"),
        ({"check": True}, "check is True, expected 'always' or 'off'"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(InvalidParamError, match=message):
        Communicator.threads(**({"n": 1} | arguments))


@pytest.mark.parametrize(
    ("domain", "name"), [("name:200", "name"), ("x" * 128, "x" * 128), ("a b", "a b"), ("x" * 120 + ":1000", "x" * 120)]
)
def test_names_that_are_accepted(domain, name):
    (comm,) = Communicator.threads(1, domain)
    assert comm.domain == name
    check_works(comm)
    comm.destroy()


def allocate(size_mb: int) -> bool:
    """Whether an array of that size lies in shared memory."""
    return is_shared(alltoallv.empty(size_mb * MB, np.uint8))


@on_ranks(2, communicator=False, fresh=True)
def test_budget_of_a_domain(rank, size):
    default = join(rank, size, domain="plain")
    assert allocate(150)
    assert not allocate(250)
    before = default.stats()["private_outputs"]
    large = all_to_all_v(np.ones(125 * MB, np.uint8), [125 * MB, 0], group=default)  # 250 MB for rank 0
    assert is_shared(large) == (rank == 1)
    assert default.stats()["private_outputs"] == before + (rank == 0)
    del large
    join(rank, size, domain="plain:400")  # the first wins
    assert not allocate(250)
    second = join(rank, size, domain="second:300")
    assert allocate(250)  # the budgets of the domains add up
    second.destroy()
    assert not allocate(250)
    default.destroy()


@on_ranks(2, communicator=False, fresh=True)
def test_a_thread_that_cannot_be_made(rank, size):
    """An error of its own class on every rank, at once; then both go on."""
    comm = join(rank, size, timeout=30)
    barrier(group=comm)
    with (
        pytest.raises(ResourceError, match=r"no thread can be made for asynchronous calls.*A2A-5066") as caught,
        no_more_memory() if rank == 0 else nullcontext(),
    ):
        barrier(group=comm, async_op=rank == 0)
    assert isinstance(caught.value, OSError)
    assert rank == 0 or "failed on rank 0" in str(caught.value)
    assert all_reduce(np.array([rank]), group=comm) == 1
    barrier(group=comm, async_op=True).wait()
    comm.destroy()
