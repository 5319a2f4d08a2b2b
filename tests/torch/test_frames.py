"""How few functions of Python a warm call enters: the limits stand in docs/frames.py, which counts them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FRAMES = Path(__file__).parents[2] / "docs" / "frames.py"


def test_calls_enter_few_functions() -> None:
    command = [sys.executable, "-m", "alltoallv", "run", "-n", "2", str(FRAMES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.findall(r"(\d+) of +(\d+)$", done.stdout, re.MULTILINE)
    assert len(counted) > 44
    assert done.stdout.count("MoE dispatch and combine: ") == 4
    assert all(int(found) <= int(most) for found, most in counted), done.stdout
