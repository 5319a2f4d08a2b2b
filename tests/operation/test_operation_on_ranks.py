"""The operation on real ranks: rows that pass, with data; and rows that fail on one rank only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from acceptance_table import BASE, ROWS

from alltoallv import Communicator, _core
from alltoallv.atb.member import connect
from alltoallv.atb.operations import AllToAllVOperation
from alltoallv.atb.params import AllToAllVParam
from alltoallv.errors import AllToAllVError

Launch = Callable[..., list[Any]]
Case = tuple[list[AllToAllVParam], tuple[int, ...], str]
SECONDS = 20.0


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def make_input(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Random bytes: NaNs and infinities too."""
    itemsize = dtype_of(dtype).itemsize
    data = np.random.default_rng(rank).integers(0, 256, int(np.prod(shape)) * itemsize, np.uint8)
    return data.view(dtype_of(dtype)).reshape(shape)


def expected(case: Case, rank: int) -> bytes:
    """``out[rdispls[j] : +recv_counts[j]] = x_j[sdispls_j[rank] : +send_counts_j[rank]]`` for every j."""
    params, shape, dtype = case
    mine = params[rank]
    out = np.zeros(sum(mine.recv_counts), dtype_of(dtype))
    for j, theirs in enumerate(params):
        x = make_input(j, shape, dtype).reshape(-1)
        begin, count = theirs.sdispls[rank], theirs.send_counts[rank]
        out[mine.rdispls[j] : mine.rdispls[j] + mine.recv_counts[j]] = x[begin : begin + count]
    return out.tobytes()


def run_cases(communicator: Communicator, cases: list[Case]) -> list[bytes]:
    results = []
    for params, shape, dtype in cases:
        operation = AllToAllVOperation(params[communicator.rank], communicator)
        x = make_input(communicator.rank, shape, dtype)
        first = operation(x, timeout=SECONDS)
        assert first.shape == (1, sum(params[communicator.rank].recv_counts))
        assert first.dtype == x.dtype
        out = np.full_like(first, 7)
        assert operation(x, out=out, timeout=SECONDS) is out
        assert out.tobytes() == first.tobytes()
        results.append(first.tobytes())
    return results


def check_cases(launch: Launch, size: int, cases: dict[str, Case]) -> None:
    results = launch(size, run_cases, list(cases.values()))
    for rank in range(size):
        for (name, case), result in zip(cases.items(), results[rank], strict=True):
            assert result == expected(case, rank), f"{name} on rank {rank}"


@pytest.mark.parametrize("size", [1, 2])
def test_accepted_rows_move_the_data(launch: Launch, size: int) -> None:
    cases: dict[str, Case] = {}
    for row in ROWS:
        if row.stage != "-" or row.make_param().rank_size != size:
            continue
        peer = {"rank": 1} | row.peer
        cases[row.id] = ([row.make_param(), row.make_param(**peer)][:size], row.shape, row.dtype)
    assert cases
    check_cases(launch, size, cases)


def test_eight_ranks_in_every_dtype(launch: Launch) -> None:
    """Uneven counts with zeros; receive regions in an order of their own on every rank."""
    rng = np.random.default_rng(8)
    counts = rng.integers(0, 4, (8, 8))
    counts[0, 0] = counts[5] = 0
    counts[:, 3] += 1
    params = []
    for rank in range(8):
        recv = counts[:, rank]
        rdispls = np.zeros(8, np.int64)
        order = rng.permutation(8)
        rdispls[order[1:]] = np.cumsum(recv[order])[:-1]
        sdispls = rng.integers(0, 57, 8)
        params.append(
            AllToAllVParam(
                rank=rank,
                rank_size=8,
                send_counts=counts[rank].tolist(),
                sdispls=sdispls.tolist(),
                recv_counts=recv.tolist(),
                rdispls=rdispls.tolist(),
            )
        )
    dtypes = ("float16", "float32", "int8", "int16", "int32", "int64", "bfloat16")
    check_cases(launch, 8, {dtype: (params, (4, 15), dtype) for dtype in dtypes})


Outcome = tuple[str, int, str]


def outcome(function: Any, *arguments: Any, **keywords: Any) -> Outcome:
    try:
        function(*arguments, **keywords)
    except AllToAllVError as error:
        return type(error).__name__, error.code, str(error)
    return "", 0, ""


def fail_on_rank_1(communicator: Communicator) -> tuple[list[Outcome], bytes, float]:
    """Rank 1 gives what its checks refuse, rank 0 a good call, and then both a good one."""
    rank = communicator.rank
    operation = AllToAllVOperation(AllToAllVParam(**(BASE | {"rank": rank})), communicator)
    x = np.arange(60, dtype=np.int32) + 100 * rank
    good = {"x": x, "out": np.empty((1, 4), np.int32)}
    operation(**good, timeout=SECONDS)
    read_only = np.empty((1, 4), np.int32)
    read_only.flags.writeable = False
    bad: list[dict[str, Any]] = [
        {"x": x[:3]},
        {"x": x.astype(np.float64)},
        {"x": x[:0]},
        {"x": x.reshape((60,) + (1,) * 8)},
        {"x": list(range(60))},
        {"x": x.astype(">i4")},
        {"out": np.empty((1, 5), np.int32)},
        {"out": np.empty((1, 4), np.float32)},
        {"out": np.empty((1, 8), np.int32)[:, ::2]},
        {"out": read_only},
        {"out": x[8:12].reshape(1, 4)},
    ]
    started = time.monotonic()
    outcomes = []
    for change in bad:
        call = good | change if rank == 1 else good
        outcomes.append(outcome(operation, **call, timeout=SECONDS))
    elapsed = time.monotonic() - started
    result = operation(**good, timeout=SECONDS)
    return outcomes, result.tobytes(), elapsed


