"""Functions with the names of mint.distributed and comm_func take each of MindSpore's arguments."""

from __future__ import annotations

import importlib
from typing import Any

import mindspore as ms
import numpy as np
from documented_arguments import Library, Row
from mindspore import Tensor
from mindspore._c_expression import GroupOptions

import alltoallv.mindspore as am
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError
from alltoallv.mindspore import comm_func, distributed

BOTH = [[1.0], [2.0]]


def value(number: float, size: int = 1) -> Tensor:
    return Tensor(np.full(size, number, np.float32))


def listed(made: Any) -> Any:
    return made.asnumpy().tolist() if isinstance(made, Tensor) else [x.asnumpy().tolist() for x in made or ()]


def mint_rows(rank: int, group: str) -> list[Row]:
    peer, mine, kept = 1 - rank, rank + 1, list[Any]()
    sizes = [1, 2] if rank else [0, 1]

    def row(function: str, outputs: Any, want: Any, **arguments: Any) -> Row:
        def made(handle: Any) -> Any:
            if arguments["async_op"]:
                handle.wait()
            return listed(outputs)

        return Row(function, {"group": group} | arguments, want, made)

    made: list[Row] = []
    for how in ({"async_op": False}, {"async_op": True}):
        x, y, z, w, sums, b = value(mine), value(mine), value(9, sum(sizes)), value(9), value(9), value(mine)
        lists, other, outs = ([value(9), value(9)] for _ in range(3))
        whole, uneven, part = value(9, 2), value(9, 3), value(9, 1 + rank)
        made += [
            row("all_reduce", x, [2.0], tensor=x, op="max", **how),
            row("reduce", y, [2.0] if rank else [1.0], tensor=y, dst=1, op="max", **how),
            row("broadcast", b, [2.0], tensor=b, src=1, **how),
            row("all_gather", lists, BOTH, tensor_list=lists, tensor=value(mine), **how),
            row("all_gather_into_tensor", whole, [1.0, 2.0], output_tensor=whole, input_tensor=value(mine), **how),
            row(
                "all_gather_into_tensor_uneven", uneven, [1.0, 2.0, 2.0], output=uneven, input=value(mine, mine),
                output_split_sizes=[1, 2], **how,
            ),
            row("reduce_scatter", sums, [2.0], output=sums, input_list=[value(mine), value(mine)], op="max", **how),
            row("reduce_scatter_tensor", sums, [2.0], output=sums, input=value(mine, 2), op="max", **how),
            row(
                "reduce_scatter_tensor_uneven", part, [2.0] * mine, output=part, input=value(mine, 3),
                input_split_sizes=[1, 2], op="max", **how,
            ),
            row("gather", outs, BOTH if rank else [[9.0]] * 2, tensor=value(mine), gather_list=outs, dst=1, **how),
            row("scatter", w, [5.0 + rank], tensor=w, scatter_list=[value(5), value(6)], src=1, **how),
            row(
                "all_to_all", other, BOTH, output_tensor_list=other, input_tensor_list=[value(mine), value(mine)], **how
            ),
            row(
                "all_to_all_single", z, [1.0, 2.0, 2.0] if rank else [2.0], output=z, input=value(mine, sum(sizes)),
                output_split_sizes=sizes, input_split_sizes=sizes, **how,
            ),
            row("barrier", None, [], **how),
        ]  # fmt: skip
    here, one, texts, got, gathered = [None], [rank], [None, None], [None], [None, None]
    x, y = value(9), value(9)
    place = {"group": group, "tag": 3}
    objects = {"group": group, "device": "CPU"}
    made += [
        Row("barrier", {"group": group, "device_ids": [0]}, ignores=["device_ids"]),
        Row("isend", {"tensor": value(mine), "dst": peer, **place}, None, kept.append),
        Row("recv", {"tensor": x, "src": peer, **place}, [peer + 1.0], lambda _: (kept[-1].wait(), listed(x))[1]),
        *[
            Row("send", {"tensor": value(mine), "dst": peer, **place}, None, lambda _: None),
            Row("irecv", {"tensor": y, "src": peer, **place}, [peer + 1.0], lambda work: (work.wait(), listed(y))[1]),
        ][:: 1 - 2 * rank],
        *[
            Row("send_object_list", {"object_list": [rank], "dst": peer, **objects}, ignores=["device"]),
            Row(
                "recv_object_list", {"object_list": here, "src": peer, **objects}, [peer], lambda _: here,
                ignores=["device"],
            ),
        ][:: 1 - 2 * rank],
        Row("broadcast_object_list", {"object_list": one, "src": 1, **objects}, [1], lambda _: one, ignores=["device"]),
        Row("all_gather_object", {"object_list": texts, "obj": rank, "group": group}, [0, 1], lambda _: texts),
        Row(
            "gather_object", {"obj": rank, "object_gather_list": gathered, "dst": 1, "group": group},
            [0, 1] if rank else [None, None], lambda _: gathered,
        ),
        Row(
            "scatter_object_list",
            {"scatter_object_output_list": got, "scatter_object_input_list": ["a", "b"], "src": 1, "group": group},
            ["ab"[rank]], lambda _: got,
        ),
        Row("get_rank", {"group": group}, rank),
        Row("get_world_size", {"group": group}, 2),
        Row("get_process_group_ranks", {"group": group}, [0, 1]),
        Row("get_backend", {"group": group}, "hccl"),
        Row("get_global_rank", {"group": group, "group_rank": 1}, 1),
        Row("get_group_rank", {"group": group, "global_rank": 1}, 1),
    ]  # fmt: skip
    waiting: list[Any] = []
    z = value(9)
    for op, tensor in (("isend", value(mine)), ("irecv", z)):
        given = {"op": op, "tensor": tensor, "peer": peer, "group": group, "tag": 0}
        made.append(Row("P2POp", given, None, waiting.append))
        made.append(Row("P2POp", given | {"tag": 4}, NotImplementedError, refuses="tag"))  # as MindSpore does
    ended = lambda works: ([work.wait() for work in works], listed(z))[1]  # noqa: E731
    made.append(Row("batch_isend_irecv", {"p2p_op_list": waiting}, [peer + 1.0], ended))
    about = {
        "timeout": 1,
        "backend": "hccl",
        "pg_options": GroupOptions(),
        "use_local_synchronization": True,
        "group_desc": "a",
    }
    ignored = ["timeout", "pg_options", "use_local_synchronization", "group_desc"]
    made.append(Row("new_group", {"ranks": [1, 0], **about}, True, lambda name: isinstance(name, str), ignored))
    return made


