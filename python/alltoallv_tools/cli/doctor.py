"""``doctor``: describes what works on this machine, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from alltoallv import __version__
from alltoallv_tools import numbers
from alltoallv_tools.cli.outputs import check_files, write_text
from alltoallv_tools.doctor import Check, kernels, machine, npu_selftest, selftest, software

_EPILOG = """\
Each check prints a line: "ok" if something works, "no" with advice if it does not, "-" if it is absent and need not be
there. The last checks exchange data between two processes over each data path, and name which one is taken by default.

--selftest also runs one process on every NPU, compares the results of HCCL with their definitions, and writes a report
(docs/ascend.md).

--kernels also runs the kernels for Ascend by their aclnn interface, on a device or on the emulator, and lists the bits
that differ from the NumPy reference.

The exit code is 0 if shared memory works here and what --selftest and --kernels run passes; 1 otherwise.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``doctor``."""
    parser.epilog = _EPILOG
    parser.add_argument("--selftest", action="store_true", help=f"test all NPUs and write {npu_selftest.REPORT}")
    parser.add_argument("--devices", type=numbers.count, help="with --selftest: test only this many NPUs")
    parser.add_argument("--kernels", action="store_true", help="compare the bits of the kernels for Ascend")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of lines")


def main(args: argparse.Namespace) -> int:
    """Runs the checks and prints them; returns the exit code."""
    report = Path(npu_selftest.REPORT)
    try:
        if args.devices and not args.selftest:
            raise ValueError("--devices is given without --selftest, expected both")
        check_files(selftest=report if args.selftest else None)
    except ValueError as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2
    checks, measured = examine()
    on_npu: list[Check] = []
    npu: dict[str, Any] = {}
    if args.selftest:
        on_npu, npu = npu_selftest.run(args.devices)
    bits: dict[str, Any] = {}
    if args.kernels:
        compared, bits = kernels.run()
        on_npu = [*on_npu, *compared]
    checks += on_npu
    works = all(check.status != "no" for check in checks if check.required)
    document = {
        "alltoallv": __version__,
        "works": works,
        "checks": [dataclasses.asdict(check) for check in checks],
        "self_test": measured,
    }
    if args.selftest:
        document |= {"machine": platform.platform(), "npu": npu}
    if args.kernels:
        document |= {"kernels": bits}
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        print(f"alltoallv {__version__}\n{as_lines(checks)}\n")
        print(f"The shm backend {'works' if works else 'does not work'} here.")
    if args.selftest:
        write_text(report, json.dumps(document, indent=2))
        if not args.json:
            asked = ": please attach it to an issue (docs/ascend.md)" if npu and not npu.get("emulated") else ""
            print(f"Everything is in {npu_selftest.REPORT}{asked}.")
    return 0 if works and all(check.status != "no" for check in on_npu) else 1


def examine() -> tuple[list[Check], dict[str, Any]]:
    """Runs all checks, in the order of their sections; returns them and the self-test's measurements."""
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
    """Formats the report as text: a heading per section, a line per check."""
    width = max(len(check.name) for check in checks)
    lines = []
    for section, members in groupby(checks, key=lambda check: check.section):
        lines.append(f"\n{section}")
        for check in members:
            advice = f"; {check.advice}" if check.advice else ""
            lines.append(f"  {check.status:2}  {check.name:{width}}  {check.detail}{advice}")
    return "\n".join(lines)
