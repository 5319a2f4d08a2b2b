"""``demo``: runs the main example on real data, on ranks of this host."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import alltoallv_emulator
from alltoallv_tools.cli.job import NUMBER_OF_RANKS, Job, ranks
from alltoallv_tools.demo import arguments, missing_packages
from alltoallv_tools.trace import page
from alltoallv_tools.trace.records import read

_EPILOG = """\
Each of the 1,797 handwritten digits of scikit-learn is a token. all_to_all_v sends it to the rank of its expert
(the nearest of 8 centroids), which processes it, and back. Every rank compares what it gets, bit for bit, with the
result of one process. Rank 0 prints who sent how much to whom, with times and bandwidths, whether Huawei's operator
delivers the same bits, and how exact an int8 all-reduce is. DIR/traffic.png shows the traffic as a picture, and
DIR/trace.html every operator of every rank in time. Where torch_npu is installed, the operator and the int8 all-reduce
then run on two emulated NPUs, and the bits are compared with the CPU's.

The exit code is 0 only if all tokens came back unchanged. The demo needs scikit-learn and matplotlib.
examples/digits_dispatch.py is the same program for other launchers.
"""

_NEXT = (
    ("python -m alltoallv run -n 4 examples/hello.py", "the smallest program"),
    ("ALLTOALLV_TRACE=traffic python -m alltoallv run -n 4 your_program.py", "the traffic of yours,"),
    ("python -m alltoallv trace traffic", "drawn as a page"),
    ("python -m alltoallv doctor", "what works on this machine"),
    ("docs/quickstart.md", "PyTorch, MindSpore, Paddle, ATB, NPUs"),
)
_TORCH = 'pip install "torch==2.13.*" --index-url https://download.pytorch.org/whl/cpu'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``demo``."""
    parser.epilog = _EPILOG
    parser.add_argument(
        *NUMBER_OF_RANKS, dest="nprocs", type=ranks, default=4, metavar="N", help="number of ranks (default: 4)"
    )
    arguments.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Starts the ranks; returns the job's exit code."""
    if missing := missing_packages():
        print(missing, file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "alltoallv_tools.demo", "--output-dir", args.output_dir]
    with tempfile.TemporaryDirectory() as folder:
        command += ["--repetitions", str(args.repetitions), "--trace", folder]
        # SIGTERM ends ranks without a traceback, which would say nothing of the user's program.
        code = Job(command, args.nprocs, prefix=False, interrupt=signal.SIGTERM).run()
        if code == 0:
            trace = Path(args.output_dir, "trace.html")
            trace.write_text(page.html(read(Path(folder)), "the demo"), "utf-8")
            print(f"every operator of every rank in time, and who waited for whom: {trace}", flush=True)
    if code == 0:
        code = _on_npus()
    if code == 0:
        print("\nwhat to try next:", *next_steps(), sep="\n")
    return code


def next_steps() -> Iterator[str]:
    """Yields commands that work as they are printed, where the user is."""
    if sys.prefix not in (sys.base_prefix, os.environ.get("VIRTUAL_ENV")):
        yield f"  . {Path(sys.prefix) / 'bin' / 'activate'}"
    for command, what in (*(() if _has_torch_npu() else _on_npus_too()), *_NEXT):
        files = [Path(word) for word in command.split() if word.startswith(("examples/", "docs/"))]
        if all(file.exists() for file in files):  # in a checkout
            yield f"  {command:77}  {what}"


def _on_npus_too() -> tuple[tuple[str, str], ...]:
    """Returns how to have the demo on emulated NPUs; `make demo` also builds the emulator, once torch_npu is there."""
    try:
        alltoallv_emulator.library_folder()
        again = "python -m alltoallv demo"
    except FileNotFoundError:
        again = "make demo"
    npus = f'pip install "torch_npu==2.13.*" && {again}'
    return (_TORCH, "torch for CPU, which torch_npu wants,"), (npus, "then the same on two emulated NPUs")


def _has_torch_npu() -> bool:
    return importlib.util.find_spec("torch_npu") is not None


def _on_npus() -> int:
    """Runs the operator and the pipeline on two emulated NPUs, where torch_npu is installed; returns the exit code."""
    if not _has_torch_npu():
        return 0
    try:
        variables = alltoallv_emulator.environment(devices=2)
    except FileNotFoundError as error:
        print(f"not run on emulated NPUs: {error}")
        return 0
    command = [sys.executable, "-m", "alltoallv_tools.demo.on_npus"]
    return Job(command, 2, prefix=False, variables=variables, interrupt=signal.SIGTERM).run()
