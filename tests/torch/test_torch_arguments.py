"""alltoallv.torch's functions with torch.distributed's names take each of torch's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from backend_groups import on_group
from documented_arguments import Library, Row
from torch import Tensor

import alltoallv.torch as at
from alltoallv.errors import InvalidParamError
from alltoallv.testing import Ranks

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


SEVEN = timedelta(seconds=7)


def about(group: Any) -> tuple[Any, ...]:
    """Returns limit, description, ranks and a sum of a new group; None for another rank's."""
    if not isinstance(group, at.backend.AllToAllVGroup):
        return ()
    x = torch.full((2,), group.rank() + 1.0)
    dist.all_reduce(x, group=group)
    return group.timeout, group.group_desc, dist.get_process_group_ranks(group), x.tolist()


@on_group(2)
def test_every_argument_of_groups(rank: int, size: int, group: dist.ProcessGroup) -> None:
    """``pg_options`` are options of an accelerator's engine, which is not here."""
    usual, parents = dist.distributed_c10d.default_pg_timeout, timedelta(seconds=60)

    def new(want: Sequence[Any], **arguments: Any) -> Row:
        return Row("new_group", arguments, tuple(want), about)

    def split(want: Sequence[Any], **arguments: Any) -> Row:
        return Row("split_group", {"parent_pg": group, "split_ranks": [[0, 1]]} | arguments, want, lambda made: (
            *about(made)[:1], *about(made)[2:], *([made.group_desc] if "group_desc" in arguments else ())
        ))  # fmt: skip

    both, sums = [0, 1], [3.0, 3.0]
    alone = dist.new_group([0])  # `about` of a rank that is in no group
    assert bool(about(alone)) == (rank == 0)
    rows = [
        new((SEVEN, "mine", both, sums), ranks=both, timeout=SEVEN, backend="alltoallv", group_desc="mine"),
        new((usual, "mine", both, sums), pg_options=object(), group_desc="mine"),
        new((usual, "own", [rank], [1.0, 1.0]), ranks=[rank], use_local_synchronization=True, group_desc="own"),
        split((SEVEN, both, sums), timeout=SEVEN),
        split((parents, both, sums, "part"), pg_options=object(), group_desc="part"),
    ]
    without = [("new_group", "device_id"), ("new_group", "sort_ranks"), ("split_group", "backend")]
    Library("torch.distributed", dist, dist, rows).check(without)
    dist.barrier()


def test_every_argument_of_init(ranks: Ranks, tmp_path: Path) -> None:
    def work(rank: int, size: int, folder: str) -> None:
        def made(_: Any) -> Any:
            found = about(dist.group.WORLD)
            dist.destroy_process_group()
            return found[0], *found[2:]

        def row(number: int, limit: timedelta, **arguments: Any) -> Row:
            at_file = {"init_method": f"file://{folder}/{number}", "rank": rank, "world_size": size}
            return Row("init_process_group", at_file | arguments, (limit, [0, 1], [3.0, 3.0]), made)

        usual = dist.distributed_c10d._get_default_timeout("gloo")
        store = dist.FileStore(f"{folder}/store", size)
        rows = [
            row(1, SEVEN, backend="alltoallv", timeout=SEVEN),
            row(2, usual, backend="alltoallv", pg_options=object(), group_name="mine"),
            row(3, usual, backend="alltoallv", init_method=None, store=store),
        ]
        Library("torch.distributed", dist, dist, rows).check(
            [("init_process_group", name) for name in ("device_id", "_ranks")]
        )

    ranks(2, communicator=False)(work, str(tmp_path))
