"""Collectives with a root, messages and objects: Paddle's signatures, values, handles and errors."""

from __future__ import annotations

import inspect
from typing import Any

import paddle
import paddle.distributed as dist
import pytest
from on_ranks import on_ranks
from paddle_arrays import filled, inputs_of, same, to_paddle

import alltoallv.paddle as ap
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError, PeerMismatchError

COLLECTIVES = (
    *("all_gather", "all_reduce", "reduce", "scatter", "gather", "broadcast", "reduce_scatter", "send", "recv"),
    *("isend", "irecv", "barrier", "all_gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_signatures_are_paddles(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(module, name)).parameters.values() for module in (ap, dist))
    positional = [(p.name, p.default) for p in ours if p.kind != p.KEYWORD_ONLY]
    assert positional == [(p.name, p.default) for p in theirs]


@pytest.mark.parametrize("size", [1, 3])
@on_ranks()
def test_lists_of_tensors_at_a_root(comm: Communicator, size: int) -> None:
    """Uneven ones, and an empty one that is filled; tests/matrix has the rest."""
    r, rows, root = comm.rank, [2, 0, 5][:size], size - 1
    for number, dtype in enumerate(("float32", "bfloat16", "int64")):
        later: dict[str, Any] = {"group": comm, "sync_op": bool(number % 2)}
        parts, even = inputs_of(dtype, rows), inputs_of(dtype, [3] * size)
        outs = [filled(n, dtype) for n in rows] if r == root else None
        assert ap.gather(to_paddle(parts[r]), outs, root, **later).wait()
        made: list[paddle.Tensor] = []
        assert ap.gather(to_paddle(even[r]), made, root, **later).wait()
        if outs is not None:
            assert all(map(same, outs, parts)), dtype
            assert all(map(same, made, even)), dtype
        assert len(made) == (size if r == root else 0)
        out = filled(rows[r], dtype)
        assert ap.scatter(out, [to_paddle(x) for x in parts] if r == root else None, root, **later).wait()
        assert same(out, parts[r]), dtype


@on_ranks(3)
def test_messages(comm: Communicator) -> None:
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, out = paddle.full([3], float(comm.rank)), paddle.zeros([3])
    tasks = ap.batch_isend_irecv(
        [ap.P2POp(ap.isend, x, after, group=comm), ap.P2POp(dist.irecv, out, before, group=comm)]
    )
    assert [task.wait() for task in tasks] == [True, True]
    assert out.tolist() == [before] * 3
    if comm.rank == 0:
        assert ap.send(x.reshape([3, 1]), 1, comm).is_sync()
        ap.send_object_list([{"a": 1}, None, "text"], 1, comm)
    elif comm.rank == 1:
        task = ap.irecv(out, group=comm)
        task.wait()
        assert out.tolist() == [0.0] * 3
        found: list[Any] = [0, 0, 0]
        ap.recv_object_list(found, src_in_group=0, group=comm)
        assert found == [{"a": 1}, None, "text"]
    with pytest.raises(InvalidParamError, match="this rank itself"):
        ap.send(x, comm.rank, comm)
    with pytest.raises(RuntimeError, match="Invalid ``op`` function"):
        ap.P2POp(ap.send, x, 0)
    with pytest.raises(RuntimeError, match="Invalid ``p2p_op_list``"):
        ap.batch_isend_irecv([1])


@on_ranks(2)
def test_a_refused_batch_leaves_no_message_behind(comm: Communicator) -> None:
    other, x = 1 - comm.rank, paddle.full([3], float(comm.rank))
    out, unused = paddle.zeros([3]), paddle.zeros([3])
    receive = ap.P2POp(ap.irecv, unused, other, comm)
    for refused, text in (
        (ap.P2POp(ap.isend, x, 2, comm), "dst is 2, expected 0 <= dst < 2"),
        (ap.P2POp(ap.isend, x, comm.rank, comm), "this rank itself"),
        (ap.P2POp(ap.irecv, out, -1, comm), "src is -1, expected 0 <= src < 2"),
        (ap.P2POp(ap.irecv, x.reshape([1, 3]).expand([2, 3]).t(), other, comm), "not contiguous"),
    ):
        with pytest.raises((InvalidParamError, InvalidTensorError), match=text):
            ap.batch_isend_irecv([receive, refused])
    for task in ap.batch_isend_irecv([ap.P2POp(ap.isend, x, other, comm), ap.P2POp(ap.irecv, out, other, comm)]):
        task.wait()
    assert (out.tolist(), unused.tolist()) == ([other] * 3, [0] * 3)


@on_ranks(3)
def test_objects(comm: Communicator) -> None:
    r, found = comm.rank, list[Any]()
    ap.all_gather_object(found, {"rank": r}, comm)
    assert found == [{"rank": j} for j in range(3)]
    values = [r, "x" * r]
    ap.broadcast_object_list(values, 1, comm)
    assert values == [1, "x"]
    out: list[Any] = []
    ap.scatter_object_list(out, [None, (1, 2), "c"] if r == 2 else None, 2, comm)
    assert out == [[None, (1, 2), "c"][r]]
    with pytest.raises(InvalidParamError, match="in_object_list is"):
        ap.scatter_object_list(out, [1], 0, comm)


@on_ranks(2)
def test_refused_on_all_ranks(comm: Communicator) -> None:
    x = paddle.ones([2, 2])
    with pytest.raises(InvalidTensorError, match=r"gather_list\[1\] has dtype int32, expected float32"):
        ap.gather(x, [paddle.ones([2, 2]), paddle.ones([2, 2], "int32")], 0, comm)
    with pytest.raises((TypeError, InvalidParamError), match="tensor_list is a NoneType, expected a list"):
        ap.scatter(x, None, 0, comm)
    for call, name in (
        (lambda: ap.reduce(x, 2, group=comm), "dst"),
        (lambda: ap.gather(x, [], 2, comm), "dst"),
        (lambda: ap.scatter(x, [x, x], 2, comm), "src"),
        (lambda: ap.broadcast(x, 2, comm), "src"),
        (lambda: ap.broadcast_object_list([1], 2, comm), "src"),
        (lambda: ap.send_object_list([1], 2, comm), "dst"),
        (lambda: ap.recv_object_list([1], src_in_group=2, group=comm), "src_in_group"),
    ):
        with pytest.raises(InvalidParamError, match=f"{name} is 2, expected 0 <= {name} < 2"):
            call()
    with pytest.raises(PeerMismatchError):
        ap.reduce(x, comm.rank, group=comm)


@on_ranks(3, communicator=False, fresh=True)  # those that are kept have made other numbers of groups
def test_ranks_of_the_job_in_a_group(rank: int, size: int) -> None:
    """``src`` and ``dst`` are ranks of the job; outside of the group a warning and None."""
    group = ap.new_group([1, 2])
    x = paddle.full([2], float(rank))
    if rank == 0:
        for call in (
            lambda: ap.reduce(x, 2, group=group),
            lambda: ap.broadcast(x, 2, group),
            lambda: ap.send(x, 1, group),
        ):
            with pytest.warns(UserWarning, match="is not in group"):
                assert call() is None
        return
    ap.reduce(x, 2, group=group)
    assert x.tolist() == [[1.0] * 2, [3.0] * 2][rank - 1]
    ap.broadcast(x, 2, group)
    assert x.tolist() == [3.0] * 2
    out: list[Any] = [0]
    ap.send_object_list([7], 2, group) if rank == 1 else ap.recv_object_list(out, 1, group)
    assert out == [7 * (rank - 1)]
    with pytest.raises(InvalidParamError, match="dst is 0, expected one of the group's ranks"):
        ap.send(x, 0, group)


@on_ranks(2)
def test_the_order_of_ranks_may_be_asked_for(comm: Communicator) -> None:
    x, part = paddle.full([4], comm.rank + 1.0), paddle.zeros([2])
    ap.all_reduce(x, group=comm, order="rank")
    ap.reduce_scatter(part, x, group=comm, order="rank")
    assert (x.tolist(), part.tolist()) == ([3.0] * 4, [6.0] * 2)
    with pytest.raises(InvalidParamError, match=r"order is 'ring', expected 'rank' or None"):
        ap.reduce(x, 0, group=comm, order="ring" if comm.rank == 0 else None)
