"""The functions with torch.distributed's signatures, against the reference, over every engine in host memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from backend_groups import Grouped
from engine_groups import DTYPES, staged, to_numpy, to_torch, views
from on_ranks import on_ranks

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv._calls.collectives import COMPLEX, FLOATS, OTHERS
from alltoallv.errors import InvalidParamError, InvalidTensorError
from alltoallv.testing import golden, reference
from alltoallv.torch.eager.calls import REDUCE_OPS

REDUCED = [name for name in DTYPES if not name.startswith(("float8", "complex"))]
COUNTS = [2, 0, 5]  # rows that each rank gives or gets


def inputs_of(dtype: str, rows: list[int]) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(7)
    return [random.integers(0, 3, (n, 2)).astype(golden.dtype_of(dtype)) for n in rows]


def finished(call: Callable[..., Any], *args: Any, group: Any, async_op: bool) -> None:
    work = call(*args, group=group, async_op=async_op)
    assert (work is not None) == async_op
    if async_op:
        assert work.wait()
        assert work.is_success()


def same(tensor: torch.Tensor, expected: np.ndarray[Any, Any]) -> bool:
    return to_numpy(tensor).tobytes() == expected.tobytes()


@pytest.mark.parametrize("way", [views, staged])
def test_over_an_engine(grouped: Grouped, way: Any) -> None:
    """Every function and dtype; outputs are full of something else before, and some not contiguous."""

    def run(rank: int, size: int, comm: Any) -> None:
        for number, dtype in enumerate(DTYPES):
            later = {"group": comm, "async_op": bool(number % 2)}
            uneven = inputs_of(dtype, COUNTS)
            outs = [torch.ones(n, 2).to(getattr(torch, dtype)) for n in COUNTS]
            finished(at.all_gather, outs, to_torch(uneven[rank]), **later)
            assert all(map(same, outs, uneven)), dtype
            even = inputs_of(dtype, [size] * size)
            for src in range(size):
                wide = to_torch(np.repeat(even[rank], 2, axis=1))[:, ::2]  # not contiguous
                finished(at.broadcast, wide, src, **later)
                assert same(wide, even[src]), dtype
            gathered = torch.ones(size * size, 2).to(wide.dtype)
            finished(at.all_gather_into_tensor, gathered, to_torch(even[rank]), **later)
            assert same(gathered, np.concatenate(even)), dtype
            if dtype in REDUCED:
                out = torch.ones(1, 2).to(wide.dtype)
                finished(at.reduce_scatter_tensor, out, to_torch(even[rank]), **later)
                assert same(out, reference.reduce_scatter(even)[rank]), dtype
        for async_op in (False, True):
            finished(at.barrier, group=comm, async_op=async_op)

    grouped(3, way)(run)


def defined(op: str, dtype: str) -> bool:
    if op in ("band", "bor", "bxor"):
        return dtype in OTHERS
    return dtype in FLOATS or (dtype in OTHERS and op != "avg") or (dtype in COMPLEX and op in ("sum", "avg"))


@pytest.mark.parametrize(("way", "length"), [(views, 37), (views, 9001), (staged, 37)])  # in one step, and in two
def test_reductions(grouped: Grouped, way: Any, length: int) -> None:
    """Those that an engine has, and those that are added in the order of ranks: every dtype and operation."""

    def run(rank: int, size: int, comm: Any) -> None:
        rng = np.random.default_rng(length)
        parts = [length - 5 * (size - 1), *[5] * (size - 1)][::-1]
        with np.errstate(all="ignore"):
            for number, (name, (kind, op)) in enumerate(itertools.product(DTYPES, REDUCE_OPS.items())):
                if not defined(op, name):
                    continue
                inputs = [golden.fill(rng, length, name) for _ in range(size)]
                later = {"group": comm, "async_op": bool(number % 2)}
                x = to_torch(inputs[rank])
                out = torch.empty(parts[rank], dtype=x.dtype)
                finished(at.reduce_scatter, out, list(x.split(parts)), kind, **later)
                expected = reference.reduce_scatter(inputs, op, parts)[rank]
                golden.assert_bits_equal(to_numpy(out), expected, f"reduce_scatter {op} of {name}")
                finished(at.all_reduce, x, kind, **later)
                golden.assert_bits_equal(
                    to_numpy(x), reference.all_reduce(inputs, op)[rank], f"all_reduce {op} of {name}"
                )

    grouped(3, way)(run)


ERRORS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "all_gather": (lambda c: at.all_gather([torch.ones(2)], torch.ones(2), c), InvalidParamError, "has 1 tensors"),
    "complex": (lambda c: at.all_reduce(torch.ones(2) * 1j, dist.ReduceOp.MAX, c), InvalidParamError, "SUM or AVG"),
    "bitwise": (lambda c: at.all_reduce(torch.ones(2), dist.ReduceOp.BAND, c), InvalidParamError, "bool or an"),
    "no op": (lambda c: at.all_reduce(torch.ones(2), "sum", c), InvalidParamError, "expected a torch.distributed"),
    "reduce_scatter": (
        lambda c: at.reduce_scatter(torch.ones(3), [torch.ones(2)] * 2, group=c),
        InvalidTensorError,
        "output has 3 elements, expected the 2",
    ),
    "reduce_scatter_tensor": (
        lambda c: at.reduce_scatter_tensor(torch.ones(2), torch.ones(3), group=c),
        InvalidTensorError,
        "input has shape",
    ),
    "no list": (lambda c: at.all_gather(torch.ones(2, 2), torch.ones(2), c), InvalidTensorError, "list of tensors"),
    "no tensor": (lambda c: at.all_reduce([1.0], group=c), TypeError, "expected a torch.Tensor"),
    "no root": (lambda c: at.broadcast(torch.ones(2), group=c), InvalidParamError, "expected one of them"),
    "src": (lambda c: at.broadcast(torch.ones(2), 7, c), InvalidParamError, "src is 7, expected 0 <= src < 2"),
    "dst": (lambda c: at.reduce(torch.ones(2), -1, group=c), InvalidParamError, "dst is -1, expected 0 <= dst < 2"),
    "gather": (lambda c: at.gather(torch.ones(2), dst=2, group=c), InvalidParamError, "dst is 2, expected 0 <= dst"),
    "scatter": (lambda c: at.scatter(torch.ones(2), src=2, group=c), InvalidParamError, "src is 2, expected 0 <= src"),
    "group_dst": (
        lambda c: at.gather(torch.ones(2), group_dst=5, group=c),
        InvalidParamError,
        "group_dst is 5, expected 0 <= group_dst < 2",
    ),
}


@on_ranks(2)
def test_errors_leave_the_communicator_usable(comm: Communicator) -> None:
    for call, kind, text in ERRORS.values():
        with pytest.raises(kind, match=text):
            call(comm)
    at.barrier(comm)


@on_ranks(3, communicator=False)
def test_ranks_of_a_process_group(rank: int, size: int, tmp_path: Path) -> None:
    """``src`` is a number in the job, ``group_src`` in the group; outside the group a warning and None."""
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{tmp_path / 'store'}")
    group = dist.new_group([1, 2])
    if rank == 0:
        with pytest.warns(UserWarning, match="not a member"):
            assert at.broadcast(torch.ones(1), 2, group) is None
    else:
        for named in ({"src": 2}, {"group_src": 1}):
            x = torch.tensor([float(rank)])
            at.broadcast(x, group=group, **named)
            assert x.tolist() == [2.0]
        with pytest.raises(InvalidParamError, match=r"expected one of the group's ranks.*A2A-1169"):
            at.broadcast(x, 0, group)
    compiled = torch.compile(lambda x: (at.all_reduce(x), x * 2)[1], backend="eager")
    assert compiled(torch.ones(1)).tolist() == [2.0 * size]
    dist.destroy_process_group()
