"""Calls of all functions of `alltoallv.torch` on two ranks, for tests of where they are called."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator

Function = Callable[[Tensor], Tensor]
SENDS = [[1, 3], [2, 2]]  # rows that rank r sends to rank j
NO_GRADIENT = "out", "gaps", "quantized out", "learnt handle"  # refuse an input that requires one
RECVS = [[row[j] for row in SENDS] for j in range(2)]


def input_of(comm: Communicator) -> Tensor:
    return torch.arange(16, dtype=torch.float32, device="cpu").view(4, 4) + 100 * comm.rank


def functions_of(comm: Communicator) -> dict[str, Function]:
    """Calls on an input of 4 rows of 4."""
    sends, recvs = SENDS[comm.rank], RECVS[comm.rank]
    rows, to = sum(recvs), {"group": comm}
    zeros = functools.partial(torch.zeros, dtype=torch.float32, device="cpu")
    experts = {
        "local_count": [[1, 0, 2, 1], [2, 0, 1, 1]][comm.rank],
        "global_count": [[1, 0, 2, 0], [2, 1, 1, 1]][comm.rank],
    }

    def tensors(x: Tensor) -> Tensor:
        counts = [torch.tensor(values, device="cpu") for values in (sends, recvs)]
        return at.all_to_all_v(x, *counts, unit="row", **to) * 2

    def out(x: Tensor) -> Tensor:
        y = zeros(rows, 4) - 1
        at.all_to_all_v(x * 2, sends, recvs, unit="row", out=y, **to)
        return y * 2

    def gaps(x: Tensor) -> Tensor:
        y = zeros(rows + 3, 4) - 1
        at.all_to_all_v(x, sends, recvs, rdispls=[1, 2 + recvs[0]], unit="row", out=y, **to)
        return y * 2

    def handle(x: Tensor) -> Tensor:
        y, work = at.all_to_all_v(x, sends, recvs, unit="row", async_op=True, **to)
        assert work.wait()
        assert work.is_completed()
        return y * 2

    def learnt_handle(x: Tensor) -> Tensor:
        y, work = at.all_to_all_v(x, sends, unit="row", async_op=True, **to)
        assert y is None
        result: Tensor = work.result()
        return result * 2

    def single(x: Tensor) -> Tensor:
        y, z = zeros(4, 4), zeros(rows, 4)
        at.all_to_all_single(y, x, **to)
        work = at.all_to_all_single(z, x, recvs, sends, async_op=True, **to)
        work.wait()
        return torch.cat([y, z])

    def lists(x: Tensor) -> Tensor:
        ys = [zeros(n, 4) for n in recvs]
        at.all_to_all(ys, list(x.split(sends)), **to)
        return torch.cat(ys) * 2

    def gathered(x: Tensor) -> Tensor:
        y = zeros(8, 4)
        at.all_gather_into_tensor(y, x, **to)
        return y * 2

    def quantized_out(x: Tensor) -> Tensor:
        y = zeros(4, 4)
        at.quantized_all_reduce(x, out=y, **to)
        z, work = at.quantized_reduce_scatter(x, async_op=True, **to)
        work.wait()
        return torch.cat([y, z])

    def memory(x: Tensor) -> Tensor:
        y = at.empty((4, 4), torch.float32)
        y.copy_(x)
        return y * 2

    return {
        "counts": lambda x: at.all_to_all_v(x, sends, recvs, unit="row", **to) * 2,
        "elements": lambda x: (
            at.all_to_all_v(x, [n * 4 for n in sends], [n * 4 for n in recvs], unit="element", **to) * 2
        ),
        "tensors": tensors,
        "learnt": lambda x: at.all_to_all_v(x, sends, unit="row", **to) * 2,
        "out": out,
        "gaps": gaps,
        "dimensions": lambda x: at.all_to_all_nd(x, 1, 0, scatter_sizes=[3, 1], **to) * 2,
        "handle": handle,
        "learnt handle": learnt_handle,
        "single": single,
        "lists": lists,
        "gathered": gathered,
        "told": lambda x: at.exchange_counts(sends, **to) + x[:2, 0],
        "scattered": lambda x: at.global_scatter(x, **experts, **to) * 2,
        "there and back": lambda x: at.global_gather(at.global_scatter(x, **experts, **to) * 2, **experts, **to),
        "quantized": lambda x: at.quantized_all_reduce(x * 2, **to),
        "quantized half": lambda x: at.quantized_all_reduce(x.half(), gather="quantized", **to) * 2,
        "quantized out": quantized_out,
        "quantized rows": lambda x: at.quantized_all_to_all(x, sends, recvs, **to) * 2,
        "memory": memory,
        "functional": lambda x: at.functional.all_to_all_single(at.functional.all_reduce(x, comm), recvs, sends, comm),
    }
