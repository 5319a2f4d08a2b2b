"""While a dispatch mode is active, each call of `alltoallv.torch` is an operator that the mode sees."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from backend_groups import on_group
from every_function import functions_of, input_of
from on_ranks import on_ranks
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

import alltoallv.torch as at
from alltoallv import AllToAllVParam, Communicator, QuantAllReduceParam, QuantType
from alltoallv.errors import CommTimeoutError, InvalidParamError, InvalidTensorError, PeerMismatchError
from alltoallv.torch.nn import MoEDispatcher

UNSEEN = {"memory": 0}  # what communicates nothing
TWICE = {"single": 2, "quantized out": 2, "functional": 2, "scattered": 1, "there and back": 2, "told": 1}


class Seen(TorchDispatchMode):
    """Lists the names of alltoallv's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "alltoallv":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tracks", [False, True])
@on_ranks(2)
def test_every_function(comm: Communicator, tracks: bool) -> None:
    for name, function in functions_of(comm).items():
        if tracks and name in ("out", "gaps", "quantized out", "learnt handle", "handle"):
            continue  # these refuse gradients, or have none in the mode's sight
        x = input_of(comm).requires_grad_(tracks)
        expected = function(x)
        with Seen() as seen:
            y = function(x)
        assert torch.equal(y, expected), name
        assert len(seen.names) == (UNSEEN | TWICE).get(name, 1), (name, seen.names)


@on_ranks(2)
def test_collectives_of_torch(comm: Communicator) -> None:
    """In place, later and in time; ranks that are watched meet those that are not."""
    watches = comm.rank == 0
    for async_op in (False, True):
        x, parts, whole = torch.full((3,), comm.rank + 1.0), list(torch.zeros(2, 3)), torch.zeros(3, 2).t()
        with Seen() if watches else torch.no_grad() as seen:
            works = [
                at.all_reduce(x, group=comm, async_op=async_op),
                at.all_gather(parts, x.clone().fill_(comm.rank), group=comm, async_op=async_op),
                at.broadcast(whole, 1, group=comm, async_op=async_op),
                at.reduce(torch.ones(2), 0, dist.ReduceOp.MAX, group=comm, async_op=async_op),
            ]
            for work in works if async_op else ():
                assert work is not None
                assert work.wait()
        assert x.tolist() == [3] * 3
        assert [part.tolist() for part in parts] == [[0] * 3, [1] * 3]
        if seen is not None:
            assert seen.names == ["collective_"] * 4
    with Seen(), pytest.raises(PeerMismatchError, match=r"rank 1 has elements: 3.*A2A-3009"):
        at.all_reduce(torch.ones(2 + comm.rank), group=comm)
    plan = at.Plan([1, 1], [1, 1], group=comm)
    with Seen() as both:
        assert plan(torch.arange(2.0) + comm.rank).tolist() == [comm.rank, comm.rank + 1]
    assert both.names == ["collective_"]


