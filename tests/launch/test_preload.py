"""``run --preload``: ranks that are forked behave as processes of their own, and import nothing again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from started import RUN, is_alive, read_lines, run, start, wait_gone

PRELOADED = ["--preload", "alltoallv.numpy"]
# What each program prints, and how it ends, is the same in both kinds of processes.
PROGRAMS = {
    "place": """
        import os, sys
        print(__name__, __file__, __spec__, __doc__, sys.argv, sys.path[0], os.getcwd(), os.getpgrp() == os.getpid())
        print(sorted(name for name in globals() if not name.startswith("__")), sys.modules["__main__"].__file__)
    """,
    "rank": """
        from alltoallv import Communicator
        with Communicator.from_env() as comm:
            print(comm.rank, comm.size, os.environ["LOCAL_RANK"]) if (os := __import__("os")) else None
    """,
    "a launcher of its own": """
        import os
        from alltoallv import Communicator
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(f"ALLTOALLV_{name}")
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT="1")
        try:
            print(Communicator.from_env().size)
        except Exception as error:
            print(type(error).__name__, str(error)[:60])
    """,
    "failure": """
        def fail():
            raise ValueError("told")
        fail()
    """,
    "exit": "import sys; sys.exit('last words')",
    "code": "import atexit, sys; atexit.register(print, 'at exit'); sys.exit(7)",
    "killed": "import os; print('alive', flush=True); os.kill(os.getpid(), 9)",
    "pickles its own": """
        import inspect, multiprocessing, pickle
        class Own:
            pass
        def double(x):
            return 2 * x
        if __name__ == "__main__":
            print(type(pickle.loads(pickle.dumps(Own()))) is Own, inspect.getsource(double))
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
    """,
    "input": "import sys; print(repr(sys.stdin.read()))",
}


def said(output: bytes) -> list[bytes]:
    return sorted(re.sub(rb"pid \d+|0x[0-9a-f]+", b"N", output).splitlines())


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_processes_of_their_own(name: str, tmp_path: Path) -> None:
    program = textwrap.dedent(PROGRAMS[name])
    common = ["-n", "2", "--keep-going", "--stdin", "1"]
    alone, forked = (
        run(tmp_path, program, *common, *options, arguments=["a", "-b"], input=b"typed") for options in ([], PRELOADED)
    )
    assert said(forked.stdout) == said(alone.stdout)
    assert said(forked.stderr) == said(alone.stderr)
    assert forked.returncode == alone.returncode
    assert alone.stdout or alone.stderr


def test_imported_once_and_then_different(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("open('imports', 'a').write('once\\n')\nvalue = []")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "program.py").write_text(
        "import os, slow, numpy, sys\n"
        "slow.value.append(os.environ['RANK'])\n"
        "print(slow.value, os.sched_getaffinity(0), numpy.random.rand(), sys.argv[1:])\n"
    )
    options = ["-n", "2", "--bind", "--log-dir", "logs", "--preload", "numpy", "--preload", "slow"]
    command = [*RUN, *options, "-m", "package.program", "-m", "x"]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "imports").read_text() == "once\n"
    form = re.compile(r"\[(\d)\] \['(\d)'\] (\{.*\}) (\S+) \['-m', 'x'\]")
    lines = [form.fullmatch(line) for line in done.stdout.splitlines()]
    assert sorted(line[1] for line in lines) == sorted(line[2] for line in lines) == ["0", "1"]
    assert len({line[4] for line in lines}) == 2
    if len(os.sched_getaffinity(0)) > 1:
        assert len({line[3] for line in lines}) == 2
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank0.log", "rank1.log"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("from threading import Event, Thread\nThread(target=Event().wait, daemon=True, name='t').start()", "lack: t"),
        ("from threading import Event, Thread\nThread(target=Event().wait, name='u').start()", "lack: u"),
    ],
)
def test_what_cannot_be_forked_from(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(text)
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = run(tmp_path, "print('ran')", "-n", "2", "--preload", "module", env=env, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert reason in done.stderr
    assert "alltoallv run: --preload is module: the process that imports it has ended" in done.stderr


WAITS = """
import os, time
try:
    print(os.getpid(), flush=True)  # inside: the signal may come at once
    time.sleep(60)
except KeyboardInterrupt:
    print("told")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_launchers_end_is_the_ranks(number: signal.Signals, tmp_path: Path) -> None:
    job = start(tmp_path, WAITS, "-n", "2", "--no-prefix", *PRELOADED)
    pids = [int(line) for line in read_lines(job, 2)]
    assert all(map(is_alive, pids))
    job.send_signal(number)
    rest = job.communicate(timeout=30)[0]
    assert wait_gone(pids) == []
    if number == signal.SIGINT:
        assert job.returncode == 130
        assert rest == b"told\ntold\n"


@pytest.mark.parametrize(("options", "code"), [([], 128 + signal.SIGKILL), (["--replace", "1"], 2)])
def test_a_job_ends_with_the_process_that_ranks_are_forked_from(options: list[str], code: int, tmp_path: Path) -> None:
    job = start(tmp_path, WAITS, "-n", "2", "--no-prefix", *options, *PRELOADED)
    pids = [int(line) for line in read_lines(job, 2)]
    server = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    errors = job.communicate(timeout=30)[1].decode()
    assert wait_gone(pids) == []
    assert job.returncode == code, errors
    assert "was killed by SIGKILL" in errors


def test_ctrl_c_ends_an_import_that_does_not_end(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [*RUN, "-n", "2", "--preload", "stuck", __file__]
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    (line,) = read_lines(job, 1)
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=30)
    assert job.returncode == 130
    assert wait_gone([int(line)]) == []


def test_a_rank_is_replaced(tmp_path: Path) -> None:
    program = """
import os, time
rank, replaced = os.environ["RANK"], os.environ["ALLTOALLV_REPLACEMENT"]
if rank == "1" and replaced == "0":
    os._exit(3)
open(rank, "w").close()
while not os.path.exists("1"):  # a rank that has ended well would keep the other from coming back
    time.sleep(0.01)
"""
    done = run(tmp_path, program, "-n", "2", "--replace", "1", *PRELOADED, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "exited with code 3, and is started again" in done.stderr


def test_the_variable_holds_modules_for_every_run(tmp_path: Path) -> None:
    env = os.environ | {"ALLTOALLV_PRELOAD": "json nowhere_at_all"}
    assert run(tmp_path, "", "-n", "2", env=env).returncode == 2
    assert run(tmp_path, "", "-n", "1", env=env).returncode == 0  # one rank gains nothing
