"""The local launcher, as a user starts it: real processes, real signals, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from started import RUN, Terminal, alltoallv, read_lines, run, start


def test_environment_of_ranks(tmp_path):
    program = "import json, os, sys; print(json.dumps(dict(os.environ) | {'argv': sys.argv[1:]}))"
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"TORCHELASTIC_RUN_ID": "outer"}
    arguments = ["-n", "7", "--timeout", "x", "--", "-m"]
    first, second = (
        run(tmp_path, program, "-n", "3", arguments=arguments, env=env, stdin=subprocess.PIPE) for _ in range(2)
    )
    assert first.returncode == second.returncode == 0
    ranks = {}
    for line in first.stdout.splitlines():
        rank, found = re.fullmatch(rb"\[(\d)\] (.*)", line).groups()
        ranks[int(rank)] = json.loads(found)
    assert sorted(ranks) == [0, 1, 2]
    for rank, found in ranks.items():
        assert found["argv"] == arguments
        for prefix in ("", "ALLTOALLV_"):
            assert found[prefix + "RANK"] == found[prefix + "LOCAL_RANK"] == str(rank)
            assert found[prefix + "WORLD_SIZE"] == found[prefix + "LOCAL_WORLD_SIZE"] == "3"
        assert found["MASTER_ADDR"] == "127.0.0.1"
        assert 1024 <= int(found["MASTER_PORT"]) <= 65535
        assert int(found["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 3)
        assert found["ALLTOALLV_RESTART_COUNT"] == "0"
        assert "TORCHELASTIC_RUN_ID" not in found
    jobs = {found["ALLTOALLV_JOB_ID"] for found in ranks.values()}
    secrets = {found["ALLTOALLV_JOB_SECRET"] for found in ranks.values()}
    assert len(secrets) == 1
    assert len(secrets.pop()) == 64
    assert len(jobs) == 1
    assert jobs.pop().encode() not in second.stdout
    assert first.stderr == b""


def test_set_omp_num_threads_is_kept_and_stdin_is_empty(tmp_path):
    program = "import os, sys; print(os.environ['OMP_NUM_THREADS'], repr(sys.stdin.read()))"
    result = run(tmp_path, program, "-n", "1", env=os.environ | {"OMP_NUM_THREADS": "5"}, input=b"not for the ranks")
    assert result.stdout == b"[0] 5 ''\n"


def test_module(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "program.py").write_text("import sys; print(__name__, sys.argv[1:])")
    command = [*RUN, "-n", "1", "-m", "package.program", "-m", "x"]
    result = subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=60, check=True)
    assert result.stdout == b"[0] __main__ ['-m', 'x']\n"


@pytest.mark.parametrize("words", [["python"], [sys.executable, "-u"], ["python3", "-B"]])
def test_an_interpreter_before_the_program(tmp_path, words):
    """As with mpirun: `run -np 2 python program.py`."""
    script = tmp_path / "program.py"
    script.write_text("import sys; print(sys.argv[1:], sys.executable)")
    env = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    command = [*RUN, "--no-prefix", "-np", "2", *words, str(script), "-n", "x"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    first, second = result.stdout.splitlines()
    assert first == second
    assert first.startswith("['-n', 'x'] ")
    assert os.path.dirname(first.split()[-1]) == os.path.dirname(sys.executable)


def test_a_limit_on_descriptors_limits_the_ranks(tmp_path):
    limited = f"ulimit -n 100; exec {' '.join(RUN)} -n 18 x.py"
    result = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "is 18, expected at most 17: each takes 4 of the 100 files that may be open (ulimit -n)" in result.stderr


def test_installed_script():
    """Pytest has a script, which pip puts beside the interpreter."""
    result = alltoallv("run", "-n", "1", "--no-prefix", "pytest", "--version")
    assert result.stdout.startswith("pytest ")


def test_lines_stay_whole_and_complete(tmp_path):
    program = """
import os, sys
rank = int(os.environ["RANK"])
for k in range(300):
    text = b"%d:%03d:" % (rank, k) + b"x" * (k * 37) + b"\\n"
    for i in range(0, len(text), 5000):      # lines arrive in pieces
        os.write(1, text[i:i + 5000])
