"""Runs the command line: ``python -m alltoallv``."""

import signal
import sys

from alltoallv_tools.cli import main

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)  # as after Ctrl-C, nothing is left behind
    sys.exit(main())
