"""Runs the self-test on all NPUs of this machine and writes the report to send back."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any, Literal

from alltoallv_tools.doctor import Check
from alltoallv_tools.doctor.selftest import on_ranks, reasons

SECTION = "self-test on NPUs"
SECONDS = 900
REPORT = "alltoallv-npu-report.json"


def run(devices: int | None = None) -> tuple[list[Check], dict[str, Any]]:
    """Returns the checks and rank 0's findings; see `alltoallv_tools.doctor.npu`."""
    try:  # the doctor also examines an installation without its extension
        from alltoallv import _core
        from alltoallv.errors import BackendUnavailableError
    except ImportError as error:
        return [Check(SECTION, "extension", "no", str(error), "see versions")], {}
    try:
        soc, count = _core.npu_devices()
    except BackendUnavailableError as error:
        return [Check(SECTION, "CANN", "-", str(error))], {}
    if count < 1:
        return [Check(SECTION, "devices", "no", f"{soc or 'no SoC'}, {count} devices", "see npu-smi info")], {}
    for module in ("torch", "torch_npu"):
        if find_spec(module) is None:
            return [Check(SECTION, module, "no", "not installed", 'pip install ".[npu]" (docs/ascend-start.md)')], {}
    ranks = devices or count
    result = on_ranks(ranks, SECONDS, "alltoallv_tools.doctor.npu")
    status, errors = result.returncode, result.stderr
    report = last_report(result.stdout)
    report |= {"ranks": ranks, "exit_status": status, "stderr": errors[-20000:]}
    checks = [
        Check(SECTION, name, _status(case), case.get("error") or case.get("left_out") or f"{case['seconds']:.2f} s")
        for name, case in report["cases"].items()
    ]
    if "running" in report:
        checks.append(Check(SECTION, report["running"], "no", "rank 0 did not come to its end"))
    if not report["cases"] or (status != 0 and all(check.status != "no" for check in checks)):
        reason = " | ".join(reasons(errors)) or f"exit status {status}"
        checks.append(Check(SECTION, "ranks", "no", reason))
    return checks, report


def _status(case: dict[str, Any]) -> Literal["ok", "no", "-"]:
    return "-" if "left_out" in case else "ok" if case["ok"] else "no"


def last_report(out: str) -> dict[str, Any]:
    """Returns the last report of rank 0; skips the line that it was writing when it died."""
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            try:
                report: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return report
    return {"cases": {}}
