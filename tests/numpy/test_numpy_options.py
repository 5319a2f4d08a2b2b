"""Options that differ between ranks are an error of both, and nobody hangs."""

from __future__ import annotations

import numpy as np
from on_ranks import on_both
from options_that_differ import Case, check, dispatchers, operations, quantized

from alltoallv import Communicator
from alltoallv import numpy as av


def collectives(comm: Communicator) -> list[Case]:
    x, objects = np.ones((2, 4), np.float32), {"group": comm}
    cases: list[Case] = []
    for function in (av.all_reduce, av.reduce, av.reduce_scatter, av.scan):
        call = lambda op, function=function: function(x, op=op, group=comm)  # noqa: E731
        cases.append((call, "sum", "max", "reduces with sum", "reduces with max"))
    for rooted in (av.reduce, av.gather, av.broadcast, av.broadcast_object, av.gather_object):
        call = lambda root, rooted=rooted: rooted(x, root=root, group=comm)  # noqa: E731
        cases.append((call, 0, 1, "has root 0", "has root 1"))
    cases.append((lambda root: av.scatter(x[0].copy(), x, root, **objects), 0, 1, "has root 0", "has root 1"))
    cases.append((lambda root: av.scatter_object([1, 2], root, **objects), 0, 1, "has root 0", "has root 1"))
    exclusive = lambda value: av.scan(x, exclusive=value, group=comm)  # noqa: E731
    cases.append((exclusive, False, True, "has exclusive False", "has exclusive True"))
    return cases


@on_both(2)
def test_options_that_differ(comm: Communicator) -> None:
    cases = [*collectives(comm), *quantized(av, np.asarray, np, comm), *dispatchers(av, np.asarray, comm)]
    check(comm, [*cases, *operations(np.asarray, comm)])
    av.barrier(group=comm)
