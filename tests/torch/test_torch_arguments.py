"""alltoallv.torch's functions with torch.distributed's names take each of torch's arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from backend_groups import on_group
from documented_arguments import Library, Row
from torch import Tensor

import alltoallv.torch as at
from alltoallv.errors import InvalidParamError

MAX = dist.ReduceOp.MAX


def rows_of(rank: int, group: dist.ProcessGroup) -> list[Row]:
    """On the ranks 0 and 1 of ``group``, which are 1 and 2 of the job."""
    both, peer = [[1.0], [2.0]], 1 - rank
    works: list[tuple[Any, Tensor]] = []  # receives that have begun

    def value(number: float = rank + 1, size: int = 1) -> Tensor:
        return torch.full((size,), float(number))

    def row(function: str, outputs: Any, want: Any, **arguments: Any) -> Row:
        def made(work: Any) -> Any:
            assert (work is not None) == arguments["async_op"]
            assert work is None or work.wait()
            return outputs.tolist() if isinstance(outputs, Tensor) else [x.tolist() for x in outputs or ()]

        return Row(function, {"group": group} | arguments, want, made)

    made: list[Row] = []
    for late in ({"async_op": False}, {"async_op": True}):
        x, y, z, sums, lists, other = (
            value(),
            value(9, 2),
            value(9, 3 if rank else 1),
            value(9),
            *[[value(9), value(9)] for _ in range(2)],
        )
        sends = [1, 2] if rank else [0, 1]
        recvs = [1, 2] if rank else [0, 1]
        made += [
            row("all_reduce", x, [2.0], tensor=x, op=MAX, **late),
            row("all_gather", lists, both, tensor_list=lists, tensor=value(), **late),
            row("all_gather_into_tensor", y, [1.0, 2.0], output_tensor=y, input_tensor=value(), **late),
            row("reduce_scatter", sums, [2.0], output=sums, input_list=[value(), value()], op=MAX, **late),
            row("reduce_scatter_tensor", sums, [2.0], output=sums, input=value(size=2), op=MAX, **late),
            row(
                "all_to_all", other, both, output_tensor_list=other, input_tensor_list=[value(), value()], **late
            ),
            row(
                "all_to_all_single", z, [1.0, 2.0, 2.0] if rank else [2.0], output=z, input=value(size=sum(sends)),
                output_split_sizes=recvs, input_split_sizes=sends, **late,
            ),
        ]  # fmt: skip
        for place in ("{}", "group_{}"):  # the root's number in the job, and in the group
            dst, src = ({place.format(name): 2 if place == "{}" else 1} for name in ("dst", "src"))
            x, y, z = value(), value(), value(9)
            outs, parts = ([value(9), value(9)], [value(5), value(6)]) if rank else (None, None)
            made += [
                row("reduce", x, [2.0] if rank else [1.0], tensor=x, op=MAX, **dst, **late),
                row("broadcast", y, [2.0], tensor=y, **src, **late),
                row("gather", outs, both if rank else [], tensor=value(), gather_list=outs, **dst, **late),
                row("scatter", z, [5.0 + rank], tensor=z, scatter_list=parts, **src, **late),
            ]
    for place in ("{}", "group_{}"):
        number = peer + 1 if place == "{}" else peer
        to, of = ({place.format(name): number, "group": group, "tag": 3} for name in ("dst", "src"))
        x, y = value(9), value(9)
        made += [
            Row("isend", {"tensor": value(), **to}, True, lambda work: works.append((work, value(peer + 1.0))) is None),
            Row("recv", {"tensor": x, **of}, (peer + 1, [peer + 1.0]), lambda src, x=x: (src, x.tolist())),
            Row("irecv", {"tensor": y, **of}, True, lambda work, y=y: works.append((work, y)) is None),
        ]
        made.append(Row("isend", {"tensor": value(), **to}, [True] * 3, lambda work: [
            *[one.wait() and out.tolist() == [peer + 1.0] for one, out in works[-2:]], work.wait()
        ]))  # fmt: skip
        made += [Row("send", {"tensor": value(), **to}), Row("recv", {"tensor": x, **of}, peer + 1)][:: 1 - 2 * rank]
    return [
        *made,
        row("barrier", None, [], async_op=True, timeout=timedelta(seconds=30)),
        Row("barrier", {"group": group, "device_ids": [0]}, None, ignores=["device_ids"]),
        Row("all_reduce", {"tensor": x, "op": "most", "group": group}, InvalidParamError, refuses="op is 'most'"),
    ]


@on_group(3)
def test_every_argument(rank: int, size: int, group: dist.ProcessGroup) -> None:
    part = dist.new_group([1, 2])
    if rank:
        Library("torch.distributed", dist, at, rows_of(rank - 1, part)).check()
    dist.barrier()
