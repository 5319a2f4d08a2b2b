"""Ranks of different releases of the package refuse each other by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import alltoallv
from alltoallv import _core
from alltoallv_tools.ports import free_port

PROGRAM = """
import sys
from alltoallv import Communicator
from alltoallv.errors import InvalidParamError
try:
    Communicator.from_env(backend=sys.argv[1], timeout=30)
except InvalidParamError as error:
    print(error)
"""


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_two_releases(tmp_path: Path, backend: str) -> None:
    """Rank 1 has a copy of the package whose extension is, but for its number, this one."""
    source, copy = Path(alltoallv.__file__).parent, tmp_path / "other" / "alltoallv"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "_core*.so"))
    own = alltoallv.__version__.encode()
    other = own[:-1] + (b"8" if own.endswith(b"9") else b"9")
    extension = Path(_core.__file__)
    code = extension.read_bytes()
    assert code.count(b"alltoallv release " + own + b"\0") == 1
    (copy / extension.name).write_bytes(code.replace(b"alltoallv release " + own, b"alltoallv release " + other))
    port, jobs = str(free_port()), []
    for rank, folder in enumerate((source.parent, copy.parent)):
        env = os.environ | {
            "ALLTOALLV_RANK": str(rank),
            "ALLTOALLV_WORLD_SIZE": "2",
            "ALLTOALLV_JOB_ID": f"{tmp_path.name} {port}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "PYTHONPATH": str(folder),
        }
        command = [sys.executable, "-c", PROGRAM, backend]
        jobs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    texts = [job.communicate(timeout=60)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    for text in texts:
        assert f"rank 1 has release = '{other.decode()}', rank 0 has release = '{own.decode()}'" in text
