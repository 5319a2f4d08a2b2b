"""MindSpore's plugin for Ascend, of its wheel, on the emulator: what loads, and which symbol of CANN stops the rest."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import alltoallv_emulator as emulator

SPEC = importlib.util.find_spec("mindspore")
assert SPEC is not None
assert SPEC.origin is not None
LIBRARIES = Path(SPEC.origin).parent / "lib"
FILES = {
    "ascend/libhccl_plugin.so": "",
    "ascend/libd_collective.so": "_ZN9mindspore6device6ascend12aclrtMalloc_E",  # of the one below
    "ascend/libmindspore_ascend_res_manager.so": "rtLaunch",  # of CANN's libruntime.so, for MindSpore's libshmem.so
    "libmindspore_ascend.so.2": "rtLaunch",
}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc for empty stand-ins of CANN's other libraries")
@pytest.mark.parametrize("name", FILES)
def test_how_far_the_plugin_loads(name: str, tmp_path: Path) -> None:
    """The emulator gives libascendcl and libhccl; CANN's others are empty here, so that symbols are what is missing."""
    file = LIBRARIES / "plugin" / name
    if not file.exists():
        pytest.skip(f"this wheel of MindSpore has no {name}")
    env = emulator.environment()
    folders = (*map(str, (LIBRARIES, LIBRARIES / "plugin", LIBRARIES / "plugin/ascend", tmp_path)),)
    env["LD_LIBRARY_PATH"] = os.pathsep.join((env["LD_LIBRARY_PATH"], *folders))
    command = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(file)!r}, 2)"]
    while True:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        missing = re.search(r"(lib\S+): cannot open shared object", done.stderr)
        if missing is None:
            break
        subprocess.run(["gcc", "-shared", "-o", str(tmp_path / missing[1]), "-x", "c", os.devnull], check=True)
    symbol = re.search(r"undefined symbol: (\w+)", done.stderr)
    assert (symbol[1] if symbol else "") == FILES[name], done.stderr[-1000:]
    assert (done.returncode == 0) == (FILES[name] == "")
