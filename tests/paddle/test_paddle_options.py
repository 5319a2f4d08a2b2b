"""Options that differ between ranks are an error of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from on_ranks import on_ranks
from options_that_differ import Case, check, operations, quantized

import alltoallv.paddle as ap
from alltoallv import Communicator


def collectives(comm: Communicator) -> list[Case]:
    x, parts, total = paddle.ones([4]), [paddle.ones([2]), paddle.ones([2])], paddle.distributed.ReduceOp.SUM
    calls: list[Callable[[Any], object]] = [
        lambda op: ap.all_reduce(x, op, comm),
        lambda op: ap.reduce(x, 0, op, comm),
        lambda op: ap.reduce_scatter(paddle.ones([2]), parts, op, comm),
    ]
    rooted: list[Callable[[Any], object]] = [
        lambda root: ap.broadcast(x, root, comm),
        lambda root: ap.reduce(x, root, group=comm),
        lambda root: ap.gather(x, [], root, comm),
        lambda root: ap.scatter(paddle.ones([2]), parts, root, comm),
    ]
    cases: list[Case] = [
        (call, total, paddle.distributed.ReduceOp.MAX, "reduces with sum", "reduces with max") for call in calls
    ]
    return [*cases, *((call, 0, 1, "has root 0", "has root 1") for call in rooted)]


@on_ranks(2)
def test_options_that_differ(comm: Communicator) -> None:
    def tensor(values: Any) -> Any:
        return paddle.to_tensor(np.asarray(values))

    check(comm, [*collectives(comm), *quantized(ap, tensor, paddle, comm), *operations(tensor, comm)])
    ap.barrier(comm)
