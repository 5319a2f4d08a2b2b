"""Measures sequence_to_heads and heads_to_sequence beside the contiguous exchange of the same bytes, and permutes.

python -m alltoallv run -n 2 --no-prefix docs/measure_dimensions.py [CALLS]

Three calls in turn, each of them first in a third of the rounds: the exchange of rows; a contiguous all_to_all_v;
permute, all_to_all_single, permute. The figures are medians of the ratios of a round, whose noise is the same.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator

# batch, part of the sequence, heads, width; dtype
CASES = [
    ((1, 64, 16, 64), torch.bfloat16),
    ((1, 1024, 16, 64), torch.bfloat16),
    ((1, 4096, 16, 128), torch.bfloat16),
    ((2, 4096, 32, 128), torch.bfloat16),
    ((2, 4096, 16, 128), torch.float32),
]


def permuted_to_heads(x: Tensor, comm: Communicator) -> Tensor:
    batch, part, heads, width = x.shape
    sent = x.view(batch, part, comm.size, heads // comm.size, width).permute(2, 0, 1, 3, 4).contiguous()
    came = at.empty(sent.shape, sent.dtype)
    at.all_to_all_single(came, sent, group=comm)
    return came.permute(1, 0, 2, 3, 4).reshape(batch, comm.size * part, heads // comm.size, width)


def permuted_to_sequence(x: Tensor, comm: Communicator) -> Tensor:
    batch, length, heads, width = x.shape
    sent = x.view(batch, comm.size, length // comm.size, heads, width).permute(1, 0, 2, 3, 4).contiguous()
    came = at.empty(sent.shape, sent.dtype)
    at.all_to_all_single(came, sent, group=comm)
    return came.permute(1, 2, 0, 3, 4).reshape(batch, length // comm.size, comm.size * heads, width)


def contiguous(x: Tensor, comm: Communicator) -> Tensor:
    equal = [x.numel() // comm.size] * comm.size
    return at.all_to_all_v(x.view(-1), equal, equal, unit="element", group=comm)


def seconds(call: Callable[[Tensor, Communicator], object], x: Tensor, comm: Communicator) -> float:
    """Of a call that all ranks begin together and have ended."""
    at.barrier(group=comm)
    begin = time.perf_counter()
    call(x, comm)
    at.barrier(group=comm)
    return time.perf_counter() - begin


def in_turn(
    calls: Sequence[Callable[[Tensor, Communicator], object]], first: int, x: Tensor, comm: Communicator
) -> list[float]:
    """Returns the seconds of each call, of which the ``first`` is made first."""
    order = [(first + i) % len(calls) for i in range(len(calls))]
    found = {i: seconds(calls[i], x, comm) for i in order}
    return [found[i] for i in range(len(calls))]


def main(calls: int) -> None:
    comm = Communicator.from_env("default:1024")  # MB: of all outputs that live at once
    torch.set_num_threads(1)
    if comm.rank == 0:
        print(f"{comm.size} ranks, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    for shape, dtype in CASES:
        x = at.empty(shape, dtype)
        x.copy_(torch.randn(shape))
        y = at.sequence_to_heads(x, comm)
        assert torch.equal(permuted_to_heads(x, comm), y)
        assert torch.equal(permuted_to_sequence(y, comm), x)
        for ours, permuted, given in (
            (at.sequence_to_heads, permuted_to_heads, x),
            (at.heads_to_sequence, permuted_to_sequence, y),
        ):
            number = calls if x.nbytes < 1 << 24 else calls // 4
            rounds = [in_turn((ours, contiguous, permuted), i % 3, given, comm) for i in range(number)]
            if comm.rank == 0:
                kept = rounds[number // 10 :]
                own = statistics.median(a for a, _, _ in kept) * 1e3
                beside, faster = (
                    statistics.median(each) for each in zip(*((a / b, c / a) for a, b, c in kept), strict=True)
                )
                print(
                    f"{ours.__name__} of {x.nbytes / 2**20:.3g} MiB: {own:.3f} ms, {beside:.2f} times the contiguous "
                    f"exchange, {faster:.2f} times as fast as with permutes"
                )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
