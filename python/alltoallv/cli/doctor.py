"""``doctor``: says what works on this machine, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from itertools import groupby
from typing import Any

from alltoallv import __version__
from alltoallv.doctor import Check, machine, selftest, software

_EPILOG = """\
A line per check: ok; no: does not work, with what to do; -: absent or of no consequence. The last ones
exchange data between two processes over each data path, and say which path "auto" takes.

The exit code is 0 if the shm backend works here, 1 otherwise.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``doctor``."""
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")


def main(args: argparse.Namespace) -> int:
    """Runs the checks and prints them; returns the exit code."""
    checks, measured = examine()
    works = all(check.status != "no" for check in checks if check.required)
    if args.json:
        document = {
            "alltoallv": __version__,
            "works": works,
            "checks": [dataclasses.asdict(check) for check in checks],
            "self_test": measured,
        }
        print(json.dumps(document, indent=2))
    else:
        print(f"alltoallv {__version__}\n{as_lines(checks)}\n")
        print(f"The shm backend {'works' if works else 'does not work'} here.")
    return 0 if works else 1


def examine() -> tuple[list[Check], dict[str, Any]]:
    """All checks in the order of their sections, and the self-test's measurements."""
    versions = software.versions()
    before = [
        *versions,
        *machine.checks(),
        *software.environment(),
        *software.frameworks(),
        *software.devices(),
    ]
    if any(check.status == "no" for check in versions):
        skipped = Check(selftest.SECTION, "exchange", "no", "not run: see versions", required=True)
        return [*before, skipped], {}
    tests, measured = selftest.run()
    return [*before, *tests], measured


def as_lines(checks: list[Check]) -> str:
    """The report as text: a heading per section, a line per check."""
    width = max(len(check.name) for check in checks)
    lines = []
    for section, members in groupby(checks, key=lambda check: check.section):
        lines.append(f"\n{section}")
        for check in members:
            advice = f"; {check.advice}" if check.advice else ""
            lines.append(f"  {check.status:2}  {check.name:{width}}  {check.detail}{advice}")
    return "\n".join(lines)
