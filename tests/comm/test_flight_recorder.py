"""The record of the last operators of all ranks: what it holds, and that errors leave it behind."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import numpy as np
import pytest
from on_ranks import on_ranks
from started import wait_for
from trouble import attempt, join, pids_of

from alltoallv import Communicator
from alltoallv.numpy import all_reduce, all_to_all_v, barrier, broadcast, recv, send
from alltoallv_tools.cli import main
from alltoallv_tools.ports import free_port

LENGTH = 64  # operators that it keeps, by docs/architecture.md and docs/trace.md
FIELDS = {"seq", "operator", "dtype", "state", "bytes", "start_ns", "end_ns"}


def check_form(record, size: int, domain: str) -> None:
    assert set(record) >= {"domain", "rank", "size", "ranks"}
    assert (record["domain"], record["size"]) == (domain, size)
    assert [r["rank"] for r in record["ranks"]] == list(range(size))
    for rank in record["ranks"]:
        assert set(rank) >= {"rank", "pid", "left", "operators"}
        numbers = [operator["seq"] for operator in rank["operators"]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        for operator in rank["operators"]:
            assert set(operator) >= FIELDS
            assert operator["state"] in ("running", "done", "failed")
            if operator["state"] != "running":
                assert operator["start_ns"] <= operator["end_ns"] <= time.monotonic_ns()


def test_it_keeps_the_last_operators(launch):
    def work(comm):
        for _ in range(LENGTH + 3):
            barrier(group=comm)
        all_reduce(np.ones(1), group=comm)
        return comm.flight_record()["ranks"][comm.rank]["operators"]

    for operators in launch(2, work):
        assert [operator["operator"] for operator in operators] == ["barrier"] * (LENGTH - 1) + ["all_reduce"]


def test_what_it_holds(launch):
    def work(comm):
        size = comm.size
        assert comm.flight_record()["ranks"][comm.rank]["operators"] == []
        all_to_all_v(np.ones(6 * size, np.float32), [6] * size, group=comm)
        all_reduce(np.ones(5), group=comm)
        broadcast(np.ones(4, np.int16), size - 1, group=comm)
        attempt(all_to_all_v, np.ones(size), [-1] * size if comm.rank else [1] * size, [1] * size, group=comm)
        barrier(group=comm)
        barrier(group=comm)  # after the first every rank has finished what is looked at
        return os.getpid(), comm.domain, comm.flight_record()

    found = launch(3, work)
    pids = [pid for pid, _, _ in found]
    for rank, (_, domain, record) in enumerate(found):
        check_form(record, 3, domain)
        assert record["rank"] == rank
        assert [r["pid"] for r in record["ranks"]] == pids
        for peer in record["ranks"]:
            done = peer["operators"][:4]
            assert [o["operator"] for o in done] == ["all_to_all_v", "all_reduce", "broadcast", "all_to_all_v"]
            assert [o["state"] for o in done] == ["done", "done", "done", "failed"]
            assert [o["dtype"] for o in done[:3]] == ["float32", "float64", "int16"]
            assert [o["bytes"] for o in done] == [72, 40, 8 if peer["rank"] != 2 else 0, 0]
            assert peer["operators"][4]["operator"] == "barrier"


@on_ranks(3)
def test_where_everybody_is(comm):
    """Asked for by one rank while another hangs: the recorder is for that."""
    pids = pids_of(comm)
    if comm.rank == 1:
        recv(np.zeros(1), 0, group=comm)  # once rank 0 has looked
    if comm.rank == 0:
        operators = lambda r: comm.flight_record()["ranks"][r]["operators"]  # noqa: E731
        wait_for(lambda: operators(2) and operators(2)[-1]["operator"] == "all_reduce", "rank 2's operator")
        record = comm.flight_record()
        assert [r["operators"][-1]["seq"] for r in record["ranks"]] == [1, 1, 2]
        running = record["ranks"][2]["operators"][-1]
        assert (running["state"], running["end_ns"]) == ("running", 0)
        assert [r["pid"] for r in record["ranks"]] == pids
        send(np.zeros(1), 1, group=comm)
    all_reduce(np.ones(3), group=comm)


@pytest.mark.parametrize("domain", ['quote " and \\ backslash', "tab\tand\nnewline", "日本語", "a/b/../c", "x" * 128])
def test_any_name_of_a_domain_is_valid_json(ranks, domain, tmp_path):
    def work(comm):
        assert comm.domain == domain
        record = comm.flight_record()
        comm.abort("to leave a file behind")
        attempt(barrier, group=comm)
        return record["domain"]

    found = ranks(2, domain=domain, env={"ALLTOALLV_FLIGHT_DIR": str(tmp_path)})(work)
    printable = "".join(c if c >= " " else " " for c in domain)
    assert set(found) <= {domain, printable}
    files = list(tmp_path.iterdir())
    assert len(files) == 2, files
    for file in files:
        assert json.loads(file.read_text())["domain"] in (domain, printable)


def records(folder) -> dict[int, dict]:
    """The files in the folder by rank."""
    found = {}
    for file in folder.iterdir():
        record = json.loads(file.read_text())
        assert str(record["rank"]) in file.name
        assert record["domain"] in file.name
        found[record["rank"]] = record
    return found


@pytest.mark.parametrize("cause", ["loss", "timeout", "abort"])
def test_errors_leave_a_file_behind(ranks, cause, tmp_path):
    def work(comm):
        barrier(group=comm)
        if comm.rank == 1:
            last = lambda r: comm.flight_record()["ranks"][r]["operators"][-1]  # noqa: E731
            wait_for(lambda: last(0)["seq"] == last(2)["seq"] == 2, "the others' operators")
            if cause == "loss":
                os.kill(os.getpid(), signal.SIGKILL)
            if cause == "abort":
                comm.abort()
            wait_for(lambda: not comm.usable, cause)
        attempt(all_reduce, np.ones(3), group=comm, timeout=2.0 if cause == "timeout" else 30.0)
        return comm.domain

    found = ranks(3, fresh=True, outcomes=True, env={"ALLTOALLV_FLIGHT_DIR": str(tmp_path)})(work)
    left = records(tmp_path)
    assert set(left) == ({0, 2} if cause == "loss" else {0, 1, 2})  # also a late rank
    for record in left.values():
        check_form(record, 3, found[0].result)
    for rank in (0, 2):
        last = left[rank]["ranks"][rank]["operators"][-1]
        assert (last["seq"], last["operator"], last["state"]) == (2, "all_reduce", "failed")
    if cause == "loss":  # what the dead one did last is known
        assert left[0]["ranks"][1]["operators"][-1]["operator"] == "barrier"
        assert left[0]["ranks"][1]["pid"] > 0


def test_each_communicator_that_fails_leaves_a_file(ranks, tmp_path, capsys):
    """Communicators of one domain, one after the other; a call that fails later adds none."""

    def work(comm):
        for _ in range(2):
            comm.abort()
            for _ in range(2):
                attempt(barrier, group=comm)
            comm.destroy()
            comm = join(comm.rank, comm.size, "again", comm.domain)
        comm.destroy()
        return comm.domain

    domain, _ = ranks(2, env={"ALLTOALLV_FLIGHT_DIR": str(tmp_path)})(work)
    names = [f"flight-{domain}-rank{rank}{number}.json" for rank in range(2) for number in ("-2", "")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert main(["trace", str(tmp_path)]) == 0
    assert f"'{domain} (2)'" in capsys.readouterr().out


def test_ranks_that_share_no_memory_leave_files(ranks, tmp_path):
    def work(comm):
        with Communicator.from_env("apart", backend="tcp", timeout=15.0) as apart:
            barrier(group=comm)  # all have joined
            apart.abort()
            attempt(barrier, group=apart)

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks(2, env={"ALLTOALLV_FLIGHT_DIR": str(tmp_path), **place})(work)
    assert set(records(tmp_path)) == {0, 1}


def test_disagreements_leave_no_file_and_a_bad_folder_harms_nobody(ranks, tmp_path):
    def work(comm):
        attempt(all_reduce, np.ones(3 + comm.rank), group=comm)
        names = os.listdir(os.environ["ALLTOALLV_FLIGHT_DIR"])
        barrier(group=comm)
        os.environ["ALLTOALLV_FLIGHT_DIR"] = "/nonexistent/folder"
        comm.abort()
        failure = attempt(barrier, group=comm)
        os.environ["ALLTOALLV_FLIGHT_DIR"] = str(tmp_path)
        comm.destroy()
        with join(comm.rank, comm.size, "again", comm.domain) as again:
            barrier(group=again)
        return names, failure.name

    assert ranks(2, env={"ALLTOALLV_FLIGHT_DIR": str(tmp_path)})(work) == [([], "PeerLostError")] * 2


def test_reading_while_operators_run():
    """What is read of an operator belongs together, also while it ends and where another takes its place."""
    (comm,) = Communicator.threads(1)
    ended = threading.Event()

    def run():
        x = np.ones(1)
        while not ended.is_set():
            all_to_all_v(x, [1], [1], group=comm)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            for operator in comm.flight_record()["ranks"][0]["operators"]:
                if operator["state"] == "running":
                    assert (operator["bytes"], operator["end_ns"]) == (0, 0)
                else:
                    assert operator["bytes"] == 8
                    assert 0 < operator["start_ns"] <= operator["end_ns"] <= time.monotonic_ns()
    finally:
        ended.set()
        thread.join()
        comm.destroy()
