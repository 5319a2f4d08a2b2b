"""``run``: starts the ranks of a program on this host, streams their output, and leaves no process behind."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from alltoallv_tools import numbers
from alltoallv_tools.cli.job import Job, say

_EPILOG = """\
Every rank gets the variables ALLTOALLV_RANK, ALLTOALLV_WORLD_SIZE, ALLTOALLV_LOCAL_RANK and ALLTOALLV_JOB_ID,
and torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. OMP_NUM_THREADS
is set too, unless you have set it. The standard input of all ranks but the one of --stdin is empty. Each line that a
rank prints appears behind "[rank] ". On a terminal, progress bars and prompts appear at once.

If a rank fails, the other ranks have 5 seconds to end and are then ended; with --keep-going they run on.
Ctrl-C interrupts all ranks, which then have 5 seconds to end; a second Ctrl-C kills them.
The exit code is 0 if all ranks exit with 0, otherwise the code of the first rank that failed (128 + number if a
signal ended it), 124 after --timeout, and 130 after Ctrl-C.

examples:
  python -m alltoallv run -n 4 train.py --epochs 3
  python -m alltoallv run -n 2 -m package.module
  python -m alltoallv run -n 2 --bind --env OMP_NUM_THREADS=1 --log-dir logs bench.py
  python -m alltoallv run --emulate-npu -n 4 train_npu.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``run``."""
    parser.usage = "%(prog)s -n N [option ...] (script.py | -m module) [argument ...]"
    parser.epilog = _EPILOG
    parser.allow_abbrev = False  # the program's own options may begin like ours
    parser.add_argument(
        "-n", "--nprocs", "--nproc-per-node", type=numbers.count, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("--timeout", type=numbers.seconds, metavar="SECONDS", help="end the job after this time")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        type=_variable,
        metavar="NAME=VALUE",
        help="set this variable for the ranks (repeatable)",
    )
    parser.add_argument("--stdin", type=int, metavar="RANK", help="let this rank read the standard input")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="also write what rank N prints to DIR/rankN.log")
    parser.add_argument("--bind", action="store_true", help="give each rank processors of its own")
    parser.add_argument("--keep-going", action="store_true", help="let the other ranks run on after one has failed")
    parser.add_argument("--no-prefix", action="store_true", help='leave out the "[rank] " before every line')
    parser.add_argument(
        "--emulate-npu", action="store_true", help="run a torch_npu program on emulated devices (docs/emulator.md)"
    )
    parser.add_argument("program", help="a Python script, an installed one such as pytest, or with -m a module")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    rest.required = False  # Python 3.11 and older say otherwise


def main(args: argparse.Namespace) -> int:
    """Runs the job; returns its exit code."""
    if args.module:
        program = ["-m", args.program, *args.arguments]
    else:
        if not os.path.exists(args.program) and _is_script(installed := Path(sys.executable).parent / args.program):
            args.program = str(installed)
        if not os.path.exists(args.program):
            say(f"script {args.program!r} does not exist in {os.getcwd()!r}")
            return 2
        program = [args.program, *args.arguments]
    if args.stdin is not None and not 0 <= args.stdin < args.nprocs:
        say(f"--stdin is {args.stdin}, expected a rank from 0 to {args.nprocs - 1}")
        return 2
    variables = dict(os.environ)
    if args.emulate_npu:
        import alltoallv_emulator as emulator  # only here: it needs libraries that a build may lack

        try:
            variables = emulator.environment(devices=max(args.nprocs, emulator.DEFAULT_DEVICES))
        except FileNotFoundError as error:
            say(str(error))
            return 2
        program = ["-m", "alltoallv_emulator.program", *program]
    job = Job(
        [sys.executable, *program],
        args.nprocs,
        timeout=args.timeout,
        prefix=not args.no_prefix,
        variables=variables | dict(args.env),
        stdin=args.stdin,
        log_dir=args.log_dir,
        bind=args.bind,
        keep_going=args.keep_going,
    )
    try:
        return job.run()
    except OSError as error:
        say(f"{error.filename or 'a rank'}: {error.strerror}")
        return 2


def _is_script(path: Path) -> bool:
    """Returns whether a file is a script, as those that pip installs beside the interpreter are."""
    return path.is_file() and path.open("rb").read(2) == b"#!"


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"is {text!r}, expected NAME=VALUE")
    return name, value
