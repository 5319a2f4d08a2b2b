"""A communicator over the engine of a group, as on a GPU, and what tests of it share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from backend_groups import joined
from torch import Tensor

import alltoallv.torch as at
from alltoallv import Communicator
from alltoallv.testing import golden, reference
from alltoallv.torch.engines import rendezvous
from alltoallv.torch.engines.device import StagedMember
from alltoallv.torch.engines.nccl import NcclMember

SEED = 20240611

#: Dtypes that both torch and the reference know.
DTYPES = [name for name in golden.DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]


class Views(NcclMember):
    """NCCL's way in host memory: views per peer, and agreement before the first calls."""

    reaches_host = True


class Staged(StagedMember):
    """The way of tensors without an engine, for some that lie in host memory already."""

    reaches_host = True


@contextlib.contextmanager
def _connected(rank: int, size: int, file: str, timeout: float) -> Iterator[tuple[dist.ProcessGroup, Communicator]]:
    with joined(rank, size, file) as group:
        raw = dist.distributed_c10d._world.pg_map[group][1]
        peers = rendezvous.meet(raw, rank, size, "views", 30)
        gather = rendezvous.gatherer(peers, raw, rank, size, "group", 30)
        with rendezvous.connect(peers, gather, rank, size, "views", timeout) as control:
            yield group, control


@contextlib.contextmanager
def views(rank: int, size: int, file: str, *, timeout: float = 30.0, check: str | None = None) -> Iterator[Views]:
    """In place of NCCL, backend alltoallv of torch.distributed moves the views."""
    with _connected(rank, size, file, timeout) as (group, control):
        yield Views(group, "nccl", control, check)


@contextlib.contextmanager
def staged(rank: int, size: int, file: str) -> Iterator[Staged]:
    with _connected(rank, size, file, 30.0) as (group, control):
        yield Staged(group, control)


@contextlib.contextmanager
def logged(level: int) -> Iterator[list[str]]:
    """What the package logs at ``level`` or above, while it does."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("alltoallv")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def to_torch(array: npt.NDArray[Any]) -> Tensor:
    """A copy with the same bits; ml_dtypes' dtypes too."""
    if not array.size:
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
    data = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
    return data.view(getattr(torch, array.dtype.name)).view(array.shape)


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return data.view(golden.dtype_of(str(tensor.dtype).removeprefix("torch."))).reshape(tensor.shape)


def random_cases(size: int, count: int) -> list[golden.Case]:
    """Every dtype in turn; the same on every rank."""
    rng = np.random.default_rng([SEED, size])
    return [
        golden.random_case(
            rng,
            size,
            DTYPES[(i + size) % len(DTYPES)],
            zeros=float(rng.choice([0.0, 0.3, 0.7, 1.0])),
            gaps=bool(rng.integers(2)),
            permuted=bool(rng.integers(2)),
            overlapping_sends=bool(rng.integers(2)),
            max_count=int(rng.choice([1, 7, 60, 3000])),
        )
        for i in range(count)
    ]


def run_case(comm: Any, case: golden.Case, number: int, place: str = "cpu", *, alike: bool = True) -> None:
    """One exchange of tensors in ``place``; ``number`` decides how it is asked for, ``alike`` on all ranks or not."""
    r = comm.rank
    x = to_torch(case.inputs[r]).to(place)
    arguments: dict[str, Any] = {"sdispls": case.sdispls[r], "group": comm}
    expected = case.expected[r]
    if number % 4 == 2:  # the operator allocates: gaps are zero
        arguments |= {"recv_counts": case.recv_counts[r], "rdispls": case.rdispls[r]}
        expected = reference.all_to_all_v(case.inputs, case.send_counts, case.sdispls, case.recv_counts, case.rdispls)[
            r
        ]
        ends = [case.rdispls[r][j] + n for j, n in enumerate(case.recv_counts[r]) if n]
        expected = expected[: max(ends, default=0)]
    elif number % 4 == 3 and (alike or (number // 4 + r) % 3):  # some or all ranks learn
        expected = reference.all_to_all_v(case.inputs, case.send_counts, case.sdispls)[r]
    else:
        arguments |= {"recv_counts": case.recv_counts[r], "rdispls": case.rdispls[r]}
        arguments["out"] = to_torch(case.outputs[r]).to(place)
    if number % 5 == 4:
        out, work = at.all_to_all_v(x, case.send_counts[r], **arguments, async_op=True)
        assert work.wait()
        out = work.result() if out is None else out
    else:
        out = at.all_to_all_v(x, case.send_counts[r], **arguments)
    assert out.device.type == place
    golden.assert_bits_equal(to_numpy(out.cpu()), expected, f"exchange {number} on rank {r}: {case!r}")
    golden.assert_bits_equal(to_numpy(x.cpu()), case.inputs[r], f"input of exchange {number}")
