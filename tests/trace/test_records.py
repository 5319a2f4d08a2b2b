"""What is recorded: every operator of every rank, with its counts, its times and how it ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time

import numpy as np
import pytest
from started import run
from traced_program import COUNTS, LATE, STEPS, are_in

import alltoallv
from alltoallv import Communicator
from alltoallv.errors import AllToAllVError, InvalidParamError, PeerMismatchError
from alltoallv.numpy import all_reduce, all_to_all_v, barrier
from alltoallv_tools.trace.records import CUT_SHORT, DONE, FAILED, RUNNING, read, read_file
from alltoallv_tools.trace.summary import tell


def domain_of(folder, size):
    return [domain for domain in read(folder) if domain.size == size]


def test_every_operator_with_its_counts(folder):
    (world,) = domain_of(folder, 4)
    assert sorted(world.ranks) == [0, 1, 2, 3]
    for rank, trace in world.ranks.items():
        names = [trace.operators[number] for number in trace.collectives()["op"]]
        assert names[-2 * STEPS - 2 :] == ["all_to_all_v", "all_reduce"] * STEPS + ["all_gather", "barrier"]
        numbers = trace.collectives()["seq"].tolist()
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        exchanges = trace.records[trace.of(["all_to_all_v"])]
        assert (exchanges["counts"] == COUNTS[rank]).all()
        assert {trace.dtype(one) for one in exchanges} == {"float32"}
        assert (exchanges["bytes"] == 4 * COUNTS[:, rank].sum()).all()
        reductions = trace.records[trace.of(["all_reduce"])]
        assert (reductions["counts"].sum(1) == 8).all()
        assert (reductions["element"] == 8).all()
        assert (trace.records["state"] == DONE).all()
        assert (trace.records["begin"] + trace.records["waited"] <= trace.records["end"]).all()
        assert trace.records["end"].max() <= time.monotonic_ns()


def test_who_waits(folder):
    (world,) = domain_of(folder, 4)
    waited = {rank: trace.records[trace.of(["all_reduce"])]["waited"] for rank, trace in world.ranks.items()}
    for rank in set(waited) - {LATE}:
        assert (waited[rank] > waited[LATE] + 10_000_000).all()  # of 50 ms


def test_messages(folder):
    (world,) = domain_of(folder, 4)
    for rank, operator, peer in ((0, "send", 3), (3, "recv", 0)):
        trace = world.ranks[rank]
        (message,) = trace.records[trace.of([operator])]
        assert (message["peer"], message["state"]) == (peer, DONE)
        assert message["counts"].tolist() == ([0, 0, 0, 5] if operator == "send" else [0] * 4)
        assert trace.name(message) == f"{operator} {'to' if operator == 'send' else 'from'} rank {peer}"


def test_every_domain_has_files_of_its_own(folder):
    pairs = domain_of(folder, 2)
    assert len(pairs) == 2
    for pair in pairs:
        assert sorted(pair.ranks) == [0, 1]
        for trace in pair.ranks.values():
            assert len(trace.records[trace.of(["all_reduce"])]) == STEPS


def test_no_element_of_a_tensor_is_recorded(ranks, tmp_path):
    """Neither in a trace nor in a flight record, in calls that end well or do not: SECURITY.md says so."""
    secret = 0.7310585786300049  # a float64 of random bytes

    def work(comm, folder):
        with alltoallv.trace(folder):
            x = np.full((2, 1000), secret)
            for few in (x[:, :2], x):  # with the row, and beside it
                x = np.ascontiguousarray(few)
                all_reduce(x, group=comm)
                all_to_all_v(x, [1, 1], group=comm, unit="row")
            with contextlib.suppress(PeerMismatchError):
                all_reduce(x[: 1 + comm.rank], group=comm)
            barrier(group=comm)
            return comm.flight_record()

    records = ranks(2)(work, str(tmp_path))
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 2
    for held in (*files, *(json.dumps(record).encode() for record in records)):
        assert np.float64(secret).tobytes() not in held
        assert str(secret)[:12].encode() not in held


def test_failures_and_what_never_ends(ranks, tmp_path):
    def work(comm, folder):
        with alltoallv.trace(folder):
            with pytest.raises(PeerMismatchError):
                all_to_all_v(np.ones(2), [1, 1], [1, 1 + comm.rank], group=comm)
            barrier(group=comm)
            if comm.rank == 0:
                while not are_in(comm, "all_reduce"):
                    time.sleep(0.001)
                os._exit(0)
            all_reduce(np.ones(1), group=comm)

    outcomes = ranks(2, communicator=True, outcomes=True)(work, str(tmp_path))
    assert len(outcomes) == 2
    (domain,) = read(tmp_path)
    assert domain.ranks[0].records["state"].tolist() == [FAILED, DONE]
    assert domain.ranks[1].records["state"].tolist() == [FAILED, DONE, CUT_SHORT]


def test_nested_blocks(ranks, tmp_path):
    def work(comm):
        barrier(group=comm)
        with alltoallv.trace(tmp_path / "a"):
            barrier(group=comm)
            with alltoallv.trace(tmp_path / "b"):
                barrier(group=comm)
            barrier(group=comm)
        barrier(group=comm)

    ranks(1, threads=True)(work)
    assert {name: read(tmp_path / name)[0].ranks[0].records["seq"].tolist() for name in "ab"} == {"a": [2, 4], "b": [3]}


def test_environment_variable(tmp_path):
    program = (
        "import numpy as np, alltoallv, alltoallv.numpy as an\n"
        "comm = alltoallv.Communicator.from_env('a/b \"c')\n"
        "an.all_reduce(np.ones(4), group=comm)\n"
    )
    env = os.environ | {"ALLTOALLV_TRACE": str(tmp_path / "new" / "folder")}
    assert run(tmp_path, program, "-n", "2", env=env).returncode == 0
    (domain,) = read(tmp_path / "new" / "folder")
    assert domain.name == 'a/b "c'
    assert [len(trace.records) for trace in domain.ranks.values()] == [1, 1]
    assert all(path.stat().st_size < 8192 for path in (tmp_path / "new" / "folder").iterdir())  # cut at the end


@pytest.mark.parametrize("left", [0, 4096 + 40 * 72 + 5])
def test_a_file_that_another_program_cuts(ranks, tmp_path, left):
    """As `: > file` does, or logrotate; whole records that are left stay."""

    def work(comm, folder):
        with alltoallv.trace(folder):
            for i in range(300):
                if i == 100 and comm.rank == 0:
                    for path in type(tmp_path)(folder).glob("*.trace"):
                        os.truncate(path, left)
                all_reduce(np.ones(1), group=comm)

    ranks(2)(work, str(tmp_path))
    (domain,) = read(tmp_path)
    for rank, trace in domain.ranks.items():
        assert len(trace.records) + trace.lost == 300
        assert (trace.records["state"] == DONE).all()
        numbers = trace.records["seq"]
        (gaps,) = np.nonzero(np.diff(numbers) != 1)
        kept = int(gaps[0]) + 1 if left else 0
        assert (kept, len(gaps)) in (((39, 1), (40, 1)) if left else ((0, 0),))
        assert 198 <= len(numbers) - kept <= 201  # the others may have been in the next one
        assert (
            f"{trace.lost} operators of rank {rank} of {domain.name!r} are lost: another program cut its file."
            in tell([domain])
        )


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidParamError, match=r"folder is '.*/file/x', expected one that can be made.*A2A-1461"):
        alltoallv.trace(tmp_path / "file" / "x").__enter__()
    for folder in (3, None, "a\0b"):
        with pytest.raises(InvalidParamError, match=r"folder is '.*', expected one that can be made.*A2A-1461"):
            alltoallv.trace(folder).__enter__()


def test_what_is_no_trace(tmp_path):
    with pytest.raises(ValueError, match=r"holds no \*\.trace files"):
        read(tmp_path)
    (tmp_path / "x.trace").write_text(json.dumps({"size": 2}))
    with pytest.raises(ValueError, match=r"x\.trace' is no folder, expected the one"):
        read(tmp_path / "x.trace")
    with pytest.raises(ValueError, match=r"x\.trace' is not a trace"):
        read_file(tmp_path / "x.trace")


def test_a_running_operator_is_seen_from_outside(ranks, tmp_path):
    def work(comm, folder):
        with alltoallv.trace(folder):
            barrier(group=comm)
            if comm.rank == 0:
                while True:
                    (domain,) = read(type(tmp_path)(folder))
                    last = domain.ranks[1].records[-1]
                    if last["state"] == RUNNING:
                        break
                    time.sleep(0.01)
            all_reduce(np.ones(1), group=comm)

    ranks(2)(work, str(tmp_path))


def test_no_element_is_recorded(ranks, tmp_path):
    """In traces and in the records that errors leave, as SECURITY.md says."""

    def work(rank, size, folder, mark):
        os.environ["ALLTOALLV_FLIGHT_DIR"] = folder
        comm = Communicator.from_env(timeout=20)
        with alltoallv.trace(folder):
            x = np.frombuffer(mark * 40 * size, "uint8")
            for part in (x[: len(mark) * size], x):  # inside the rows, and beside them
                y = all_to_all_v(part, [len(part) // size] * size, group=comm)
                assert mark in y.tobytes()
            barrier(group=comm)
            with contextlib.suppress(AllToAllVError):
                comm.abort("over")
                all_to_all_v(x, [len(x) // size] * size, group=comm)

    mark = b"an element of the input"
    ranks(2, communicator=False, fresh=True)(work, str(tmp_path), mark)
    files = sorted(tmp_path.iterdir())
    assert {file.suffix for file in files} == {".trace", ".json"}
    assert [file.name for file in files if mark in file.read_bytes()] == []


def test_a_file_has_a_limit(ranks, tmp_path):
    """Ten records fit; a warning says that no more do, and the operators go on."""

    def work(comm, folder):
        said = []
        (handler := logging.Handler()).emit = lambda record: said.append(record.getMessage())
        logging.getLogger("alltoallv").addHandler(handler)
        with alltoallv.trace(folder, most_bytes=4096 + 10 * 72 + 71):
            for _ in range(15):
                all_reduce(np.ones(1), group=comm)
        return said

    said = ranks(2)(work, str(tmp_path))
    (domain,) = read(tmp_path)
    for rank, trace in domain.ranks.items():
        assert (trace.records["state"] == DONE).all()
        assert trace.records["seq"].tolist() == list(range(1, 11))
        (text,) = said[rank]
        assert re.fullmatch(r"nothing more of domain '.*' is traced: the file has most_bytes, 4887", text)
    assert max(path.stat().st_size for path in tmp_path.glob("*.trace")) <= 4887


@pytest.mark.parametrize("most_bytes", [4095, -1, 1 << 63, 1e6, "1"])
def test_a_limit_that_is_none(tmp_path, most_bytes):
    with (
        pytest.raises(InvalidParamError, match=r"most_bytes is.*A2A-1463"),
        alltoallv.trace(tmp_path, most_bytes=most_bytes),
    ):
        pass
