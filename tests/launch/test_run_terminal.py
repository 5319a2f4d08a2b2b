"""The local launcher on a terminal: progress bars and prompts come live; and its options for single ranks."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

import pytest

RUN = [sys.executable, "-m", "alltoallv", "run"]
BAR = """
import os, sys, time
sys.stderr.write("\\r 10%|#   |"); sys.stderr.flush()
time.sleep(1)
sys.stderr.write("\\r 90%|####|\\n")
"""


class Terminal:
    """A job whose output, and for one rank its input, is a terminal."""

    def __init__(self, tmp_path, program: str, *options: str) -> None:
        script = tmp_path / "program.py"
        script.write_text(program)
        self.controller, terminal = pty.openpty()
        env = os.environ | {"NO_COLOR": "1"}
        command = [*RUN, *options, str(script)]
        self.process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env)
        os.close(terminal)
        self.text = b""

    def read_until(self, text: bytes, seconds: float = 30) -> float:
        """When it appeared."""
        end = time.monotonic() + seconds
        while text not in self.text and select.select([self.controller], [], [], end - time.monotonic())[0]:
            try:
                self.text += os.read(self.controller, 1000)
            except OSError:  # the terminal's other end is closed
                break
        assert text in self.text, self.text
        return time.monotonic()

    def close(self) -> int:
        try:
            while select.select([self.controller], [], [], 30)[0]:
                self.text += os.read(self.controller, 1000)
        except OSError:
            pass
        os.close(self.controller)
        return self.process.wait(30)


def test_progress_bar(tmp_path):
    job = Terminal(tmp_path, BAR, "-n", "1")
    begun = job.read_until(b"\r[0] \x1b[K 10%|#   |")
    assert job.read_until(b"\r[0] \x1b[K 90%|####|\r\n") - begun > 0.3
    assert job.close() == 0


def test_prompt_and_standard_input_of_one_rank(tmp_path):
    program = "import os; print(f'hello {input(\"name? \")}' if os.environ['RANK'] == '1' else input.__name__)"
    job = Terminal(tmp_path, program, "-n", "2", "--stdin", "1")
    job.read_until(b"[1] name? ")
    os.write(job.controller, b"Ada\n")
    job.read_until(b"hello Ada\r\n")
    assert job.close() == 0
    assert b"[0] input\r\n" in job.text


def test_lines_of_others_do_not_run_into_a_prompt(tmp_path):
    program = """
import os, sys, time
if os.environ["RANK"] == "0":
    sys.stdout.write("waiting... "); sys.stdout.flush()
    time.sleep(1.5)
    print("done")
else:
    time.sleep(0.7)
    print("between")
"""
    job = Terminal(tmp_path, program, "-n", "2")
    assert job.close() == 0
    assert job.text == b"[0] waiting... \r\n[1] between\r\n[0] done\r\n"


def run(*arguments: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([*RUN, *arguments], capture_output=True, text=True, timeout=60, check=False, **kwargs)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        "import os, sys; print(os.environ['RANK'], os.environ.get('COLOUR'), len(os.sched_getaffinity(0)),"
        " repr(sys.stdin.read())); print('error', file=sys.stderr)"
    )
    return str(path)


def test_environment_standard_input_and_binding(script):
    done = run("--nproc-per-node", "2", "--env", "COLOUR=red=1", "--stdin", "0", "--bind", script, input="given")
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(done.stdout.splitlines()) == [f"[0] 0 red=1 {share} 'given'", f"[1] 1 red=1 {share} ''"]


def test_log_files(script, tmp_path):
    done = run("-n", "2", "--log-dir", str(tmp_path / "new" / "logs"), script)
    assert len(done.stdout.splitlines()) == len(done.stderr.splitlines()) == 2
    for rank in range(2):
        lines = (tmp_path / "new" / "logs" / f"rank{rank}.log").read_text().splitlines()
        assert sorted(line.split()[0] for line in lines) == [str(rank), "error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--env", "COLOUR"], "argument --env: is 'COLOUR', expected NAME=VALUE"),
        (["--stdin", "2"], "--stdin is 2, expected a rank from 0 to 1"),
        (["--log-dir", "/proc/none"], "/proc/none: No such file or directory"),
    ],
)
def test_wrong_options(script, options, message):
    done = run("-n", "2", *options, script)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
