"""``run``: starts the ranks of a program on this host, streams their output, and leaves no process behind."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import re
import shutil
import sys
import time
from pathlib import Path

from alltoallv.launch.processes import ForkServer, ServerEnded
from alltoallv_tools import numbers
from alltoallv_tools.cli.job import NUMBER_OF_RANKS, TIMED_OUT, Job, Nodes, ranks, say

_EPILOG = """\
Every rank gets the variables ALLTOALLV_RANK, ALLTOALLV_WORLD_SIZE, ALLTOALLV_LOCAL_RANK and ALLTOALLV_JOB_ID,
and torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. OMP_NUM_THREADS
is set too, unless you have set it. The standard input of all ranks but the one of --stdin is empty. Each line that a
rank prints appears behind "[rank] ". On a terminal, progress bars and prompts appear at once.

If a rank fails, the other ranks have 5 seconds to end and are then ended; with --keep-going they run on. With
--allow-loss N so many ranks may fail: the others run on, and the exit code is theirs. With --replace N a rank that
fails is started again, N times in all, while the others run on and call Communicator.rejoin() (docs/errors.md);
ALLTOALLV_REPLACEMENT counts how often this rank has been replaced, 0 in the first process. With --max-restarts N all
ranks are started again, with one more in ALLTOALLV_RESTART_COUNT. What is printed then is added to the files of
--log-dir.
Ctrl-C interrupts all ranks, which then have 5 seconds to end; a second Ctrl-C kills them.
Where importing a framework takes seconds, --preload torch imports it once, in a process from which the ranks are
forked: they start at once, a replaced one too. What a module reads from the environment when it is imported is then
the same on all ranks, without a rank's number; it may start no threads. ALLTOALLV_PRELOAD holds such modules.
The exit code is 0 if all ranks exit with 0, otherwise the code of the first rank that failed (128 + number if a
signal ended it), 124 after --timeout, and 130 after Ctrl-C.

examples:
  python -m alltoallv run -n 4 train.py --epochs 3
  python -m alltoallv run -n 2 -m package.module
  python -m alltoallv run -n 2 --bind --env OMP_NUM_THREADS=1 --log-dir logs bench.py
  python -m alltoallv run --emulate-npu -n 4 train_npu.py

On several hosts, start it on each, with the same number of ranks. --master is host 0 as the others reach it, with a
port (default 29500) that is free there, as is the next one; ALLTOALLV_JOB_SECRET is the same on all (docs/hosts.md).
  python -m alltoallv run --nnodes 2 --node-rank 0 --master host0 -n 8 train.py     # on host0
  python -m alltoallv run --nnodes 2 --node-rank 1 --master host0 -n 8 train.py     # on the other
"""

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_FLAG = re.compile(r"-[bBdEIOqsSuv]+")  # of Python, without a value
_PORT = 29500  # torchrun's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``run``."""
    parser.usage = "%(prog)s -n N [option ...] (script.py | -m module) [argument ...]"
    parser.epilog = _EPILOG
    parser.allow_abbrev = False  # the program's own options may begin like ours
    parser.add_argument(*NUMBER_OF_RANKS, dest="nprocs", type=ranks, required=True, metavar="N", help="number of ranks")
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
    parser.add_argument("--allow-loss", type=numbers.count_or_0, default=0, metavar="N", help="N ranks may fail")
    parser.add_argument(
        "--replace", type=numbers.count_or_0, default=0, metavar="N", help="start ranks that fail again, N times in all"
    )
    parser.add_argument(
        "--max-restarts",
        "--max_restarts",
        type=numbers.count_or_0,  # torchrun's default, which its command lines name
        default=0,
        metavar="N",
        help="start anew after a failure",
    )
    parser.add_argument(
        "--preload",
        action="append",
        default=os.environ.get("ALLTOALLV_PRELOAD", "").split(),
        metavar="MODULE",
        help="import this module once and fork the ranks from there (repeatable)",
    )
    parser.add_argument("--nnodes", type=numbers.count, default=1, metavar="M", help="number of hosts")
    parser.add_argument("--node-rank", "--node_rank", type=int, metavar="R", help="this host's number, from 0")
    names = ("--master", "--master-addr", "--master_addr")
    parser.add_argument(*names, dest="master", metavar="HOST[:PORT]", help="host 0, as the others reach it")
    parser.add_argument("--no-prefix", action="store_true", help='leave out the "[rank] " before every line')
    parser.add_argument(
        "--emulate-npu", action="store_true", help="run a torch_npu program on emulated devices (docs/emulator.md)"
    )
    parser.add_argument(
        "--with",
        dest="packages",
        action="append",
        default=[],
        metavar="PACKAGE",
        help="let programs find this package of CANN's, with --emulate-npu: cann_ops_transformer (repeatable)",
    )
    parser.add_argument("program", help="a Python script, an installed one such as pytest, or with -m a module")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    rest.required = False  # Python 3.11 and older say otherwise