def func_rows(rank: int, group: str) -> list[Row]:
    peer, mine, kept = 1 - rank, rank + 1, list[Any]()
    sizes, place = [1, 2] if rank else [0, 1], {"group": group, "tag": 3}
    received = [1.0, 2.0, 2.0] if rank else [2.0]

    def row(function: str, want: Any, **arguments: Any) -> Row:
        def made(result: Any) -> Any:
            if isinstance(result, tuple):
                result, handle = result
                assert (handle is not None) == arguments["async_op"]
                if handle is not None:
                    handle.wait()
            return listed(result)

        return Row(function, {"group": group} | arguments, want, made)

    made: list[Row] = []
    for how in ({"async_op": False}, {"async_op": True}):
        made += [
            row("all_reduce", [2.0], tensor=value(mine), op="max", **how),
            row("all_gather_into_tensor", [1.0, 2.0], tensor=value(mine), **how),
            row("reduce_scatter_tensor", [2.0], tensor=value(mine, 2), op="max", **how),
            row(
                "all_to_all_single_with_output_shape", received, output_shape=(sum(sizes),),
                tensor=value(mine, sum(sizes)), output_split_sizes=sizes, input_split_sizes=sizes, **how,
            ),
            row(
                "all_to_all_with_output_shape", BOTH, output_shape_list=[(1,), (1,)],
                input_tensor_list=[value(mine), value(mine)], **how,
            ),
        ]  # fmt: skip
        out = value(9, sum(sizes))
        made.append(
            Row(
                "all_to_all_v_c",
                {"output": out, "input": value(mine, sum(sizes)), "send_count_matrix": [0, 1, 1, 2], "group": group}
                | how,
                received,
                lambda handle, out=out: (handle and handle.wait(), listed(out))[1],
            )
        )
    made += [
        row("broadcast", [2.0], tensor=value(mine), src=1),
        row("reduce", [2.0] if rank else [1.0], tensor=value(mine), dst=1, op="max"),
        row("gather_into_tensor", [1.0, 2.0] if rank else [0.0], tensor=value(mine), dst=1),
        row("scatter_tensor", [5.0 + rank], tensor=Tensor(np.array([5, 6], np.float32)), src=1),
        Row("barrier", {"group": group}),
        Row("isend", {"tensor": value(mine), "dst": peer, **place}, None, kept.append),
        Row(
            "recv", {"tensor": value(9), "src": peer, **place}, [peer + 1.0],
            lambda x: (kept[-1].wait(), listed(x))[1],
        ),
        *[
            Row("send", {"tensor": value(mine), "dst": peer, **place}),
            Row(
                "irecv", {"tensor": value(9), "src": peer, **place}, [peer + 1.0],
                lambda given: (given[1].wait(), listed(given[0]))[1],
            ),
        ][:: 1 - 2 * rank],
        Row("get_group_size", {"group": group}, 2),
        Row("get_group_rank_from_world_rank", {"world_rank_id": 1, "group": group}, 1),
    ]  # fmt: skip
    waiting: list[Any] = []
    for op, tensor in (("isend", value(mine)), ("irecv", value(9))):
        given = {"op": op, "tensor": tensor, "peer": peer, "group": group, "tag": 0, "recv_dtype": ms.float32}
        made.append(Row("P2POp", given, None, waiting.append, ["recv_dtype"]))
        made.append(Row("P2POp", given | {"tag": 4}, NotImplementedError, refuses="tag"))
    last = lambda results: listed(results[-1])  # noqa: E731
    made.append(Row("batch_isend_irecv", {"p2p_op_list": waiting}, [peer + 1.0], last))
    made.append(
        Row(
            "all_reduce",
            {"tensor": value(1), "op": "most", "group": group},
            (InvalidParamError, TypeError),
            refuses="op",
        )
    )
    return made


def check_every_argument(comm: Communicator) -> None:
    group = am.new_group([0, 1])
    mint = importlib.import_module("mindspore.mint.distributed")
    func = importlib.import_module("mindspore.communication.comm_func")
    Library("mint.distributed", mint, distributed, mint_rows(comm.rank, group)).check()
    Library("mindspore.communication", func, comm_func, func_rows(comm.rank, group)).check()
