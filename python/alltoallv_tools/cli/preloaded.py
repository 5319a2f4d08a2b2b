"""Runs a program in a process that has been forked, as ``python`` runs it in one of its own (`run --preload`)."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from typing import Any

import __main__
from alltoallv.launch import ancestry

_kept: list[Any] = []  # the program's names live until atexit's functions have run


def variables_file(variables: dict[str, str], processors: Sequence[int]) -> int:
    """Returns a descriptor of what `main` reads: a rank's environment, and the processors that it is bound to."""
    file = os.memfd_create("environment")
    with open(file, "wb", closefd=False) as writer:
        writer.write(json.dumps([variables, [*processors]]).encode())
    return file


def main(descriptors: Sequence[int], *program: str) -> None:
    """Becomes the rank.

    Args:
        descriptors: standard input, output and error, and `variables_file`'s.
        program: a script, or ``-m`` and a module, and arguments.
    """
    *streams, file = descriptors
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    with open(file, "rb") as reader:
        variables, processors = json.loads(os.pread(reader.fileno(), os.fstat(file).st_size, 0))
    os.environ.clear()
    os.environ.update(variables)
    ancestry.began_with(variables)
    if processors:
        os.sched_setaffinity(0, processors)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if program[0] == "-m":
        sys.argv[:] = program[1:]
        sys.path.insert(0, os.getcwd())
        _kept.append(runpy.run_module(program[1], run_name="__main__", alter_sys=True))
    else:
        sys.argv[:] = program
        sys.path.insert(0, os.path.dirname(os.path.realpath(program[0])))
        _run_script(program[0])


def _run_script(path: str) -> None:
    """As ``python path`` does, in the module ``__main__``."""
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    names = vars(__main__)
    for name in [name for name in names if not name.startswith("__")]:
        del names[name]
    names.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    try:
        exec(code, names)
    except Exception as error:  # shown without the functions here, which a user does not know
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not code:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)
