"""What Paddle's MoE gates compute on GPUs only: the operators of ``paddle.distributed.models.moe.utils``, on CPU.

They have the values of Paddle's kernels where these run one element after the other. None has a gradient, as in Paddle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
from paddle import Tensor

from alltoallv.errors import InvalidTensorError
from alltoallv.paddle.tensors import check_tensor


def _integers(name: str, x: Tensor) -> npt.NDArray[Any]:
    check_tensor(name, x)
    if x.dtype not in (paddle.int32, paddle.int64):
        raise InvalidTensorError(f"{name} has dtype {x.dtype}, expected paddle.int32 or paddle.int64", 13, id=2099)
    array: npt.NDArray[Any] = x.numpy()
    return array


def _number_count(numbers: Tensor, upper_range: int) -> Tensor:
    """Returns how often each of 0 to ``upper_range`` - 1 occurs; others, such as -1, are not counted."""
    values = _integers("numbers", numbers)
    chosen = values[(values >= 0) & (values < upper_range)]
    return paddle.to_tensor(np.bincount(chosen, minlength=upper_range).astype(values.dtype))


def _assign_pos(x: Tensor, cum_count: Tensor) -> Tensor:
    """Returns the places in ``x``, taken flat, of each expert's number, expert by expert, the last place first.

    ``cum_count[e]`` is how many of experts 0 to e there are. Places of -1 are left out.
    """
    values, ends = _integers("x", x).reshape(-1), _integers("cum_count", cum_count)
    places = np.empty(int(ends[-1]), ends.dtype)
    for expert, end in enumerate(ends):
        chosen = np.flatnonzero(values == expert)[::-1]
        places[end - chosen.size : end] = chosen
    return paddle.to_tensor(places)


def _random_routing(topk_idx: Tensor, topk_value: Tensor, prob: Tensor, topk: int = 2) -> Tensor:
    """Returns ``topk_idx`` with -1 as a token's second expert where twice its value is below ``prob``."""
    if topk != 2:
        raise RuntimeError("only topk=2 is supported now")
    check_tensor("topk_idx", topk_idx)
    dropped = topk * topk_value[:, topk - 1] < prob
    last = paddle.where(dropped, paddle.full_like(topk_idx[:, topk - 1], -1), topk_idx[:, topk - 1])
    return paddle.concat([topk_idx[:, : topk - 1], last.unsqueeze(1)], axis=1)


def _limit_by_capacity(expert_count: Tensor, capacity: Tensor, n_worker: int) -> Tensor:
    """Returns the counts of ``n_worker`` workers for each expert, cut to what its capacity leaves, worker by worker."""
    counts, limits = _integers("expert_count", expert_count), _integers("capacity", capacity)
    rows = counts.reshape(n_worker, limits.size)
    left = limits - (np.cumsum(rows, axis=0) - rows)
    return paddle.to_tensor(np.clip(left, 0, rows).astype(counts.dtype).reshape(counts.shape))


def _prune_gate_by_capacity(gate_idx: Tensor, expert_count: Tensor, n_expert: int, n_worker: int) -> Tensor:
    """Returns ``gate_idx`` with -1 where an expert's number occurs more often than ``expert_count`` has for it."""
    gates, limits = _integers("gate_idx", gate_idx), _integers("expert_count", expert_count).reshape(-1)
    if limits.size != n_expert * n_worker:
        raise InvalidTensorError(f"expert_count has {limits.size} elements, expected {n_expert} * {n_worker}", id=2100)
    values = gates.reshape(-1).copy()
    for expert, limit in enumerate(limits):
        values[np.flatnonzero(values == expert)[max(int(limit), 0) :]] = -1
    return paddle.to_tensor(values.reshape(gates.shape))
