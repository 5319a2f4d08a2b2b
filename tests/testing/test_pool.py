"""The fixture ``ranks`` and what stands behind it, on real processes that fail in every way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from alltoallv.testing import RankExit, RankFailures, Ranks, RankTimeout, RemoteError, golden, run_ranks

CONSTANT = 7
PRELOADS = pytest.mark.parametrize("preload", [(), ("alltoallv.numpy",)], ids=["started", "forked"])


@pytest.fixture(scope="module", params=[(), ("alltoallv.numpy",)], ids=["started", "forked"])
def ranks(request):
    """In place of the plugin's: both kinds of processes."""
    runner = Ranks(request.param)
    yield runner
    runner.close()


class OwnError(Exception):
    """Known to this module only, which workers cannot import."""

    def __init__(self, rank, detail):
        super().__init__(f"rank {rank} says {detail}")
        self.rank = rank

    def __reduce__(self):
        return OwnError, (self.rank, "again")


def helper(rank):
    return rank * CONSTANT


def place(rank, size, *args):
    return rank, size, os.getpid(), helper(rank), *args


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_gone(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def test_results_in_rank_order(ranks):
    array = golden.fill(np.random.default_rng(0), 10, "bfloat16")
    found = ranks(3, communicator=False)(place, array, {"a": [1]})
    for rank, (r, size, _, seven, values, rest) in enumerate(found):
        assert (r, size, seven, rest) == (rank, 3, 7 * rank, {"a": [1]})
        golden.assert_bits_equal(values, array)
    assert len({result[2] for result in found} | {os.getpid()}) == 4


def test_local_functions_and_closures(ranks):
    offset = 5
    assert ranks(2, communicator=False)(lambda rank, size: rank + size + offset) == [7, 8]


def test_processes_are_kept(ranks):
    first = ranks(3, communicator=False)(place)
    began = time.monotonic()
    for _ in range(20):
        again = ranks(3, communicator=False)(place)
        assert [r[2] for r in again] == [r[2] for r in first]
    assert time.monotonic() - began < 5
    fewer = ranks(2, communicator=False)(place)
    assert [r[2] for r in fewer] == [r[2] for r in first][:2]


def test_environment(ranks):
    def variables(rank, size):
        return {k: v for k, v in os.environ.items() if k.startswith("ALLTOALLV_") or k == "EXTRA"}

    run = ranks(2, communicator=False, env={"EXTRA": "1"})
    first, second = run(variables), run(variables)
    for rank, found in enumerate(first):
        assert found["ALLTOALLV_RANK"] == found["ALLTOALLV_LOCAL_RANK"] == str(rank)
        assert found["ALLTOALLV_WORLD_SIZE"] == found["ALLTOALLV_LOCAL_WORLD_SIZE"] == "2"
        assert found["EXTRA"] == "1"
    assert first[0]["ALLTOALLV_JOB_ID"] == first[1]["ALLTOALLV_JOB_ID"] != second[0]["ALLTOALLV_JOB_ID"]
    assert "EXTRA" not in ranks(2, communicator=False)(variables)[0]


def test_directory_and_stdin(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = ranks(1, communicator=False)(lambda rank, size: (os.getcwd(), sys.stdin.read()))
    assert found == [(str(tmp_path), "")]


def test_output_of_ranks_that_succeed_is_shown(ranks, capsys):
    def talk(rank, size):
        print("hello from", rank)
        os.write(2, b"and below\n")

    ranks(2, communicator=False)(talk)
    assert capsys.readouterr().out.splitlines() == [
        "[0] hello from 0",
        "[0] and below",
        "[1] hello from 1",
        "[1] and below",
    ]
    ranks(2, communicator=False)(place)
    assert capsys.readouterr().out == ""


def test_every_failing_rank_is_reported(ranks):
    def fail(rank, size):
        print("printed by", rank)
        if rank == 1:
            raise OwnError(rank, "no")
        if rank == 2:
            raise ValueError("second")
        return rank

    with pytest.raises(RankFailures) as caught:
        ranks(4, communicator=False)(fail)
    failures = caught.value
    assert isinstance(failures, AssertionError)
    assert sorted(failures.errors) == [1, 2]
    assert type(failures.errors[1]) is OwnError
    assert failures.errors[1].rank == 1
    assert type(failures.errors[2]) is ValueError
    assert [o.result for o in failures.outcomes] == [0, None, None, 3]
    text = str(failures)
    assert text.startswith("2 of 4 ranks failed (rank 1: OwnError: rank 1 says again; rank 2: ValueError: second)")
    assert 'raise ValueError("second")' in text  # the source line of the remote traceback
    assert "printed by 1" in text
    assert "printed by 2" in text
    assert "printed by 0" not in text
    assert len(ranks(4, communicator=False)(place)) == 4


def test_exception_that_cannot_be_sent(ranks):
    def fail(rank, size):
        class Odd(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a}{b}")
                self.lock = threading.Lock()

        raise Odd("x", "y")

    with pytest.raises(RankFailures) as caught:
        ranks(1, communicator=False)(fail)
    assert type(caught.value.errors[0]) is RemoteError
    assert str(caught.value.errors[0]) == "Odd: xy"


def test_result_that_cannot_be_sent(ranks):
    with pytest.raises(RankFailures, match=r"1 of 1 ranks failed .*cannot pickle"):
        ranks(1, communicator=False)(lambda rank, size: threading.Lock())


def test_function_that_cannot_be_sent(ranks):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot pickle"):
        ranks(1, communicator=False)(lambda rank, size: lock)
    assert ranks(1, communicator=False)(lambda rank, size: rank) == [0]


@pytest.mark.parametrize("fresh", [False, True])
def test_killed_rank(ranks, fresh):
    def end(rank, size):
        if rank == 1:
            print("last words")
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            os._exit(3)
        return rank

    found = ranks(3, communicator=False, fresh=fresh, outcomes=True)(end)
    assert found[0].result == 0
    assert found[0].error is None
    assert found[0].exit_code == (0 if fresh else None)
    assert [o.exit_code for o in found[1:]] == [-signal.SIGKILL, 3]
    assert all(type(o.error) is RankExit for o in found[1:])
    assert [o.error.exit_code for o in found[1:]] == [-signal.SIGKILL, 3]
    assert found[1].output == "last words\n"
    assert "was killed by SIGKILL before the function returned" in str(found[1].error)
    with pytest.raises(RankFailures, match="exited with code 3 before the function returned"):
        ranks(3, communicator=False, fresh=fresh)(end)


def test_crash_shows_the_stack(ranks):
    def crash(rank, size):
        import ctypes

        ctypes.string_at(0)

    with pytest.raises(RankFailures, match="was killed by SIGSEGV") as caught:
        ranks(1, communicator=False)(crash)
    assert "Fatal Python error: Segmentation fault" in str(caught.value)
    assert "in crash" in str(caught.value)


def test_system_exit_is_an_error(ranks):
    with pytest.raises(RankFailures) as caught:
        ranks(1, communicator=False)(lambda rank, size: sys.exit(0))
    assert type(caught.value.errors[0]) is SystemExit


def test_fresh_processes_are_new_and_end_well(ranks):
    kept = {result[2] for result in ranks(2, communicator=False)(place)}
    fresh = [result[2] for result in ranks(2, communicator=False, fresh=True)(place)]
    assert not kept & set(fresh)
    assert not any(map(is_alive, fresh))


def test_exit_status_of_a_fresh_process_counts(ranks):
    def late(rank, size):
        import atexit

        if rank == 1:
            atexit.register(os._exit, 5)
        return rank

    with pytest.raises(RankFailures) as caught:
        ranks(2, communicator=False, fresh=True)(late)
    assert list(caught.value.errors) == [1]
    assert caught.value.errors[1].exit_code == 5
    assert [o.result for o in caught.value.outcomes] == [0, 1]


def test_timeout_shows_where_every_rank_hangs(ranks):
    def hang(rank, size):
        def deep_inside():
            time.sleep(100)

        if rank == 1:
            return "done"
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        deep_inside()

    began = time.monotonic()
    found = ranks(3, communicator=False, timeout=3.0, outcomes=True)(hang)
    assert 2.9 < time.monotonic() - began < 15
    assert type(found[0].error) is type(found[2].error) is RankTimeout
    assert found[1].result == "done"
    assert "did not finish within 3 s and was killed" in str(found[0].error)
    assert "in deep_inside" in found[0].output
    assert found[2].exit_code == -signal.SIGKILL  # a stopped process answers nothing else
    assert len(ranks(3, communicator=False)(place)) == 3


def test_process_with_a_leaked_thread_is_replaced(ranks):
    def leak(rank, size, seconds):
        threading.Thread(target=time.sleep, args=(seconds,), daemon=True).start()
        return os.getpid()

    short = ranks(2, communicator=False)(leak, 0.01)
    long = ranks(2, communicator=False)(leak, 100)
    assert long == short
    after = [result[2] for result in ranks(2, communicator=False)(place)]
    assert not set(after) & set(long)
    assert wait_gone(long) == []


def test_what_a_rank_started_goes_with_it(ranks):
    def start(rank, size):
        return subprocess.Popen(["sleep", "100"]).pid

    pids = ranks(2, communicator=False, fresh=True)(start)
    assert wait_gone(pids) == []


@PRELOADS
def test_close_ends_the_processes_and_checks_their_exit(preload):
    own = Ranks(preload)
    pids = [result[2] for result in own(2, communicator=False)(place)]
    own.close()
    assert not any(map(is_alive, pids))
    own.close()

    def poison(rank, size):
        import atexit

        atexit.register(os._exit, 9)

    own(1, communicator=False)(poison)
    with pytest.raises(RankFailures, match="exited with code 9"):
        own.close()


@PRELOADS
def test_death_between_two_calls_is_reported(preload):
    own = Ranks(preload)

    def pid(rank, size):
        return os.getpid()

    (first,) = own(1, communicator=False)(pid)
    os.kill(first, signal.SIGKILL)
    wait_gone([first])
    (second,) = own(1, communicator=False)(pid)
    assert second != first
    with pytest.raises(RankFailures, match="was killed by SIGKILL between two calls"):
        own.close()


@PRELOADS
def test_nothing_is_left_behind(preload):
    descriptors = sorted(os.listdir("/proc/self/fd"))
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    own = Ranks(preload)
    own(3, communicator=False)(place)
    own(2, communicator=False, fresh=True)(place)
    with pytest.raises(RankFailures):
        own(2, communicator=False)(lambda rank, size: 1 // 0)
    assert set(children.read_text().split()) - before
    own.close()
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    assert set(children.read_text().split()) == before


@pytest.fixture
def forking(tmp_path, monkeypatch):
    """Ranks forked from a process that has imported a module of this test's; ends them."""
    (tmp_path / "heavy.py").write_text("import os\nimported_by, word = os.getpid(), os.environ.get('WORD')\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = Ranks(["heavy"])
    yield own
    own.close()


def test_preloaded_modules_are_imported_once(forking, monkeypatch):
    def look(rank, size):
        import random

        import heavy

        drawn = float(np.random.random()), random.random()
        return heavy.imported_by, heavy.word, os.environ.get("WORD"), os.getsid(0) == os.getpid(), drawn

    monkeypatch.setenv("WORD", "first")
    first = forking(2, communicator=False)(look)
    monkeypatch.setenv("WORD", "second")
    second = forking(3, communicator=False, fresh=True)(look)
    assert len({found[0] for found in first + second}) == 1
    assert [found[1:4] for found in first] == [("first", "first", True)] * 2
    assert [found[1:4] for found in second] == [("first", "second", True)] * 3
    assert len({number for found in first + second for number in found[4]}) == 10
    new = forking(2, communicator=False, fresh=True, preloaded=False)(look)
    assert len({found[0] for found in first + new}) == 3
    assert [found[1:3] for found in new] == [("second", "second")] * 2


def test_an_import_that_fails_is_an_error(capfd):
    own = Ranks(["no_such_module"])
    try:
        with pytest.raises(RuntimeError, match="the process that starts ranks has ended"):
            own(2, communicator=False)(place)
    finally:
        own.close()
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_ranks_end_with_the_process_that_forked_them(forking):
    pids = [found[2] for found in forking(2, communicator=False)(place)]
    server = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    assert server != os.getpid()
    os.kill(server, signal.SIGKILL)
    assert wait_gone(pids) == []
    with pytest.raises(RankFailures, match="SIGKILL"):
        forking.close()


@PRELOADS
def test_ranks_die_with_a_killed_parent(preload, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        """
import os, subprocess, sys, time
from alltoallv.testing import Ranks

def work(rank, size):
    child = subprocess.Popen(["sh", "-c", "trap '' HUP INT TERM; sleep 100; sleep 100"])
    sys.__stderr__ = None
    with open(f"{sys.path[0]}/{rank}", "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    os.rename(f"{sys.path[0]}/{rank}", f"{sys.path[0]}/{rank}.done")
    time.sleep(100)

Ranks(sys.argv[1:])(2, communicator=False)(work)
"""
    )
    process = subprocess.Popen([sys.executable, str(script), *preload])
    files = [tmp_path / f"{rank}.done" for rank in range(2)]
    end = time.monotonic() + 30
    while not all(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(0.05)
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    assert len(pids) == 4
    assert all(map(is_alive, pids))
    process.kill()
    process.wait()
    assert wait_gone(pids) == []


def test_run_ranks_without_pytest(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        """
from alltoallv.testing import run_ranks
def work(rank, size, text):
    return text * (rank + 1)
print(run_ranks(2, work, "x", communicator=False))
"""
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.stderr, result.returncode) == ("['x', 'xx']\n", "", 0)
    assert run_ranks(1, place, communicator=False)[0][0] == 0


def test_calls_from_several_threads(ranks):
    results = {}

    def call(number):
        results[number] = ranks(2, communicator=False)(place, number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: [r[-1] for r in found] for number, found in results.items()} == {n: [n, n] for n in range(3)}
    # Processes that such a thread has started outlive it.
    assert len(ranks(6, communicator=False)(place)) == 6


# --- threads


def test_threads(ranks):
    barrier = threading.Barrier(3, timeout=30)

    def meet(rank, size):
        barrier.wait()
        return rank, size, os.getpid()

    assert ranks(3, communicator=False, threads=True)(meet) == [(r, 3, os.getpid()) for r in range(3)]


def test_threads_that_fail(ranks):
    def fail(rank, size):
        if rank != 1:
            raise OwnError(rank, "no")
        return "fine"

    with pytest.raises(RankFailures) as caught:
        ranks(3, communicator=False, threads=True)(fail)
    assert sorted(caught.value.errors) == [0, 2]
    assert caught.value.errors[2].rank == 2
    assert "raise OwnError" in str(caught.value)


def test_threads_that_hang(ranks):
    event = threading.Event()

    def hang(rank, size):
        def deep_inside():
            event.wait(60)

        if rank:
            deep_inside()

    found = ranks(2, communicator=False, threads=True, timeout=0.5, outcomes=True)(hang)
    event.set()
    assert found[0].error is None
    assert type(found[1].error) is RankTimeout
    assert "in deep_inside" in found[1].output


def test_wrong_arguments(ranks):
    with pytest.raises(ValueError, match="size is 0, expected at least 1"):
        ranks(0)
    with pytest.raises(ValueError, match="threads cannot have"):
        ranks(2, threads=True, fresh=True)
    with pytest.raises(ValueError, match="preloaded=False is for fresh=True"):
        ranks(2, preloaded=False)


def test_plugin_loads_without_the_extra_packages():
    """Pytest loads it wherever alltoallv is installed."""
    code = """
import sys
sys.modules["cloudpickle"] = sys.modules["hypothesis"] = sys.modules["ml_dtypes"] = None
import alltoallv.testing.plugin
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
