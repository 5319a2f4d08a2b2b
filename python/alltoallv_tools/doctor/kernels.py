"""Runs the kernels for Ascend and names which bits differ: on a device where CANN is, else on the emulator."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from typing import Any

import alltoallv_emulator
from alltoallv_tools.doctor import Check

SECTION = "kernels"
SECONDS = 600
LIBRARY = "libcust_opapi.so"


def run() -> tuple[list[Check], dict[str, Any]]:
    """Returns a check per kernel, and per case that differs, and the differences by their names."""
    where, env = "a device", dict(os.environ)
    if not loads():
        where = "the emulator"
        try:
            env = alltoallv_emulator.environment()
        except FileNotFoundError as error:
            return [Check(SECTION, "kernels", "no", str(error), "build the package with CANN: ./build.sh --help")], {}
    command = [sys.executable, "-m", "alltoallv_tools.doctor.kernel_bits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=env)
    except subprocess.TimeoutExpired:
        return [Check(SECTION, "kernels", "no", f"on {where}: no end after {SECONDS} s")], {}
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        return [Check(SECTION, "kernels", "no", f"on {where}: {reason}")], {}
    compared: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return kernel_checks(compared, where), {"where": where, "compared": compared}


def loads() -> bool:
    """True if the loader finds the library of our operators by itself."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def kernel_checks(compared: dict[str, dict[str, Any]], where: str) -> list[Check]:
    """Returns a check for the equal cases of each kernel, and one for each case that differs."""
    equal: dict[str, list[int]] = {}
    for name, case in compared.items():
        if case["different"] == 0:
            equal.setdefault(name.partition(",")[0], []).append(case["elements"])
    checks = [
        Check(SECTION, kernel, "ok", f"{sum(sizes)} of {sum(sizes)} elements equal in {len(sizes)} cases, on {where}")
        for kernel, sizes in equal.items()
    ]
    return checks + [judge(name, case, where) for name, case in compared.items() if case["different"] > 0]


def judge(name: str, case: dict[str, Any], where: str) -> Check:
    first = case["first"]
    detail = f"{case['different']} of {case['elements']} differ, on {where}: element {first['index']} is {first['got']}"
    return Check(SECTION, name, "no", f"{detail}, expected {first['expected']}", "please report it (docs/ascend.md)")
