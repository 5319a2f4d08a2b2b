"""How a job of the local launcher ends: failed ranks, signals, time limits; and that it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from started import is_alive, process_state, read_lines, run, start, wait_for, wait_gone

from alltoallv_tools.cli import job


def test_failing_rank_lets_the_others_finish(tmp_path):
    program = """
import os, sys, time
file = sys.argv[1]
if os.environ["RANK"] == "1":
    with open(file + ".new", "w") as own:
        own.write(str(os.getpid()))
    os.rename(file + ".new", file)
    sys.exit(3)
while not os.path.exists(file):
    time.sleep(0.01)
with open(file) as of_rank_1:
    failed = of_rank_1.read()
while open(f"/proc/{failed}/stat").read().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.01)
print("own error", flush=True)
sys.exit(4)
"""
    result = run(tmp_path, program, "-n", "3", arguments=[str(tmp_path / "pid")])
    assert result.returncode == 3
    assert sorted(result.stdout.splitlines()) == [b"[0] own error", b"[2] own error"]
    messages = result.stderr.decode().splitlines()
    assert re.fullmatch(
        r"alltoallv run: rank 1 \(pid \d+\) exited with code 3; the other ranks have 5 s to finish", messages[0]
    )
    assert sorted(re.sub(r"pid \d+", "pid", m) for m in messages[1:]) == [
        f"alltoallv run: rank {r} (pid) exited with code 4" for r in (0, 2)
    ]


def test_signals_of_ended_children_are_ignored(tmp_path):
    """As by a supervisor that does not wait for its own: how the ranks have ended is known all the same."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = start(tmp_path, "import os, sys; sys.exit(5 * int(os.environ['RANK']))", "-n", "2")
    finally:
        signal.signal(signal.SIGCHLD, before)
    _, messages = process.communicate()
    assert process.returncode == 5
    assert b"exited with code 5" in messages


def test_torch_npu_without_cann_is_explained(tmp_path):
    said = "RuntimeError: Failed to load the backend extension: torch_npu. You can disable"
    result = run(tmp_path, f"import sys; sys.exit({said!r})", "-n", "2")
    *_, last = result.stderr.decode().splitlines()
    assert last.startswith("alltoallv run: torch_npu finds no CANN: --emulate-npu emulates NPUs; TORCH_DEVICE_BACKEND")


def test_the_rank_that_failed_first_gives_the_exit_code(tmp_path):
    """Also if the launcher looks when the others have failed as well, as they do when they lose one."""
    program = """
import os, sys, time
print(os.getpid(), flush=True)
while not os.path.exists(f"{sys.argv[0]}.{os.environ['RANK']}"):
    time.sleep(0.01)
sys.exit(3 + int(os.environ["RANK"]))
"""
    process = start(tmp_path, program, "-n", "2")
    pids = {line[1:2].decode(): int(line.split()[1]) for line in read_lines(process, 2)}
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(lambda: process_state(process.pid) == "T", "SIGSTOP of the launcher")
    for rank in ("1", "0"):
        (tmp_path / f"program.py.{rank}").touch()
        wait_for(lambda pid=pids[rank]: process_state(pid) == "Z", "its end")
    os.kill(process.pid, signal.SIGCONT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 4
    assert re.search(rb"rank 1 .* code 4; the other ranks have 5 s to finish\n.*rank 0 .* code 3\n", error), error


def test_ranks_that_do_not_finish_are_ended(tmp_path):
    program = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
child = subprocess.Popen(["sleep", "100"])
print(os.getpid(), child.pid, flush=True)
if rank == 0:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)   # only SIGKILL ends it
time.sleep(100)
"""
    began = time.monotonic()
    result = run(tmp_path, program, "-n", "3")
    took = time.monotonic() - began
    assert result.returncode == 128 + signal.SIGKILL
    assert took > 5.9  # 5 s to finish, 1 s from SIGTERM to SIGKILL
    error = result.stderr.decode()
    assert "rank 0 (pid" in error
    assert "was killed by SIGKILL; the other ranks have 5 s to finish" in error
    assert re.search(r"ending ranks 1 \(pid \d+\), 2 \(pid \d+\) with SIGTERM", error)
    assert re.search(r"ending rank 2 \(pid \d+\) with SIGKILL", error)
    pids = [int(pid) for line in result.stdout.splitlines() for pid in line.split()[1:]]
    assert len(pids) == 6
    assert wait_gone(pids) == []


@pytest.mark.parametrize("keep_going", [False, True])
def test_keep_going(monkeypatch, capfd, keep_going):
    """A rank fails; with keep_going the other one may take longer than ranks may otherwise."""
    monkeypatch.setattr(job, "FINISH_SECONDS", 0.2)
    program = (
        f"import os, sys, time; os.environ['RANK'] == '1' and sys.exit(3); time.sleep({2 if keep_going else 60}); "
    )
    program += "print('went on')"
    assert job.Job([sys.executable, "-c", program], 2, keep_going=keep_going).run() == 3
    out, error = capfd.readouterr()
    assert out == ("[0] went on\n" if keep_going else "")
    assert ("ending rank 0" in error) is not keep_going


def test_allowed_losses_leave_the_exit_code_to_the_others(tmp_path):
    program = """
