"""alltoallv.paddle's functions with paddle.distributed's names take each of Paddle's arguments."""

from __future__ import annotations

import datetime
from typing import Any

import paddle
import paddle.distributed as dist
import pytest
from documented_arguments import Library, Row
from on_ranks import on_ranks

import alltoallv.paddle as ap
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, InvalidTensorError

MAX = dist.ReduceOp.MAX


def rows_of(comm: Communicator) -> list[Row]:
    rank, peer, both, kept = comm.rank, 1 - comm.rank, [[1.0], [2.0]], list[Any]()

    def value(number: float = rank + 1, size: int = 1) -> Any:
        return paddle.full([size], float(number))

    def row(function: str, outputs: Any, want: Any, **arguments: Any) -> Row:
        def made(task: Any) -> Any:
            if not arguments.get("sync_op", True):
                task.wait()
            return outputs.tolist() if isinstance(outputs, paddle.Tensor) else [x.tolist() for x in outputs or ()]

        return Row(function, {"group": comm} | arguments, want, made)

    made: list[Row] = []
    for how in ({"sync_op": True}, {"sync_op": False}):
        sizes = [1, 2] if rank else [0, 1]
        x, y, z, w, sums = value(), value(), value(9, sum(sizes)), value(9), value(9)
        sent, parts = value(size=sum(sizes)), [value(5), value(6)] if rank else None
        lists, other, outs = list[Any](), [value(9), value(9)], list[Any]()
        made += [
            row("all_reduce", x, [2.0], tensor=x, op=MAX, **how),
            row("reduce", y, [2.0] if rank else [1.0], tensor=y, dst=1, op=MAX, **how),
            row("broadcast", b := value(), [2.0], tensor=b, src=1, **how),
            row("all_gather", lists, both, tensor_list=lists, tensor=value(), **how),
            row("reduce_scatter", sums, [2.0], tensor=sums, tensor_list=[value(), value()], op=MAX, **how),
            row("gather", outs, both if rank else [], tensor=value(), gather_list=outs, dst=1, **how),
            row("scatter", w, [5.0 + rank], tensor=w, tensor_list=parts, src=1, **how),
            row("alltoall", other, both, out_tensor_list=other, in_tensor_list=[value(), value()], **how),
            row(
                "alltoall_single", z, [1.0, 2.0, 2.0] if rank else [2.0], out_tensor=z, in_tensor=sent,
                in_split_sizes=sizes, out_split_sizes=sizes, **how,
            ),
        ]  # fmt: skip
        x = value(9)
        order = slice(None, None, 1 - 2 * rank)
        made += [
            row("send", None, [], tensor=value(), dst=peer, **how),
            row("recv", x, [peer + 1.0], tensor=x, src=peer, **how),
        ][order] if how["sync_op"] else [
            Row("isend", {"tensor": value(), "dst": peer, "group": comm}, None, kept.append),
            Row("irecv", {"tensor": x, "src": peer, "group": comm}, [peer + 1.0], lambda task, x=x: (
                task.wait(), kept[-1].wait(), x.tolist())[2]),
        ]  # fmt: skip
    texts = list[Any]()
    made += [
        Row("all_gather_object", {"object_list": texts, "obj": rank, "group": comm}, [0, 1], lambda _: texts),
        Row("broadcast_object_list", {"object_list": (one := [rank]), "src": 1, "group": comm}, [1], lambda _: one),
        Row(
            "scatter_object_list",
            {"out_object_list": (got := []), "in_object_list": ["a", "b"], "src": 1, "group": comm},
            ["ab"[rank]],
            lambda _: got,
        ),
        Row("barrier", {"group": comm}),
    ]
    for name, place in (("dst", "src"), ("dst_in_group", "src_in_group")):
        here: list[Any] = [None]
        made += [
            Row("send_object_list", {"object_list": [rank], name: peer, "group": comm}),
            Row("recv_object_list", {"object_list": here, place: peer, "group": comm}, [peer], lambda _, x=here: x),
        ][:: 1 - 2 * rank]  # fmt: skip
    x, operations = value(9), list[Any]()
    messages = [("isend", value(), peer, comm), ("irecv", x, peer, comm)]
    arguments = ("op", "tensor", "peer", "group")
    for message in messages:
        given = dict(zip(arguments, (getattr(ap, message[0]), *message[1:]), strict=True))
        made.append(Row("P2POp", given, None, operations.append))
    made.append(
        Row(
            "batch_isend_irecv",
            {"p2p_op_list": operations},
            [peer + 1.0],
            lambda tasks: ([t.wait() for t in tasks], x.tolist())[1],
        )
    )
    ignored = {"backend": "nccl", "nccl_comm_init_option": 1, "nccl_config": 1}
    made += [
        Row("wait", {"tensor": value(), "group": comm, "use_calc_stream": False}, ignores=["tensor"]),
        Row("is_initialized", {}, made=lambda known: None if isinstance(known, bool) else known),
        Row("new_group", {"ranks": [0], **ignored}, [0], lambda group: group.ranks, list(ignored)),
        Row("new_group", {"ranks": [0], "timeout": datetime.timedelta(1)}, [0], lambda group: group.ranks),
    ]
    for name, given in {"backend": "mpi", "timeout": 0}.items():
        made.append(Row("new_group", {"ranks": [0], name: given}, InvalidParamError, refuses=f"{name} is {given!r}"))
    return made