def main(args: argparse.Namespace) -> int:
    """Runs the job; returns its exit code."""
    try:
        nodes = _nodes(args)
    except ValueError as error:
        say(str(error))
        return 2
    python = [sys.executable]
    if not args.module and _PYTHON.fullmatch(os.path.basename(args.program)) and args.arguments:
        interpreter = shutil.which(args.program)  # "run -n 2 python program.py": the interpreter that this means
        if interpreter is None:
            say(f"{args.program!r} is not found in PATH")
            return 2
        flags = [*itertools.takewhile(_FLAG.fullmatch, args.arguments)]
        python, program = [interpreter, *flags], args.arguments[len(flags) :]
    elif args.module:
        program = ["-m", args.program, *args.arguments]
    else:
        if not os.path.exists(args.program) and _is_script(installed := Path(sys.executable).parent / args.program):
            args.program = str(installed)
        if not os.path.exists(args.program):
            elsewhere = "" if "/" in args.program else f", nor is it installed in {os.path.dirname(sys.executable)!r}"
            say(f"script {args.program!r} does not exist in {os.getcwd()!r}{elsewhere}")
            return 2
        program = [args.program, *args.arguments]
    if args.stdin is not None and not 0 <= args.stdin < args.nprocs * args.nnodes:
        say(f"--stdin is {args.stdin}, expected a rank from 0 to {args.nprocs * args.nnodes - 1}")
        return 2
    variables = dict(os.environ)
    if args.packages and not args.emulate_npu:
        say("--with is given without --emulate-npu, which it belongs to")
        return 2
    if args.emulate_npu:
        import alltoallv_emulator as emulator  # only here: it needs libraries that a build may lack

        if unknown := [name for name in args.packages if name not in emulator.PACKAGES]:
            say(f"--with is {unknown[0]!r}, expected one of {', '.join(emulator.PACKAGES)}")
            return 2
        try:
            devices = max(args.nprocs, emulator.DEFAULT_DEVICES)
            variables = emulator.environment(devices=devices, packages=args.packages)
        except FileNotFoundError as error:
            say(str(error))
            return 2
        program = ["-m", "alltoallv_emulator.program", *program]
    server = None
    if args.preload and (args.nprocs > 1 or args.replace):
        become = "alltoallv_tools.cli.preloaded.main"
        server = functools.partial(ForkServer, args.preload, become, *program, python=python)
    end = None if args.timeout is None else time.monotonic() + args.timeout
    for restart in range(args.max_restarts + 1):
        job = Job(
            [*python, *program],
            args.nprocs,
            timeout=None if end is None else max(end - time.monotonic(), 0.001),
            prefix=not args.no_prefix,
            variables=variables | dict(args.env),
            stdin=args.stdin,
            log_dir=args.log_dir,
            bind=args.bind,
            keep_going=args.keep_going,
            allowed_losses=args.allow_loss,
            replacements=args.replace,
            restart=restart,
            nodes=nodes,
            server=server,
        )
        try:
            code = job.run()
        except OSError as error:
            say(f"{error.filename or 'a rank'}: {error.strerror}")
            return 2
        except ServerEnded:
            say(f"--preload is {' '.join(args.preload)}: the process that imports it has ended, as it says above")
            return 2
        if code in (0, TIMED_OUT) or job.interrupted or restart == args.max_restarts:
            break
        say(f"starting all ranks again: restart {restart + 1} of {args.max_restarts}")
    return code


def _nodes(args: argparse.Namespace) -> Nodes | None:
    """Returns the hosts; None if there is one.

    Raises:
        ValueError: the arguments about hosts, restarts and losses do not go together.
    """
    if args.allow_loss >= args.nprocs * args.nnodes:
        raise ValueError(f"--allow-loss is {args.allow_loss}, expected less than the number of ranks")
    if args.nnodes == 1:
        if args.node_rank not in (None, 0):
            raise ValueError(f"--node-rank is {args.node_rank}, expected 0 without --nnodes")
        return None
    if args.max_restarts:
        raise ValueError("--max-restarts needs all ranks on one host; torchrun restarts ranks on several")
    if args.node_rank is None or not 0 <= args.node_rank < args.nnodes:
        given = "missing" if args.node_rank is None else args.node_rank
        raise ValueError(f"--node-rank is {given}, expected 0 to {args.nnodes - 1}, this host's number")
    if not args.master:
        raise ValueError("--master is missing, expected the address of host 0")
    host, colon, port = args.master.rpartition(":")
    if not colon or args.master.endswith("]"):
        host, port = args.master, str(_PORT)
    if not (host and port.isascii() and port.isdecimal() and 1 <= int(port) < 65535):
        raise ValueError(f"--master is {args.master!r}, expected HOST or HOST:PORT")
    return Nodes(args.nnodes, args.node_rank, host.strip("[]"), int(port))


def _is_script(path: Path) -> bool:
    """Returns whether a file is a script, as those that pip installs beside the interpreter are."""
    return path.is_file() and path.open("rb").read(2) == b"#!"


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"is {text!r}, expected NAME=VALUE")
    return name, value
