"""The examples in the documentation of torch's all_to_all, Paddle's alltoall, alltoall_single, global_scatter and
global_gather, and MindSpore's all_gather_into_tensor, with the numbers that the frameworks print.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from case import Arguments, Case, exchanged, experts, filled, gathered, lists, single
from right import A, G, S, V

# --- torch.distributed.all_to_all

SPLITS = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]]
TOLD = [[2, 3, 2, 2], [2, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 1]]
INPUTS = [np.arange(6), np.arange(10, 19), np.arange(20, 25), np.arange(30, 37)]
UNEVEN = [
    [[0, 1], [10, 11, 12], [20, 21], [30, 31]],
    [[2, 3], [13, 14], [22], [32, 33]],
    [[4], [15, 16], [23], [34, 35]],
    [[5], [17, 18], [24], [36]],
]
FLAT = [[value for part in parts for value in part] for parts in UNEVEN]


def split(array: Any, sizes: list[int]) -> list[Any]:
    return np.split(array, list(accumulate(sizes))[:-1])


def of_lists(inputs: list[Any], sends: list[list[int]], recvs: list[list[int]], **more: Any) -> Callable[[int], Any]:
    return lambda rank: {
        "output_tensor_list": [filled(n, dtype=inputs[0].dtype.name) for n in recvs[rank]],
        "input_tensor_list": split(inputs[rank], sends[rank]),
        **more,
    }


EVEN = [np.arange(4) + 4 * rank for rank in range(4)]
COMPLEX = [(x + 1).astype("complex64") * (1 + 1j) for x in EVEN]
ONES = [[1] * 4] * 4


def scatter(source: int) -> Callable[[int], Arguments]:
    """Rank ``source`` scatters its list: what an all_to_all is, one after the other."""

    def arguments(rank: int) -> Arguments:
        sends = SPLITS[rank] if rank == source else [0] * 4
        recvs = [TOLD[rank][source] if j == source else 0 for j in range(4)]
        return {
            "input": INPUTS[rank] if rank == source else INPUTS[rank][:0],
            "send_counts": sends,
            "recv_counts": recvs,
        }

    return arguments


TORCH = [
    Case(A, "torch's example", of_lists(EVEN, ONES, ONES), lists, 4,
         printed=[[[r], [r + 4], [r + 8], [r + 12]] for r in range(4)]),
    Case(A, "torch's uneven example", of_lists(INPUTS, SPLITS, TOLD, async_op=True), lists, 4, printed=UNEVEN),
    Case(S, "torch's uneven example", lambda rank: {
        "output": filled(len(FLAT[rank]), dtype="int64"), "input": INPUTS[rank], "output_split_sizes": TOLD[rank],
        "input_split_sizes": SPLITS[rank]}, single, 4, printed=FLAT),
    *[Case(V, f"torch's uneven example{learnt}", lambda rank, learnt=learnt: {
        "input": INPUTS[rank], "send_counts": SPLITS[rank], "recv_counts": None if learnt else TOLD[rank]},
        exchanged, 4, printed=FLAT) for learnt in ("", ", learnt")],
    *[Case(V, f"torch's uneven example, what comes from rank {source}", scatter(source), exchanged, 4,
           printed=[UNEVEN[rank][source] for rank in range(4)]) for source in range(4)],
    Case(A, "torch's complex example", of_lists(COMPLEX, ONES, ONES), lists, 4,
         printed=[[[(1 + 1j) * (n + r)] for n in (1, 5, 9, 13)] for r in range(4)]),
]  # fmt: skip

# --- paddle.distributed.alltoall_single and alltoall


def paddle_single(rows: Callable[[int], Any]) -> Callable[[int], Arguments]:
    return lambda rank: {
        "output": filled(2 * (rank + 1), 2), "input": rows(rank), "output_split_sizes": [rank + 1] * 2,
        "input_split_sizes": [1, 2],
    }  # fmt: skip


SHAPES = [[(2, 3), (1,)], [(3, 2), (1, 4)]]  # of what rank r sends to rank j, numbered from 1
STARTS = [[1, 7], [8, 14]]


def paddle_shapes(rank: int) -> Arguments:
    ins = [np.arange(np.prod(shape)).reshape(shape) + STARTS[rank][j] for j, shape in enumerate(SHAPES[rank])]
    outs = [(2, 3), (3, 2)] if rank == 0 else [(1,), (1, 4)]
    return {"input_tensor_list": ins, "output_tensor_list": [filled(*shape, dtype="int64") for shape in outs]}


PADDLE = [
    Case(S, "Paddle's example", lambda rank: {"output": filled(2, dtype="int64"), "input": np.arange(2) + 2 * rank},
        single,
         2, printed=[[0, 2], [1, 3]]),
    Case(S, "Paddle's uneven example", lambda rank: paddle_single(lambda r: filled(3,
        2) * 0 + r)(rank) | {"async_op": True},
         single, 2, printed=[[[0, 0], [1, 1]], [[0, 0], [0, 0], [1, 1], [1, 1]]]),
    # The page's rows of one source are all alike; different ones show their order too.
    Case(S, "Paddle's uneven example with other rows",
         paddle_single(lambda rank: (np.arange(6) + 10 * rank).reshape(3, 2).astype("float32")), single, 2,
         printed=[[[0, 1], [10, 11]], [[2, 3], [4, 5], [12, 13], [14, 15]]]),
    Case(A, "Paddle's example of several shapes", paddle_shapes, lists, 2, printed=[
        [[[1, 2, 3], [4, 5, 6]], [[8, 9], [10, 11], [12, 13]]], [[7], [[14, 15, 16, 17]]]]),
]  # fmt: skip

# --- paddle.distributed.utils.global_scatter and global_gather, whose gradients are of the sum of the squares

COUNTS = [[2, 1, 1, 1], [1, 1, 2, 1]]
BUFFER = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
EXPERTS = {
    "global_gather": [[[1, 2], [3, 4], [7, 8], [1, 2], [7, 8]], [[5, 6], [9, 10], [3, 4], [5, 6], [9, 10]]],
    "global_scatter": [[[1, 2], [3, 4], [1, 2], [5, 6], [3, 4]], [[7, 8], [5, 6], [7, 8], [9, 10], [9, 10]]],
}


def buffer(rank: int) -> Arguments:
    return {"x": np.array(BUFFER, "float32"), "local_count": COUNTS[rank], "global_count": COUNTS[rank]}


def doubled(all_: list[Arguments]) -> list[Any]:
    return [2 * a["x"] for a in all_]


for function, printed in EXPERTS.items():
    example = Case(function, "Paddle's example", buffer, experts(function), 2, printed=printed)
    PADDLE.append(example)
    PADDLE += [
        replace(example, what=f"Paddle's example, gradient, counts as {kind}", want=doubled, gradient="x", counts=kind,
                needs=("gradients",), printed=[(2 * np.array(BUFFER)).tolist()] * 2)
        for kind in ("list", "array", "tensor")
    ]  # fmt: skip

# --- mindspore.mint.distributed.all_gather_into_tensor

MINDSPORE = [
    Case(G, "MindSpore's example", lambda rank: {"output_tensor": filled(4, 8) * 0, "input_tensor": filled(2, 8) / 77},
        gathered,
         2, printed=[np.ones((4, 8)).tolist()] * 2)
]  # fmt: skip

SEEDS = [*TORCH, *PADDLE, *MINDSPORE]