os.write(2, b"problem \\xff\\xfe %d\\n" % rank)
os.write(1, b"last %d without end" % rank)
"""
    result = run(tmp_path, program, "-n", "4")
    assert result.returncode == 0
    lines = result.stdout.split(b"\n")
    assert lines.pop() == b""
    for rank in range(4):
        mine = [line for line in lines if line.startswith(b"[%d] " % rank)]
        expected = [b"[%d] %d:%03d:" % (rank, rank, k) + b"x" * (k * 37) for k in range(300)]
        assert mine == [*expected, b"[%d] last %d without end" % (rank, rank)]
    assert len(lines) == 4 * 301
    assert sorted(result.stderr.splitlines()) == [b"[%d] problem \xff\xfe %d" % (r, r) for r in range(4)]


def test_lines_come_as_they_are_printed(tmp_path):
    process = start(tmp_path, "import time; print('early'); time.sleep(1000)", "-n", "1")
    assert read_lines(process, 1) == [b"[0] early\n"]
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    process.communicate()


def test_no_prefix(tmp_path):
    result = run(tmp_path, "import os; os.write(1, b'a\\n\\nb')", "-n", "1", "--no-prefix")
    assert result.stdout == b"a\n\nb"


@pytest.mark.parametrize("no_color", [False, True])
def test_prefix_is_coloured_on_a_terminal_only(tmp_path, no_color):
    job = Terminal(tmp_path, "print('hello')", "-n", "1", colour=not no_color)
    assert job.close() == 0
    assert job.text == (b"[0] hello\r\n" if no_color else b"\x1b[36m[0] \x1b[0mhello\r\n")


def test_output_that_nobody_reads(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("while True: print('y' * 1000)")
    command = " ".join([*RUN, "-n", "2", str(script)])
    result = subprocess.run(
        ["bash", "-c", f"{command} | head -n 3; exit ${{PIPESTATUS[0]}}"], capture_output=True, timeout=60, check=False
    )
    assert len(result.stdout.splitlines()) == 3
    assert result.returncode == 128 + signal.SIGPIPE
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["-n", "0", "x.py"],
            "argument -n: is '0', expected an integer of at least 1",
        ),
        (
            ["--np", "two", "x.py"],
            "argument -n: is 'two', expected an integer of at least 1",
        ),
        (["-n", "5000", "x.py"], "is 5000, expected at most 4096, the most ranks of a communicator"),
        (["-n", "2", "--allow-loss", "2", "x.py"], "--allow-loss is 2, expected less than the number of ranks"),
        (
            ["-n", "2", "--allow-loss", "-1", "x.py"],
            "argument --allow-loss: is '-1', expected an integer of at least 0",
        ),
        (["-n", "2", "--node-rank", "1", "x.py"], "--node-rank is 1, expected 0 without --nnodes"),
        (["-n", "2", "--nnodes", "2", "x.py"], "--node-rank is missing, expected 0 to 1, this host's number"),
        (
            ["-n", "2", "--nnodes", "2", "--node-rank", "1", "x.py"],
            "--master is missing, expected the address of host 0",
        ),
        (
            ["-n", "2", "--nnodes", "2", "--node_rank", "1", "--master_addr", "a:b", "x.py"],
            "--master is 'a:b', expected HOST or HOST:PORT",
        ),
        (
            ["-n", "2", "--nnodes", "2", "--max-restarts", "1", "x.py"],
            "--max-restarts needs all ranks on one host; torchrun restarts ranks on several",
        ),
        (["-n", "2", "sub/missing.py"], f"script 'sub/missing.py' does not exist in {os.getcwd()!r}\n"),
        (["-n", "2", "missing"], f", nor is it installed in {os.path.dirname(sys.executable)!r}\n"),
        (["-n", "2"], "the following arguments are required: program"),
        (["missing.py"], "the following arguments are required: -n\n"),
        (["-n", "2", "--timeout", "-1", "x.py"], "argument --timeout: is '-1', expected a number of seconds above 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    result = alltoallv("run", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_help():
    result = alltoallv("run", "--help")
    for text in ("-n N", "--timeout SECONDS", "--no-prefix", "exit code", "examples:"):
        assert text in result.stdout
    top = alltoallv("--help")
    for command in ("run", "demo", "doctor"):
        assert re.search(rf"^  {command} ", top.stdout, re.MULTILINE)
    assert [result.returncode, top.returncode, alltoallv("x").returncode] == [0, 0, 2]


def test_options_of_the_program_may_begin_as_those_of_run_do(tmp_path):
    arguments = ["--np", "4", "--nproc", "2", "-n", "3", "--time", "1", "--log"]
    program = "import sys; print(sys.argv[1:])"
    ended = run(tmp_path, program, "--no-prefix", "-n", "1", arguments=arguments, text=True)
    assert ended.stdout.strip() == str(arguments)
