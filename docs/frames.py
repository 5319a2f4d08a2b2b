"""Counts the Python functions of this package that one warm call enters, on rank 0, and shows where they are too many.

python -m alltoallv run -n 2 docs/frames.py        # -v lists the functions
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import alltoallv
import alltoallv.numpy as an
import alltoallv.torch as at
from alltoallv import AllToAllVOperation, AllToAllVParam

ROOT = str(Path(alltoallv.__file__).parent)


def entered(call: Callable[[], Any]) -> list[str]:
    """Returns the functions that the fourth call enters."""
    for _ in range(3):
        call()
    found: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(ROOT):
            found.append(f"{path[len(ROOT) + 1 :]} {frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def calls(rank: int, size: int) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Returns the calls by name, each with the most functions that it may enter."""
    x, counts = np.ones((size * 2, 4), np.float32), [2] * size
    rows, into = list(x.reshape(size, 2, 4)), list(np.empty((size, 2, 4), np.float32))
    part, own = np.empty((2, 4), np.float32), np.empty_like(x)
    t, tracked = torch.ones(size * 2, 4), torch.ones(size * 2, 4, requires_grad=True)
    chunks, outs, out = list(t.chunk(size)), list(torch.empty(size, 2, 4)), torch.empty_like(t)
    piece, feedback, gaps = torch.empty(2, 4), at.ErrorFeedback(), torch.empty(4, size * 2).t()
    displs = [8 * j for j in range(size)]
    param = AllToAllVParam(
        rank=rank, rank_size=size, send_counts=[8] * size, sdispls=displs, recv_counts=[8] * size, rdispls=displs
    )
    operation = AllToAllVOperation(param)
    numpy: dict[str, Callable[[], Any]] = {
        "all_to_all_v": lambda: an.all_to_all_v(x, counts, counts),
        "all_to_all_v, strided": lambda: an.all_to_all_v(x[:, ::2], counts, counts),
        "all_to_all_v, counts learnt": lambda: an.all_to_all_v(x, counts),
        "all_to_all_single": lambda: an.all_to_all_single(own, x),
        "all_to_all": lambda: an.all_to_all(into, rows),
        "all_gather": lambda: an.all_gather(x),
        "all_reduce": lambda: an.all_reduce(x),
        "reduce_scatter": lambda: an.reduce_scatter(x),
        "reduce": lambda: an.reduce(x),
        "broadcast": lambda: an.broadcast(own),
        "gather": lambda: an.gather(x),
        "scatter": lambda: an.scatter(part, x),
        "barrier": an.barrier,
    }
    functions: dict[str, Callable[[], Any]] = {
        "all_to_all_v": lambda: at.all_to_all_v(t, counts, counts),
        "all_to_all_v, strided": lambda: at.all_to_all_v(gaps, counts, counts),
        "all_to_all_v, counts learnt": lambda: at.all_to_all_v(t, counts),
        "all_to_all_v, learnt, later": lambda: at.all_to_all_v(t, counts, async_op=True)[1].wait(),
        "all_to_all_single": lambda: at.all_to_all_single(out, t),
        "all_to_all": lambda: at.all_to_all(outs, chunks),
        "all_reduce": lambda: at.all_reduce(out),
        "reduce": lambda: at.reduce(out, 0),
        "reduce_scatter": lambda: at.reduce_scatter(piece, chunks),
        "broadcast": lambda: at.broadcast(out, 0),
        "all_gather": lambda: at.all_gather(outs, chunks[0]),
        "gather": lambda: at.gather(chunks[0], outs if rank == 0 else None),
        "scatter": lambda: at.scatter(piece, chunks if rank == 0 else None),
    }
    backend: dict[str, Callable[[], Any]] = {
        "all_to_all_single": lambda: dist.all_to_all_single(out, t),
        "all_to_all_single, later": lambda: dist.all_to_all_single(out, t, async_op=True).wait(),
        "all_to_all_single, strided": lambda: dist.all_to_all_single(gaps, t),
        "all_to_all": lambda: dist.all_to_all(outs, chunks),
        "all_reduce": lambda: dist.all_reduce(out),
        "all_reduce, strided": lambda: dist.all_reduce(gaps),
        "reduce": lambda: dist.reduce(out, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(piece, chunks),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(piece, t),
        "broadcast": lambda: dist.broadcast(out, 0),
        "all_gather": lambda: dist.all_gather(outs, chunks[0]),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(out, chunks[0]),
        "gather": lambda: dist.gather(chunks[0], outs if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(piece, chunks if rank == 0 else None, 0),
        "barrier": dist.barrier,
    }
    gradients: dict[str, Callable[[], Any]] = {
        "all_to_all_v": lambda: at.all_to_all_v(tracked, counts, counts),
        "all_to_all_v, counts learnt": lambda: at.all_to_all_v(tracked, counts),
        "all_to_all_v, there and back": lambda: at.all_to_all_v(tracked, counts, counts).sum().backward(),
    }
    quantized: dict[str, Callable[[], Any]] = {
        "quantized_all_reduce, feedback": lambda: at.quantized_all_reduce(t, error_feedback=feedback),
        "quantized_all_reduce, gradient": lambda: at.quantized_all_reduce(tracked),
    }
    ids, gates = torch.tensor([[0, 3]] * 6), torch.ones(6, 2)
    tokens, weighed = torch.ones(6, 8), torch.ones(6, 8, requires_grad=True)
    moe, moe_numpy, moe_codes = at.nn.MoEDispatcher(4), an.MoEDispatcher(4), at.nn.MoEDispatcher(4, payload="int8")

    def to_experts(dispatcher: Any, *given: Any) -> Any:
        rows, _, state = dispatcher.dispatch(*given)
        return dispatcher.combine(rows, state)

    experts: dict[str, Callable[[], Any]] = {
        "torch": lambda: to_experts(moe, tokens, ids, gates),
        "torch, int8 codes": lambda: to_experts(moe_codes, tokens, ids, gates),
        "torch, gradient": lambda: to_experts(moe, weighed, ids, gates),
        "numpy": lambda: to_experts(moe_numpy, tokens.numpy(), ids.numpy(), gates.numpy()),
    }
    limits: list[tuple[str, int, dict[str, Callable[[], Any]]]] = [
        ("numpy", 6, numpy),
        ("torch", 6, functions),
        ("torch.distributed", 8, backend),
        ("torch, gradient", 12, gradients),
        ("numpy", 10, {"quantized_all_reduce": lambda: an.quantized_all_reduce(x)}),
        ("torch", 10, {"quantized_all_reduce": lambda: at.quantized_all_reduce(t)}),
        ("torch", 16, quantized),
        ("ATB", 5, {"execution": lambda: operation(t)}),
        ("MoE dispatch and combine", 60, experts),
    ]
    return {f"{kind}: {name}": (most, call) for kind, most, those in limits for name, call in those.items()}


def main() -> None:
    dist.init_process_group("alltoallv")
    rank, size = dist.get_rank(), dist.get_world_size()
    too_many = []
    for name, (most, call) in calls(rank, size).items():
        found = entered(call)
        if rank == 0:
            print(f"{name:50} {len(found):3} of {most:2}", *(["\n    ".join(["", *found])] if "-v" in sys.argv else []))
        if rank == 0 and len(found) > most:
            too_many.append(name)
    dist.destroy_process_group()
    if too_many:
        sys.exit(f"too many functions: {'; '.join(too_many)}")


if __name__ == "__main__":
    main()