def rows_of_stream(comm: Communicator) -> list[Row]:
    """The same functions, with ``use_calc_stream``."""
    renamed = {
        "all_gather": {"tensor_list": "tensor_or_tensor_list"},
        "alltoall": {"out_tensor_list": "out_tensor_or_tensor_list", "in_tensor_list": "in_tensor_or_tensor_list"},
        "reduce_scatter": {"tensor_list": "tensor_or_tensor_list"},
        "scatter": {"tensor_list": "tensor_or_tensor_list"},
    }
    made = []
    for row in rows_of(comm):
        if row.function in dist.stream.__all__:
            names = renamed.get(row.function, {})
            given = {names.get(name, name): each for name, each in row.arguments.items()}
            if given["sync_op"]:
                made.append(
                    Row(row.function, {**given, "use_calc_stream": True}, row.want, row.made, ["use_calc_stream"])
                )
            else:
                refused = {**given, "use_calc_stream": True}
                made.append(Row(row.function, refused, RuntimeError, refuses="use_calc_stream can only be true"))
                made.append(Row(row.function, given, row.want, row.made))
    return made


@on_ranks(2)
def test_every_argument(comm: Communicator) -> None:
    Library("paddle.distributed", dist, ap, rows_of(comm)).check()


@on_ranks(2)
def test_every_argument_of_stream(comm: Communicator) -> None:
    Library("paddle.distributed.stream", dist.stream, ap.stream, rows_of_stream(comm)).check()


@on_ranks(2)
def test_objects_to_one_rank_and_waits(comm: Communicator) -> None:
    known: list[Any] = []
    ap.gather_object(comm.rank, known if comm.rank else None, 1, comm)
    assert known == ([0, 1] if comm.rank else [])
    x = paddle.ones([2])
    task = ap.all_reduce(x, group=comm, sync_op=False)
    ap.wait(x, comm, use_calc_stream=False)
    assert (task.is_completed(), task.wait(datetime.timedelta(0)), x.tolist()) == (True, True, [2.0, 2.0])
    out = paddle.empty([2])
    ap.all_to_all(out, paddle.full([2], float(comm.rank)), comm)
    assert out.tolist() == [0.0, 1.0]
    ap.scatter(out, paddle.arange(4.0), 1, comm)
    assert out.tolist() == [2.0 * comm.rank, 2.0 * comm.rank + 1]
    with pytest.raises(
        InvalidTensorError, match=r"tensor_list has shape \(3,\), expected dimension 0 to be a multiple of 2"
    ):
        ap.scatter(out, paddle.arange(3.0), 1, comm)
