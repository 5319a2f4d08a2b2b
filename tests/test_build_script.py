"""build.sh on machines without CANN: what it prints, and what it asks for."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "build.sh"


def build(*arguments: str, home: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "ASCEND_HOME_PATH"}
    if home is not None:
        env["ASCEND_HOME_PATH"] = home
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, check=False, env=env)


def test_help():
    result = build("--help")
    assert result.returncode == 0
    for word in ("--soc=", "ascend910b", "ascend910_93", "--vendor=", "--build-dir=", "ASCEND_HOME_PATH"):
        assert word in result.stdout


def test_without_cann(tmp_path):
    """One sentence describes what is missing."""
    absent = str(tmp_path / "absent")
    for home, words in (
        (None, "ASCEND_HOME_PATH is not set; source CANN's set_env.sh first"),
        (absent, f"ASCEND_HOME_PATH is {absent}, which is no folder"),
        (str(tmp_path), f"no bisheng below {tmp_path}"),
    ):
        result = build("--soc=ascend910b", home=home)
        assert result.returncode == 1
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("build.sh: needs CANN") and words in line  # noqa: PT018


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--soc=ascend310p", "--soc is ascend310p, expected ascend910b or ascend910_93"),
        ("--soc ascend310p", "--soc is ascend310p, expected ascend910b or ascend910_93"),
        ("--vendor=a/b", "--vendor is 'a/b'"),
        ("--vendor", "--vendor has no value"),
        ("--fast", "--fast is no option"),
    ],
)
def test_wrong_options(argument, words):
    result = build(*argument.split())
    assert result.returncode == 2
    assert words in result.stderr
