"""Runs the self-test on all NPUs of this machine and writes the report to send back."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from alltoallv.doctor import Check
from alltoallv.doctor.selftest import reasons

SECTION = "self-test on NPUs"
SECONDS = 900
REPORT = "alltoallv-npu-report.json"


def run(devices: int | None = None) -> tuple[list[Check], dict[str, Any]]:
    """Returns the checks and what rank 0 has found; see `alltoallv.doctor.npu`."""
    try:  # the doctor also examines an installation without its extension
        from alltoallv import hccl
        from alltoallv.errors import BackendUnavailableError
    except ImportError as error:
        return [Check(SECTION, "extension", "no", str(error), "see versions")], {}
    try:
        soc, count = hccl.devices()
    except BackendUnavailableError as error:
        return [Check(SECTION, "CANN", "-", str(error))], {}
    if count < 1:
        return [Check(SECTION, "devices", "no", f"{soc or 'no SoC'}, {count} devices", "see npu-smi info")], {}
    for module in ("torch", "torch_npu"):
        if find_spec(module) is None:
            return [Check(SECTION, module, "no", "not installed", "pip install torch==2.13.0 torch_npu==2.13.0")], {}
    ranks = devices or count
    command = [sys.executable, "-m", "alltoallv", "run", "-n", str(ranks), "--timeout", str(SECONDS), "--no-prefix"]
    command += ["-m", "alltoallv.doctor.npu"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS + 60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Check(SECTION, "ranks", "no", str(error))], {}
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"cases": {}}
    found |= {"ranks": ranks, "exit_status": result.returncode, "stderr": result.stderr[-20000:]}
    checks = [
        Check(SECTION, name, "ok" if case["ok"] else "no", case.get("error") or f"{case['seconds']:.2f} s")
        for name, case in found["cases"].items()
    ]
    if not lines or (result.returncode != 0 and all(check.status == "ok" for check in checks)):
        reason = " | ".join(reasons(result.stderr)) or f"exit status {result.returncode}"
        checks.append(Check(SECTION, "ranks", "no", reason))
    return checks, found
