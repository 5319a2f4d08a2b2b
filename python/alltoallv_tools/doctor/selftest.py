"""Runs the self-test on two processes and judges the results."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from alltoallv_tools.doctor import Check

SECTION = "self-test (2 processes)"
SECONDS = 60


def run() -> tuple[list[Check], dict[str, Any]]:
    """Returns the checks, and the ranks' measurements: case -> bytes, seconds, carried, correct."""
    result = on_ranks(2, SECONDS, "alltoallv_tools.doctor.ranks")
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return [_failure(" | ".join(reasons(result.stderr)) or f"exit status {result.returncode}")], {}
    measured: dict[str, Any] = json.loads(lines[-1])
    checks = [judge(name, case) for name, case in measured.items()]
    if result.returncode != 0:
        checks.append(_failure(" | ".join(reasons(result.stderr)) or "a rank received wrong bytes"))
    return checks, measured


def on_ranks(ranks: int, seconds: int, module: str) -> subprocess.CompletedProcess[str]:
    """Runs a module on ranks. If they cannot start or do not end, the status is -1, with what they have printed."""
    command = [sys.executable, "-m", "alltoallv", "run", "-n", str(ranks), "--timeout", str(seconds), "--no-prefix"]
    command += ["-m", module]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False)
    except subprocess.TimeoutExpired as late:
        return subprocess.CompletedProcess(command, -1, _text(late.stdout), f"{_text(late.stderr)}\n{late}")
    except OSError as error:
        return subprocess.CompletedProcess(command, -1, "", str(error))


def _text(output: Any) -> str:
    """Returns the output of a process that was ended, which can be bytes or None, as text."""
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def judge(name: str, case: dict[str, Any]) -> Check:
    """Judges one case: the bytes must be right, and must have used the requested path."""
    required = name.startswith("auto")
    paths = " and ".join(case["carried"]) or "no path"
    if not case["correct"]:
        advice = "please report this with the output of doctor --json"
        return Check(SECTION, name, "no", f"wrong bytes arrived over {paths}", advice, required=True)
    rate = case["bytes"] / case["seconds"] / 1e9
    speed = f"{case['bytes'] >> 10} KiB each way in {case['seconds'] * 1e6:.1f} µs, {rate:.2f} GB/s"
    if required:
        return Check(SECTION, name, "ok", f"takes {paths}: {speed}", required=True)
    if list(case["carried"]) == [name]:
        return Check(SECTION, name, "ok", speed)
    return Check(SECTION, name, "no", f"took {paths} instead: {speed}", _ADVICE.get(name, ""))


_ADVICE = {
    "cma": "see process_vm_readv above",
    "push": "ALLTOALLV_POOL=0 or an exhausted budget keeps arrays private",
    "pull": "ALLTOALLV_POOL=0 or an exhausted budget keeps arrays private",
}


def reasons(stderr: str) -> list[str]:
    """Returns the lines that describe what went wrong, without the frames of tracebacks."""
    lines = [line for line in stderr.splitlines() if line and not line.startswith((" ", "Traceback"))]
    return list(dict.fromkeys(lines))[:3]


def _failure(reason: str) -> Check:
    return Check(SECTION, "exchange", "no", reason, "see the lines that say no above", required=True)
