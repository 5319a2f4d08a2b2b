"""Runs a Paddle program that was written for GPUs, unchanged, on CPU.

python -m alltoallv run -n 4 examples/paddle_on_cpu.py program.py [arguments of program.py]
"""

import os
import runpy
import sys

try:
    import alltoallv.paddle
except ModuleNotFoundError as error:
    raise SystemExit(str(error)) from None  # it names the command that installs Paddle

with alltoallv.paddle.install():
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # from where the program imports
    runpy.run_path(sys.argv[0], run_name="__main__")
