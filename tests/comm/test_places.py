"""What tells a host from others, where there is no /proc."""

from __future__ import annotations

import subprocess
import sys

import pytest

PLACE = "import sys, ctypes; from alltoallv import _core; {} print(_core.this_place())"
GONE = "assert ctypes.CDLL(None).umount2(b'/proc', 2) == 0;"  # 2: MNT_DETACH


def place(hidden: bool) -> str:
    own = ["unshare", "--mount"] if hidden else []
    command = [*own, sys.executable, "-c", PLACE.format(GONE if hidden else "")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_hosts_without_proc_are_no_common_place():
    """Ranks there would look for each other's memory on one host."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no namespaces of mounts can be made here")
    assert place(False) == place(False)
    assert len({place(True), place(True), place(False)}) == 3