def test_a_failure_on_one_rank_fails_the_other_and_the_communicator_stays_usable(launch: Launch) -> None:
    (theirs, result_0, elapsed), (mine, result_1, _) = launch(2, fail_on_rank_1)
    expected_codes = [1, 13, 9, 8, 5, 13, 8, 13, 1, 1, 1]
    assert [code for _, code, _ in mine] == expected_codes
    for (kind, code, message), (peer_kind, peer_code, peer_message) in zip(mine, theirs, strict=True):
        assert (peer_kind, peer_code) == (kind, code)
        assert "rank 1" in peer_message
        assert message in peer_message
        assert "rank 1" not in message
    assert elapsed < 5
    assert np.frombuffer(result_0, np.int32).tolist() == [0, 1, 100, 101]
    assert np.frombuffer(result_1, np.int32).tolist() == [2, 3, 102, 103]


def call_core(communicator: Communicator) -> list[Outcome]:
    """What the NumPy operation never does; on both ranks alike, so that every failure meets its twin."""
    rank = communicator.rank
    x, out = np.arange(60, dtype=np.int8), np.empty((1, 4), np.int8)
    inputs, outputs = [_core.TensorDesc([60], "int8")], [_core.TensorDesc([1, 4], "int8")]
    param = AllToAllVParam(**(BASE | {"rank": rank}))
    asked = []

    def connect(param: _core.AllToAllVParam) -> Any:
        asked.append(param)
        return communicator.core

    operation = _core.AllToAllVOperation(param, connect=connect)
    buffers = (x.ctypes.data, 60, out.ctypes.data, 4)
    stranger = AllToAllVParam(**(BASE | {"rank": 1 - rank}))
    outcomes = [
        outcome(operation.execute, *buffers),
        outcome(operation.infer_shape, []),
        outcome(operation.infer_shape, inputs * 2),
        outcome(operation.setup, [], outputs),
        outcome(operation.setup, inputs, outputs * 2),
        outcome(operation.setup, inputs, outputs),
        outcome(operation.execute, *buffers, SECONDS),
        outcome(operation.execute, 0, 60, out.ctypes.data, 4),
        outcome(operation.execute, x.ctypes.data, 60, 0, 4),
        outcome(operation.execute, x.ctypes.data, 59, out.ctypes.data, 4),
        outcome(operation.execute, x.ctypes.data, 60, out.ctypes.data, 5),
        outcome(operation.execute, x.ctypes.data, 60, x.ctypes.data + 59, 4),
        outcome(operation.execute, out.ctypes.data - 59, 60, out.ctypes.data, 4),
        outcome(operation.setup, inputs, inputs),
        outcome(operation.execute, *buffers),
        outcome(_core.AllToAllVOperation(stranger, communicator=communicator.core).setup, inputs, outputs),
    ]
    assert operation.workspace_size() == 0
    assert asked == [param]
    return outcomes


def test_two_phases_in_order(launch: Launch) -> None:
    wanted = [
        (1, "before setup"),
        (5, "the number of inputs is 0"),
        (5, "the number of inputs is 2"),
        (5, "the number of inputs is 0"),
        (5, "the number of outputs is 2"),
        (0, ""),
        (0, ""),
        (1, "the input has a null address"),
        (1, "the output has a null address"),
        (1, "the input has 59 bytes, expected the 60 of setup"),
        (1, "the output has 5 bytes, expected the 4 of setup"),
        (1, "overlap in memory"),
        (1, "overlap in memory"),
        (8, "the output has shape [60], expected [1, 4]"),
        (1, "before setup"),
        (1, "expected {rank} and 2, as in the communicator"),
    ]
    for rank, outcomes in enumerate(launch(2, call_core)):
        assert [code for _, code, _ in outcomes] == [code for code, _ in wanted]
        for (_, _, message), (_, text) in zip(outcomes, wanted, strict=True):
            assert text.format(rank=rank) in message


def connect_by_param(communicator: Communicator, threads: bool) -> tuple[list[int], list[int], Outcome]:
    """Two operations of one domain, given only their params."""
    fields = {"rank": communicator.rank, "comm_domain": "by-param:256", "comm_mode": int(threads)}
    param = AllToAllVParam(**(BASE | fields))
    x = np.arange(60, dtype=np.int32) + 100 * communicator.rank
    try:
        first = AllToAllVOperation(param)(x, timeout=SECONDS)
        param.backend = "shm"
        second = AllToAllVOperation(param)(x[::-1], timeout=SECONDS)
        param.backend = "nccl"
        refused = outcome(AllToAllVOperation(param), x)
    finally:
        param.backend = "shm"
        connect(param).destroy()
    return first[0].tolist(), second[0].tolist(), refused


def test_the_param_alone_finds_the_peers(launch: Launch, request: pytest.FixtureRequest) -> None:
    threads = request.node.callspec.params["launch"] == "threads"
    results = launch(2, connect_by_param, threads)
    assert [first for first, _, _ in results] == [[0, 1, 100, 101], [2, 3, 102, 103]]
    assert [second for _, second, _ in results] == [[59, 58, 159, 158], [57, 56, 157, 156]]
    for _, _, (kind, code, message) in results:
        assert (kind, code) == ("BackendUnavailableError", 28)
        assert "nccl" in message
