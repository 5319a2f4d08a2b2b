"""Where the processes of the fixture ``ranks`` come from and how they end, also when their parent is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from started import is_alive, wait_gone

from alltoallv.testing import RankFailures, Ranks, run_ranks

BOTH = pytest.mark.parametrize("preload", [(), ("alltoallv.numpy",)], ids=["started", "forked"])


def pid_of(rank, size):
    return os.getpid()


@BOTH
def test_close_ends_the_processes_and_checks_their_exit(preload):
    own = Ranks(preload)
    pids = own(2, communicator=False)(pid_of)
    own.close()
    assert not any(map(is_alive, pids))
    own.close()

    def poison(rank, size):
        import atexit

        atexit.register(os._exit, 9)

    own(1, communicator=False)(poison)
    with pytest.raises(RankFailures, match="exited with code 9"):
        own.close()


@BOTH
def test_death_between_two_calls_is_reported(preload):
    own = Ranks(preload)

    (first,) = own(1, communicator=False)(pid_of)
    os.kill(first, signal.SIGKILL)
    wait_gone([first])
    (second,) = own(1, communicator=False)(pid_of)
    assert second != first
    with pytest.raises(RankFailures, match="was killed by SIGKILL between two calls"):
        own.close()


@BOTH
def test_nothing_is_left_behind(preload):
    descriptors = set(os.listdir("/proc/self/fd"))
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    own = Ranks(preload)
    own(3, communicator=False)(pid_of)
    own(2, communicator=False, fresh=True)(pid_of)
    with pytest.raises(RankFailures):
        own(2, communicator=False)(lambda rank, size: 1 // 0)
    assert set(children.read_text().split()) - before
    own.close()
    assert set(os.listdir("/proc/self/fd")) <= descriptors  # what other tests have left may go meanwhile
    assert set(children.read_text().split()) <= before


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
            own(2, communicator=False)(pid_of)
    finally:
        own.close()
    assert "No module named 'no_such_module'" in capfd.readouterr().err


@BOTH
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
    assert run_ranks(1, lambda rank, size: rank, communicator=False) == [0]


def test_plugin_loads_without_the_extra_packages():
    """Pytest loads it wherever alltoallv is installed."""
    code = """
import sys
sys.modules["cloudpickle"] = sys.modules["hypothesis"] = sys.modules["ml_dtypes"] = None
import alltoallv.testing.plugin
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
