"""Bounds of quantized collectives of torch tensors: the reference's bits, over shared memory and over an engine."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from backend_groups import Grouped
from engine_groups import staged, to_numpy, to_torch, views
from on_ranks import on_ranks
from torch.fx.experimental.proxy_tensor import make_fx

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError, PeerMismatchError
from alltoallv.testing import quantized as reference
from alltoallv.testing.golden import assert_bits_equal, dtype_of
from alltoallv.torch.quantized import ops as quantized_rows

F32 = np.float32


def inputs_of(seed: int, ranks: int, count: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    xs = [(rng.normal(size=count) * np.exp(3 * rng.normal(size=count))).astype(F32) for _ in range(ranks)]
    if count > 500:
        xs[0][400], xs[-1][7] = np.inf, np.nan
    return xs


def bounded_cases(comm: Any, place: str = "cpu", formats: tuple[str, ...] = ("int8", "int4")) -> None:
    rank, size = comm.rank, comm.size
    for name in formats:
        for count, out_name, how in (
            (0, "float32", {}),
            (1, "float16", {"gather": "quantized"}),
            (5003, "bfloat16", {"op": "avg"}),
            (5003, "float32", {"gather": "quantized", "op": "avg"}),
            (5003, "float16", {"overflow": "infinity"}),
            (701, "float16", {"group_size": 33} if name.startswith("int") else {}),
        ):
            xs, found = inputs_of(count, size, count), []
            more: dict[str, Any] = {"format": name, **how}
            wanted = reference.quantized_all_reduce(xs, dtype=dtype_of(out_name), bounds=found, **more)[rank]
            x = to_torch(xs[rank]).to(place)
            more |= {"out_dtype": getattr(torch, out_name), "bound": True, "group": comm}
            told, work = at.quantized_all_reduce(x, async_op=True, **more)
            for output, bound, taken in (work.result(), at.quantized_all_reduce(x, **more)):
                assert_bits_equal(to_numpy(output.cpu()), wanted, f"{name} {count} {how}")
                assert_bits_equal(to_numpy(bound.cpu()), found[rank], f"{name} {count} {how}")
                assert taken == name
                assert bound.device == x.device
            assert told.bound.shape == found[rank].shape
        counts, found = [700, *[0] * (size - 2), 41][-size:], []
        xs = inputs_of(5, size, sum(counts))
        wanted = reference.quantized_reduce_scatter(xs, counts, format=name, bounds=found)[rank]
        part = at.quantized_reduce_scatter(to_torch(xs[rank]).to(place), counts, format=name, bound=True, group=comm)
        assert_bits_equal(to_numpy(part.output.cpu()), wanted)
        assert_bits_equal(to_numpy(part.bound.cpu()), found[rank])


def row_cases(comm: Any, place: str = "cpu", formats: tuple[str, ...] = ("int8", "int4")) -> None:
    rank, size = comm.rank, comm.size
    for name in formats:
        sends = np.arange(size * size).reshape(size, size) % 4
        tables = [x.reshape(-1, 70) for x in (inputs_of(r, 1, 70 * sum(sends[r]))[0] for r in range(size))]
        found: list[Any] = []
        wanted = reference.quantized_all_to_all(tables, sends.tolist(), format=name, dtype="float16", bounds=found)
        how: dict[str, Any] = {"format": name, "out_dtype": torch.float16, "bound": True, "group": comm}
        for recvs in (sends[:, rank].tolist(), None):
            x = to_torch(tables[rank]).to(place)
            _, work = at.quantized_all_to_all(x, sends[rank].tolist(), recvs, async_op=True, **how)
            for told in (work.result(), at.quantized_all_to_all(x, sends[rank].tolist(), recvs, **how)):
                assert_bits_equal(to_numpy(told.output.cpu()), wanted[rank])
                assert_bits_equal(to_numpy(told.bound.cpu()), found[rank])


def kept_errors(comm: Any, place: str = "cpu") -> None:
    x = to_torch(np.random.default_rng(comm.rank).normal(size=3000).astype(F32)).to(place)
    seen = set()
    for max_error in (3.0, 0.1):  # mxfp4 has as few bytes as int4, but not on every engine
        told = at.quantized_all_reduce(x, max_error=max_error, group=comm)
        assert told.bound.max() <= max_error
        seen.add(told.format)
    assert len(seen) == 2
    with pytest.raises(InvalidParamError, match=r"but the best bound of a format is.*A2A-1177"):
        at.quantized_all_reduce(x, max_error=1e-5, group=comm)
    for error in (0.5, 0.25):
        part = at.quantized_reduce_scatter(x.view(-1, 50), [60, *[0] * (comm.size - 1)], max_error=error, group=comm)
        assert part.bound.numel() == 0 or part.bound.max() <= error
    rows = at.quantized_all_to_all(x.view(-1, 50), [60, *[0] * (comm.size - 1)], max_error=0.05, group=comm)
    assert rows.bound.numel() == 0 or rows.bound.max() <= 0.05


ALL = ("int8", "int4", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4")


@on_ranks(3)
def test_over_shared_memory(comm: Communicator) -> None:
    bounded_cases(comm, formats=ALL)
    row_cases(comm, formats=ALL)
    kept_errors(comm)


@pytest.mark.parametrize(("size", "way"), [(1, views), (2, staged), (3, views)])
def test_over_an_engine(grouped: Grouped, size: int, way: Any) -> None:
    def run(rank: int, size: int, comm: Any) -> None:
        bounded_cases(comm)
        row_cases(comm)
        kept_errors(comm)
        rows = mock.patch.object(
            quantized_rows, "HostRows", lambda *how: quantized_rows.DeviceRows(*how, torch.device("cpu"))
        )
        with np.errstate(all="ignore"), rows:
            row_cases(comm)

    grouped(size, way)(run)


@on_ranks(2)
def test_what_excludes_a_bound(comm: Communicator) -> None:
    """Gradients, graphs; and ranks of which only one asks."""
    x, leaf = torch.ones(300), torch.ones(300, requires_grad=True)
    for how in ({"bound": True}, {"max_error": 1.0}):
        for call in (at.quantized_all_reduce, at.quantized_reduce_scatter):
            with pytest.raises(
                InvalidParamError, match=rf"requires grad, expected a call without {next(iter(how))}.*A2A-1188"
            ):
                call(leaf.view(2, 150), group=comm, **how)
        with pytest.raises(InvalidParamError, match=rf"requires grad.*without {next(iter(how))}.*A2A-1188"):
            at.quantized_all_to_all(leaf.view(2, 150), [1, 1], group=comm, **how)
    with pytest.raises(PeerMismatchError, match=r"rank \d has (no|a) bound.*A2A-3009"):
        at.quantized_all_reduce(x, bound=comm.rank == 0, group=comm)
    for function in (
        lambda x: at.quantized_all_reduce(x, bound=True, group=comm),
        lambda x: at.quantized_all_to_all(x.view(2, 150), [1, 1], bound=True, group=comm),
    ):
        with pytest.raises(InvalidParamError, match=r"recorded for a graph, expected a call without bound.*A2A-1188"):
            make_fx(function)(x)
