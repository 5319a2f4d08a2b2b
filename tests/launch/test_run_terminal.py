"""The local launcher on a terminal: progress bars and prompts come live; and its options for single ranks."""

from __future__ import annotations

import os

import pytest
from started import Terminal, run

# Waits until a file of this name lies beside the program.
WAIT = """
import os, sys, time
def wait(name):
    while not os.path.exists(os.path.join(os.path.dirname(__file__), name)):
        time.sleep(0.01)
"""
BAR = f"""{WAIT}
sys.stderr.write("\\r 10%|#   |"); sys.stderr.flush()
wait("shown")
sys.stderr.write("\\r 90%|####|\\n")
"""


def test_progress_bar(tmp_path):
    job = Terminal(tmp_path, BAR, "-n", "1")
    job.read_until(b"\r[0] \x1b[K 10%|#   |")
    (tmp_path / "shown").touch()
    job.read_until(b"\r[0] \x1b[K 90%|####|\r\n")
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
    program = f"""{WAIT}
if os.environ["RANK"] == "0":
    sys.stdout.write("waiting... "); sys.stdout.flush()
    wait("others")
    print("done")
else:
    wait("prompt")
    print("between")
"""
    job = Terminal(tmp_path, program, "-n", "2")
    for text, file in ((b"waiting... ", "prompt"), (b"between", "others")):
        job.read_until(text)
        (tmp_path / file).touch()
    assert job.close() == 0
    assert job.text == b"[0] waiting... \r\n[1] between\r\n[0] done\r\n"


SHOW = """
import os, sys
print(os.environ["RANK"], os.environ.get("COLOUR"), len(os.sched_getaffinity(0)), repr(sys.stdin.read()))
print("error", file=sys.stderr)
"""


def test_environment_standard_input_and_binding(tmp_path):
    options = ["--nproc-per-node", "2", "--env", "COLOUR=red=1", "--stdin", "0", "--bind"]
    done = run(tmp_path, SHOW, *options, text=True, input="given")
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(done.stdout.splitlines()) == [f"[0] 0 red=1 {share} 'given'", f"[1] 1 red=1 {share} ''"]


def test_log_files(tmp_path):
    done = run(tmp_path, SHOW, "-n", "2", "--log-dir", str(tmp_path / "new" / "logs"))
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
def test_wrong_options(tmp_path, options, message):
    done = run(tmp_path, SHOW, "-n", "2", *options, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