import os, signal
rank = int(os.environ["RANK"])
if rank < int(os.environ["LOST"]):
    os.kill(os.getpid(), signal.SIGKILL)
print("goes on", flush=True)
"""
    some = run(tmp_path, program, "-n", "3", "--allow-loss", "2", env=os.environ | {"LOST": "2"}, text=True)
    assert some.returncode == 0, some.stderr
    assert some.stdout == "[2] goes on\n"
    assert some.stderr.count("was killed by SIGKILL") == 2
    more = run(tmp_path, program, "-n", "3", "--allow-loss", "1", env=os.environ | {"LOST": "2"}, text=True)
    assert more.returncode == 128 + signal.SIGKILL


def test_restarts(tmp_path):
    """Each start tells the ranks how often the job was started before; the last one's exit code is the job's."""
    program = """
import os, sys
count, rank = int(os.environ["ALLTOALLV_RESTART_COUNT"]), int(os.environ["RANK"])
print(f"restart {count}", flush=True)
sys.exit(7 if rank == 1 and count < int(sys.argv[1]) else 0)
"""
    logs = tmp_path / "logs"
    options = ("--nproc_per_node", "2", "--max_restarts", "2", "--allow-loss", "0", "--log-dir", str(logs))
    good = run(tmp_path, program, *options, arguments=["2"], text=True)
    assert good.returncode == 0, good.stderr
    assert (logs / "rank0.log").read_text() == "restart 0\nrestart 1\nrestart 2\n"
    assert "starting all ranks again: restart 2 of 2" in good.stderr
    bad = run(tmp_path, program, *options, arguments=["3"], text=True)
    assert bad.returncode == 7
    assert bad.stderr.count("starting all ranks again") == 2


def test_grandchildren_go_with_a_job_that_ends_well(tmp_path):
    program = "import subprocess; print(subprocess.Popen(['sleep', '100'], start_new_session=False).pid)"
    result = run(tmp_path, program, "-n", "2")  # whose output they hold
    assert result.returncode == 0
    assert wait_gone([int(line.split()[1]) for line in result.stdout.splitlines()]) == []


def test_ctrl_c_interrupts_the_ranks(tmp_path):
    program = """
import os, time
try:
    print("ready", flush=True)
    time.sleep(100)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    process = start(tmp_path, program, "-n", "2")
    read_lines(process, 2)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert sorted(output.splitlines()) == [b"[0] interrupted", b"[1] interrupted"]
    assert b"SIGINT: interrupting all ranks" in error


def test_ctrl_c_while_ranks_are_started(capfd):
    running = job.Job(["sleep", "100"], 1000)

    def interrupt() -> None:
        wait_for(lambda: running._ranks, "the first rank")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert running.run() == 130
    assert 0 < len(running._ranks) < 1000
    assert "SIGINT: interrupting all ranks" in capfd.readouterr().err


def test_sigterm_interrupts_the_ranks_too_and_kills_after_five_seconds(tmp_path):
    program = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(100)
"""
    process = start(tmp_path, program, "-n", "2")
    pids = [int(line.split()[1]) for line in read_lines(process, 2)]
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began > 4.9
    assert process.returncode == 143
    assert b"with SIGKILL" in error
    assert wait_gone(pids) == []


def test_second_ctrl_c_kills_at_once(tmp_path):
    """Here ranks may take an hour to finish."""
    program = """
import os, signal, time
signal.signal(signal.SIGINT, lambda *_: print("no", flush=True))
print(os.getpid(), flush=True)
while True:
    time.sleep(1)
"""
    (tmp_path / "program.py").write_text(program)
    patient = "import sys; from alltoallv_tools import cli; from alltoallv_tools.cli import job; "
    patient += "job.FINISH_SECONDS = 3600; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", patient, "run", "-n", "2", str(tmp_path / "program.py")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pids = [int(line.split()[1]) for line in read_lines(process, 2)]
    process.send_signal(signal.SIGINT)
    assert sorted(read_lines(process, 2)) == [b"[0] no\n", b"[1] no\n"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert wait_gone(pids) == []


def test_nothing_outlives_a_killed_launcher(tmp_path):
    program = """
import os, subprocess, time
child = subprocess.Popen(["sh", "-c", "trap '' HUP INT TERM; sleep 100; sleep 100"])
print(os.getpid(), child.pid, flush=True)
time.sleep(100)
"""
    process = start(tmp_path, program, "-n", "2")
    pids = [int(pid) for line in read_lines(process, 2) for pid in line.split()[1:]]
    assert all(map(is_alive, pids))
    process.kill()
    process.wait()
    assert wait_gone(pids) == []
    process.communicate()


def test_timeout(tmp_path):
    began = time.monotonic()
    result = run(tmp_path, "import time; time.sleep(100)", "-n", "2", "--timeout", "1.5")
    assert result.returncode == 124
    assert time.monotonic() - began > 1.4
    assert b"the job has not ended after 1.5 s (--timeout): ranks 0 (pid " in result.stderr


def test_a_timeout_of_months(tmp_path):
    assert run(tmp_path, "", "-n", "1", "--timeout", "1e7").returncode == 0
