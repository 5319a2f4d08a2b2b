"""``demo``: runs the main example on real data, on ranks of this host."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from alltoallv_tools.cli.job import NUMBER_OF_RANKS, Job, ranks
from alltoallv_tools.demo import arguments, missing_packages
from alltoallv_tools.trace import page
from alltoallv_tools.trace.records import read

_EPILOG = """\
Each of the 1,797 handwritten digits of scikit-learn is a token. all_to_all_v sends it to the rank of its expert
(the nearest of 8 centroids), which processes it, and back. Every rank compares what it gets, bit for bit, with the
result of one process. Rank 0 prints who sent how much to whom, with times and bandwidths, whether Huawei's operator
delivers the same bits, and how exact an int8 all-reduce is. DIR/traffic.png shows the traffic as a picture, and
DIR/trace.html shows every operator of every rank in time.

The exit code is 0 only if all tokens came back unchanged. The demo needs scikit-learn and matplotlib.
examples/digits_dispatch.py is the same program for other launchers.
"""

_NEXT = """\
every operator of every rank in time, and who waited for whom: {trace}

what to try next:
{activate}  python -m alltoallv run -n 4 examples/hello.py                         the smallest program
  ALLTOALLV_TRACE=traffic python -m alltoallv run -n 4 your_program.py   the traffic of yours,
  python -m alltoallv trace traffic                                      drawn as a page
  python -m alltoallv doctor                                             what works on this machine
  pip install ".[npu]"                                                   torch_npu; then on two emulated NPUs:
  python -m alltoallv run --emulate-npu -n 2 examples/npu_moe_transformer.py
  docs/quickstart.md                                                     PyTorch, MindSpore, Paddle, ATB"""


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
    command += ["--repetitions", str(args.repetitions)]
    with tempfile.TemporaryDirectory() as folder:
        variables = os.environ | {"ALLTOALLV_TRACE": folder}
        # SIGTERM ends ranks without a traceback, which would say nothing of the user's program.
        code = Job(command, args.nprocs, prefix=False, variables=variables, interrupt=signal.SIGTERM).run()
        if code == 0:
            trace = Path(args.output_dir, "trace.html")
            trace.write_text(page.html(read(Path(folder)), "the demo"), "utf-8")
            in_use = shutil.which("python") == sys.executable
            activate = "" if in_use else f"  . {Path(sys.prefix) / 'bin' / 'activate'}\n"
            print(_NEXT.format(trace=trace, activate=activate))
    return code