@on_ranks(2)
def test_calls_that_no_operator_can_repeat(comm: Communicator) -> None:
    """Messages, barriers, and what has a timeout, a feedback or a handle: seen once, with the same results."""
    rank, peer, place = comm.rank, 1 - comm.rank, {"group": comm}
    rows, counts = torch.full((2, 32), rank + 1.0), [1, 1]
    feedback = at.ErrorFeedback()

    def message(x: Tensor) -> Tensor:
        if rank == 0:
            at.send(x, peer, comm, tag=3)
        else:
            assert at.recv(x, peer, comm, tag=3) == 0
        return x

    def handles(x: Tensor) -> Tensor:
        y = torch.zeros(3)
        works = [at.isend(x, peer, comm), at.irecv(y, peer, comm)]
        assert all(work is not None and work.wait() for work in works)
        return y

    def barrier(x: Tensor) -> Tensor:
        at.barrier(comm)
        work = at.barrier(comm, async_op=True, timeout=60)
        assert work is not None
        assert work.wait()
        return x

    def ended(call: Any) -> Tensor:
        y, work = call
        result: Tensor = work.result() if y is None else (work.wait(), y)[1]
        return result

    param = QuantAllReduceParam(rank=rank, rank_size=2, quant_type=QuantType.DYNAMIC, group_size=32)
    operation = at.QuantAllReduceOperation(param, comm)
    calls: dict[str, tuple[Callable[[], Tensor], int]] = {
        "message": (lambda: message(torch.arange(3.0) + rank), 1),
        "handles": (lambda: handles(torch.arange(3.0) + rank), 2),
        "barrier": (lambda: barrier(rows), 2),
        "learnt": (lambda: at.all_to_all_v(rows, counts, timeout=60, **place), 1),
        "learnt handle": (lambda: ended(at.all_to_all_v(rows, counts, async_op=True, **place)), 1),
        "timeout": (lambda: at.quantized_all_reduce(rows, timeout=60, **place), 1),
        "feedback": (lambda: at.quantized_all_reduce(rows, error_feedback=feedback, **place), 1),
        "handle": (lambda: ended(at.quantized_all_reduce(rows, async_op=True, **place)), 1),
        "scattered": (lambda: ended(at.quantized_reduce_scatter(rows, async_op=True, timeout=60, **place)), 1),
        "rows": (lambda: at.quantized_all_to_all(rows, counts, counts, timeout=60, **place), 1),
        "rows handle": (lambda: ended(at.quantized_all_to_all(rows, counts, counts, async_op=True, **place)), 1),
        "rows learnt": (lambda: ended(at.quantized_all_to_all(rows, counts, async_op=True, **place)), 1),
        "operation": (lambda: operation(rows), 1),
        "operation with feedback": (lambda: operation(rows, error_feedback=feedback), 1),
    }
    for name, (call, number) in calls.items():
        expected = call()
        with Seen() as seen:
            assert torch.equal(call(), expected), name
        assert len(seen.names) == number, (name, seen.names)
    with Seen() if rank == 0 else torch.no_grad():
        works = at.send, at.recv
        works[rank](torch.ones(2), peer, comm)
    with Seen(), pytest.raises(InvalidParamError):
        at.quantized_all_reduce(rows, timeout=60, bits=7 if rank == 0 else 8, **place)


@on_ranks(2)
def test_a_timeout_of_a_call(comm: Communicator) -> None:
    if comm.rank == 0:
        with Seen(), pytest.raises(CommTimeoutError):
            at.all_to_all_v(torch.ones(2), [1, 1], [1, 1], group=comm, timeout=0.2)
    else:
        while comm.usable:
            time.sleep(0.01)
        with pytest.raises(CommTimeoutError):
            at.all_to_all_v(torch.ones(2), [1, 1], [1, 1], group=comm)


@on_ranks(2)
def test_operations(comm: Communicator) -> None:
    about = {"rank": comm.rank, "rank_size": 2, "send_counts": [1, 1], "sdispls": [0, 1]}
    operation = at.AllToAllVOperation(AllToAllVParam(**about, recv_counts=[1, 1], rdispls=[0, 1]), comm)
    for _ in range(2):
        with Seen() as seen:
            y = operation(torch.arange(2.0) + comm.rank)
        assert y.tolist() == [[comm.rank, comm.rank + 1]]
        assert seen.names == ["launch_"]


