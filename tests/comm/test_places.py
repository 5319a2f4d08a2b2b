"""What tells a host from others, where there is no /proc."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from environments import clean_environment

PLACE = "import sys, ctypes; from alltoallv import _core; {} print(_core.this_place())"
GONE = "assert ctypes.CDLL(None).umount2(b'/proc', 2) == 0;"  # 2: MNT_DETACH


def place(hidden: bool) -> str:
    own = ["unshare", "--mount"] if hidden else []
    command = [*own, sys.executable, "-c", PLACE.format(GONE if hidden else "")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def unshare(*options: str) -> list[str]:
    """Returns the command that makes namespaces, as root can; where it fails the test is skipped with its reason."""
    command = ["unshare", *options]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"{' '.join(command)} fails here: {tried.stderr.strip()}")
    return command


def test_hosts_without_proc_are_no_common_place():
    """Ranks there would look for each other's memory on one host."""
    unshare("--mount")
    assert place(False) == place(False)
    assert len({place(True), place(True), place(False)}) == 3


RANK = """
from alltoallv import Communicator
from alltoallv.errors import AllToAllVError
try:
    Communicator.from_env(timeout=20)
except AllToAllVError as error:
    print(error)
"""


def test_containers_with_process_numbers_of_their_own_are_told_what_to_give_them():
    apart = unshare("--pid", "--fork", "--kill-child")
    env = clean_environment() | {"ALLTOALLV_WORLD_SIZE": "2", "ALLTOALLV_JOB_ID": f"containers-{os.getpid()}"}
    ranks = [
        subprocess.Popen(
            [*own, sys.executable, "-c", RANK],
            env=env | {"ALLTOALLV_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate(([], apart))
    ]
    for rank in ranks:
        told = rank.communicate(timeout=60)[0]
        assert "run in different pid namespaces: give their containers one (docker run --pid=host" in told, told
