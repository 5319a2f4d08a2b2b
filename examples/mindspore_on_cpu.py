"""Runs a MindSpore program that was written for NPUs, unchanged, on CPU.

msrun --worker_num=2 --local_worker_num=2 --join=True examples/mindspore_on_cpu.py program.py [arguments of program.py]
"""

import os
import runpy
import sys

try:
    import alltoallv.mindspore
except ModuleNotFoundError as error:
    raise SystemExit(str(error)) from None  # it names the command that installs MindSpore

with alltoallv.mindspore.install():
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # from where the program imports
    runpy.run_path(sys.argv[0], run_name="__main__")