@on_ranks(2)
def test_nothing_is_sent_for_tensors_without_data(comm: Communicator) -> None:
    """One rank alone makes the calls, on fake tensors and on meta tensors, and gets shapes."""

    def check(**where: Any) -> None:
        x, half, whole = torch.ones(4, 4, **where), torch.ones(2, 4, **where), torch.ones(8, 4, **where)
        place: dict[str, Any] = {"group": comm}
        for async_op in (False, True):
            late: dict[str, Any] = place | {"async_op": async_op}
            works = [
                at.all_reduce(x, **late),
                at.reduce(x, 1, **late),
                at.broadcast(x, 1, **late),
                at.all_gather([x, x], x, **late),
                at.all_gather_into_tensor(whole, x, **late),
                at.gather(x, [x, x] if comm.rank == 0 else None, **late),
                at.scatter(x, [x, x] if comm.rank == 0 else None, **late),
                at.reduce_scatter(half, [half, half], **late),
                at.reduce_scatter_tensor(half, x, **late),
                at.all_to_all([half, half], [half, half], **late),
                at.all_to_all_single(x, x, **late),
                at.all_to_all_single(whole, x, [4, 4], [2, 2], **late),
            ]
            assert all(work.wait() for work in works if work is not None)
            assert at.all_to_all_v(x, [2, 2], [2, 2], out=x + 1, **late) is not None
        at.send(x, 1, comm)
        assert at.recv(x, 1, comm) == 1
        for work in (at.isend(x, 1, comm), at.irecv(x, 1, comm)):
            assert work is not None
            assert work.wait()
        made = {
            (5, 4): [at.all_to_all_v(x, [1, 3], [2, 3], **place), at.quantized_all_to_all(x, [1, 3], [2, 3], **place)],
            (9, 4): [at.all_to_all_v(x, [1, 3], [2, 3], rdispls=[0, 6], **place)],
            (4, 4): [
                at.functional.all_reduce(x, comm),
                at.functional.all_to_all_single(x, group=comm),
                at.global_scatter(x, [1, 3], [2, 2], comm),
                at.quantized_all_reduce(x, **place),
            ],
            (8, 4): [at.functional.all_gather(x, comm)],
            (2, 4): [at.functional.reduce_scatter(x, comm), at.quantized_reduce_scatter(x, **place)],
            (4, 3): [at.quantized_linear_all_reduce(x, torch.ones(3, 4, **where), **place)],
        }
        for shape, results in made.items():
            assert [result.shape for result in results] == [shape] * len(results)
            assert all(result.device == x.device for result in results)

    if comm.rank == 0:
        check(device="meta")
        with FakeTensorMode():
            check()
    assert at.functional.all_reduce(torch.ones(2), comm).tolist() == [2, 2]


@on_group(2)
def test_what_tensors_without_data_cannot_do_is_refused(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Plans, operations, and shapes that depend on the data of peers: on meta, in a mode, and outside of it."""

    def check(wanted: Any, **where: Any) -> None:
        x, codes, scale = (
            torch.ones(shape, dtype=dtype, **where)
            for shape, dtype in (((4, 8), torch.float32), ((2, 16), torch.int8), ((1,), torch.float16))
        )
        ids, counts = torch.zeros(4, 1, dtype=torch.int64, **where), {"send_counts": [16, 16], "sdispls": [0, 16]}
        param = AllToAllVParam(rank=rank, rank_size=2, **counts, recv_counts=[16, 16], rdispls=[0, 16], backend="auto")
        shared, own = (QuantAllReduceParam(rank=rank, rank_size=2, quant_type=kind) for kind in (1, QuantType.DYNAMIC))
        calls: list[Callable[[], object]] = [
            lambda: at.Plan([16, 16], [16, 16])(x),
            lambda: at.AllToAllVOperation(param)(x),
            lambda: at.AllToAllVOperation(param)(x, out=x.view(1, 32)),
            lambda: at.QuantAllReduceOperation(shared)(codes, scale),
            lambda: at.QuantAllReduceOperation(own)(x),
            lambda: at.all_to_all_v(x, [2, 2]),
            lambda: MoEDispatcher(2).dispatch(x, ids),
            lambda: MoEDispatcher(2, capacity=2, payload="int8").dispatch(x, ids),
            lambda: MoEDispatcher(2)(x, ids, None, [lambda rows: rows]),
        ]
        for call in calls:
            with pytest.raises(wanted):
                call()
        assert at.AllToAllVOperation(param).infer_shape(x) == (1, 32)

    check((InvalidTensorError, RuntimeError), device="meta")
    with FakeTensorMode():
        check((InvalidTensorError, DynamicOutputShapeException))
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2, 2]
