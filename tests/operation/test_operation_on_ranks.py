"""The operation on real ranks: rows that pass, with data; and rows that fail on one rank only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from acceptance_table import BASE, ROWS

from alltoallv import Communicator, _core
from alltoallv.atb.operations import AllToAllVOperation, connect
from alltoallv.atb.params import AllToAllVParam
from alltoallv.errors import AllToAllVError
from alltoallv.testing import golden, reference

Launch = Callable[..., list[Any]]
Case = tuple[list[AllToAllVParam], tuple[int, ...], str]
SECONDS = 20.0


def make_input(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    return golden.fill(np.random.default_rng(rank), shape, dtype)


def expected(case: Case) -> list[np.ndarray[Any, Any]]:
    params, shape, dtype = case
    inputs = [make_input(rank, shape, dtype).reshape(-1) for rank in range(len(params))]
    names = "send_counts", "sdispls", "recv_counts", "rdispls"
    return reference.all_to_all_v(inputs, *([getattr(param, name) for param in params] for name in names))


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
    for number, (name, case) in enumerate(cases.items()):
        for rank, wanted in enumerate(expected(case)):
            assert results[rank][number] == wanted.tobytes(), f"{name} on rank {rank}"


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


Outcome = tuple[str, int, str]


def outcome(function: Any, *arguments: Any, **keywords: Any) -> Outcome:
    try:
        function(*arguments, **keywords)
    except AllToAllVError as error:
        return type(error).__name__, error.code, str(error)
    return "", 0, ""


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
    buffers = [(x.ctypes.data, 60)], [(out.ctypes.data, 4)]
    stranger = AllToAllVParam(**(BASE | {"rank": 1 - rank}))
    outcomes = [
        outcome(operation.execute, *buffers),
        outcome(operation.infer_shape, []),
        outcome(operation.infer_shape, inputs * 2),
        outcome(operation.setup, [], outputs),
        outcome(operation.setup, inputs, outputs * 2),
        outcome(operation.setup, inputs, outputs),
        outcome(operation.execute, *buffers, SECONDS),
        outcome(operation.execute, [(0, 60)], [(out.ctypes.data, 4)]),
        outcome(operation.execute, [(x.ctypes.data, 60)], [(0, 4)]),
        outcome(operation.execute, [(x.ctypes.data, 59)], [(out.ctypes.data, 4)]),
        outcome(operation.execute, [(x.ctypes.data, 60)], [(out.ctypes.data, 5)]),
        outcome(operation.execute, [(x.ctypes.data, 60)], [(x.ctypes.data + 59, 4)]),
        outcome(operation.execute, [(out.ctypes.data - 59, 60)], [(out.ctypes.data, 4)]),
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


@pytest.mark.parametrize(("rank", "condition"), [(0, "A2A-4006"), (1, "A2A-4002")])
def test_a_rank_that_no_launcher_has_started_is_told_of_one(rank: int, condition: str) -> None:
    counts = {name: [0, 0] for name in ("send_counts", "sdispls", "recv_counts", "rdispls")}
    program = f"""
import alltoallv, numpy as np
alltoallv.AllToAllVOperation(alltoallv.AllToAllVParam(rank={rank}, rank_size=2, **{counts}))(np.zeros(1, np.int32))
"""
    alone = [sys.executable, "-c", program]
    with subprocess.Popen(
        alone, stderr=subprocess.PIPE, text=True, env=os.environ | {"ALLTOALLV_WARN_AFTER": "0.3"}
    ) as process:
        assert process.stderr is not None
        warning = process.stderr.readline()
        process.kill()
    assert condition in warning
    assert "no launcher started this process" in warning
    assert "'python -m alltoallv run -n 2'" in warning
