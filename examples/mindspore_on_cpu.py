"""Runs a MindSpore program that was written for NPUs, unchanged, on CPU.

msrun --worker_num=2 --local_worker_num=2 --join=True examples/mindspore_on_cpu.py program.py [arguments of program.py]
"""

import runpy
import sys

import alltoallv.mindspore

with alltoallv.mindspore.install():
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
