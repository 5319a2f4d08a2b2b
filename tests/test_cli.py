"""What all commands have in common: standard output as a file, quiet ends, sentences about what is missing."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from started import ALLTOALLV, alltoallv, descendants, is_alive, process_state, wait_for, wait_gone

from alltoallv_tools.cli import main

BENCH = ["bench", "--np", "2", "--bytes", "1K", "--peers", ""]


def test_bench_counts_calls_and_writes_csv():
    done = alltoallv(*BENCH, "--iters", "30", "--warmup", "2", "--csv", "-")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["competitor"] for row in rows] == ["ours", "copy", "copy-nt"]
    for row in rows:
        assert (row["np"], row["nbytes"], row["dtype"], row["wrong"]) == ("2", "1024", "float32", "0")
        assert 30 <= int(row["calls"]) < 60
        assert float(row["min_us"]) <= float(row["median_us"])
    assert "size(B)" in done.stderr  # the table has made room


@pytest.mark.parametrize("command", [[*BENCH, "--iters", "1"], ["plan", "--np", "8", "--bytes", "1M"]])
def test_json_on_standard_output(command):
    done = alltoallv(*command, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]


def refused(words, capsys):
    """A command's exit status and what it has said, in this process; any other exception fails the test."""
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--iters", "0"], "argument --iters: is '0', expected an integer of at least 1"),
        (["--json", "-", "--csv", "-"], "--json and --csv are both '-', expected two files"),
        (["--csv", "t.svg", "--plot", "t.svg"], "--csv and --plot are both 't.svg', expected two files"),
    ],
)
def test_wrong_options(options, message, capsys):
    code, said = refused([*BENCH, *options], capsys)
    assert (code, message in said) == (2, True)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bench kernels --seconds nan", "argument --seconds: is 'nan', expected a number of seconds of at least 0"),
        ("top --seconds inf .", "argument --seconds: is 'inf', expected a number of seconds above 0"),
        ("demo -np 100000", "is 100000, expected at most 4096, the most ranks of a communicator"),
        ("bench -n 2,100000", "--np is '2,100000', expected at most 4096, the most ranks of a communicator"),
        ("doctor --devices -1", "argument --devices: is '-1', expected an integer of at least 1"),
        ("doctor --devices 2", "--devices is given without --selftest, expected both"),
        ("plan --np 8 --bytes 99999999999999999999", "--bytes has '99999999999999999999', expected a size"),
        ("plan --json t.svg --plot t.svg", "--json and --plot are both 't.svg', expected two files"),
        ("plan --moe=", "--moe has '', expected NAME=NUMBER"),
        ("run --emulate_npu -n 2 x.py", "unrecognized arguments: --emulate_npu; did you mean --emulate-npu?\n"),
        ("bench allgather --secs=3", "unrecognized arguments: --secs=3; did you mean --seconds?\n"),
        ("bench allgather --pattern moe", "unrecognized arguments: --pattern moe\n"),
        ("", "the following arguments are required: COMMAND\n"),
        ("bench allgather --api plan", "argument --api: invalid choice: 'plan' (choose from "),
        ("run program.py", "the following arguments are required: -n\n"),
        ("run -n two program.py", "argument -n: is 'two', expected an integer of at least 1\n"),
    ],
)
def test_wrong_arguments(command, message, capsys):
    code, said = refused(command.split(), capsys)
    assert (code, message in said) == (2, True), said


@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_a_full_disk(option):
    done = alltoallv(*BENCH, "--iters", "1", option, "/dev/full")
    assert (done.returncode, done.stderr) == (2, "bench: [Errno 28] No space left on device\n")
    assert "size(B)" in done.stdout


@pytest.mark.parametrize("command", ["run -n 2 -m site", "plan --np 8"])
def test_closed_output(command):
    line = f"exec {sys.executable} -m alltoallv {command} >&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_output_that_nobody_reads(command):
    line = f"{sys.executable} -m alltoallv {command} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""


def test_ctrl_c_ends_quietly(tmp_path):
    env = os.environ | {"ALLTOALLV_TRACE": str(tmp_path)}
    program = "import numpy as np, alltoallv.numpy as an; an.all_reduce(np.ones(1))"
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=60)
    with subprocess.Popen(
        [*ALLTOALLV, "top", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as top:
        assert top.stdout.readline().startswith("domain")
        top.send_signal(signal.SIGINT)
        _, errors = top.communicate(timeout=30)
    assert (top.returncode, errors) == (130, "")


def in_a_group(*command: str) -> subprocess.Popen:
    """A command whose processes get a signal together, as from a terminal."""
    return subprocess.Popen(
        [*ALLTOALLV, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def told(pid: int, file: str) -> str:
    """What the kernel says of a process; "" once it has ended."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("command", ["demo", "bench --peers=", "doctor"])
def test_ctrl_c_ends_a_command_with_its_processes(command):
    """As a terminal does it: all processes of its group get SIGINT, here while ranks import NumPy."""
    with in_a_group(*command.split()) as process:

        def one_imports() -> bool:
            assert process.poll() is None
            return any("numpy" in told(pid, "maps") for pid in descendants(process.pid))

        wait_for(one_imports, "a process that imports NumPy")
        started = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (130, False), errors
    assert wait_gone(started) == []


def test_ctrl_c_while_a_child_of_doctor_reads():
    """Those whose memory and end it looks at also have its terminal."""

    def read(pid: int) -> bool:
        return "_ctypes" in told(pid, "maps") and process_state(pid) == "S"

    met = False
    while not met:  # until the doctor is stopped before it has ended the child
        with in_a_group("doctor") as process:
            while not (found := [pid for pid in descendants(process.pid) if "stdin.read()" in told(pid, "cmdline")]):
                assert process.poll() is None
            process.send_signal(signal.SIGSTOP)
            wait_for(lambda pid=found[0]: read(pid) or not is_alive(pid), "a child that reads its input")
            met = is_alive(found[0])
            os.killpg(process.pid, signal.SIGINT)
            assert wait_gone(found) == []
            process.send_signal(signal.SIGCONT)
            _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")


def test_a_command_that_is_ended_leaves_nothing(tmp_path):
    folder = tmp_path / ("a_name_as_long_as_those_of_some_clusters" * 3)
    folder.mkdir()
    with subprocess.Popen(
        [*ALLTOALLV, *BENCH, "--seconds", "0.5", "--bytes", "1K..64M"],
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        lines = [process.stdout.readline() for _ in range(4)]  # the first size: then all processes are there
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert b" 1024 " in lines[3], errors
    assert (process.returncode, list(folder.iterdir())) == (130, []), errors


@pytest.mark.parametrize(
    ("statement", "module", "part"),
    [
        ("import alltoallv.testing; alltoallv.testing.Ranks", "cloudpickle", "testing"),
        ("import alltoallv.testing.golden as golden; golden.dtype_of('bfloat16')", "ml_dtypes", "testing"),
        ("import alltoallv.torch", "torch", "torch"),
        ("import alltoallv.mindspore", "mindspore", "mindspore"),
        ("import alltoallv.paddle", "paddle", "paddle"),
    ],
)
def test_a_missing_extra_is_a_sentence(statement, module, part):
    program = f"import sys; sys.modules[{module!r}] = None\n{statement}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    expected = f"ModuleNotFoundError: alltoallv.{part} needs {module}: pip install 'alltoallv[{part}]'"
    assert done.stderr.splitlines()[-1] == expected
