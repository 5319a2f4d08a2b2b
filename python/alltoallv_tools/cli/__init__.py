"""The command line: ``python -m alltoallv COMMAND``.

A command is a module with ``add_arguments(parser)`` and ``main(args) -> int``, imported when it is called; where it has
``completed(arguments)``, the parser gets what this returns.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

# name -> (module, one line of help)
_COMMANDS = {
    "run": ("alltoallv_tools.cli.run", "start N ranks of a Python program on this host"),
    "demo": ("alltoallv_tools.cli.demo", "send real data to experts on 4 ranks and back, and check every bit"),
    "bench": ("alltoallv_tools.cli.bench", "measure the collectives beside MPI, gloo and MindSpore"),
    "trace": ("alltoallv_tools.cli.trace", "show what a job has sent, and which ranks were late"),
    "top": ("alltoallv_tools.cli.top", "show what the ranks of a running job do"),
    "plan": ("alltoallv_tools.cli.plan", "predict times on a cluster that you do not have"),
    "doctor": ("alltoallv_tools.cli.doctor", "describe what works on this machine and what is missing"),
}


class _Parser(argparse.ArgumentParser):
    """Names an option that is wrong or missing once, by the first of its names, and what one that is none may mean."""

    def error(self, message: str) -> NoReturn:
        import difflib

        meant = []
        if message.startswith("unrecognized arguments:"):
            valid = {*self._options()}
            names = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
            meant = [near for name in names if name not in valid for near in difflib.get_close_matches(name, valid, 1)]
        message += f"; did you mean {', '.join(meant)}?" if meant else ""
        super().error(re.sub(r"(?<=\s)(-[\w-]+)(/-[\w-]+)+", r"\1", message))

    def _options(self) -> Iterator[str]:
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._options()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. ``argv`` defaults to ``sys.argv[1:]``."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # whoever started us has closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # the kernel would not keep how ranks have ended
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    width = max(map(len, _COMMANDS))
    parser = _Parser(
        prog="python -m alltoallv",
        description="AllToAllV with one meaning on Ascend NPU, NVIDIA GPU and CPU.",
        epilog="commands:\n" + "\n".join(f"  {name:{width}}  {text}" for name, (_, text) in _COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help=", ".join(_COMMANDS))
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see COMMAND --help")
    rest.required = False  # Python 3.11 and older say otherwise
    chosen = parser.parse_args(argv)

    try:
        code = _run(chosen.command, chosen.arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # nobody reads our output any more; Python would report it again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:  # a file cannot be written
        print(f"{chosen.command}: {error}", file=sys.stderr)
        return 2
    return code


def _run(command: str, arguments: Sequence[str]) -> int:
    name, text = _COMMANDS[command]
    module = importlib.import_module(name)
    parser = _Parser(
        prog=f"python -m alltoallv {command}",
        description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    if hasattr(module, "completed"):
        arguments = module.completed(arguments)
    code: int = module.main(parser.parse_args(arguments))
    return code


def _version() -> str:
    try:
        return "alltoallv " + importlib.metadata.version("alltoallv")
    except importlib.metadata.PackageNotFoundError:
        return "alltoallv (not installed)"
