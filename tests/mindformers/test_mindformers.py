"""mindformers' token dispatchers as they are, under `alltoallv.mindspore.install`, on 4 ranks on CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("dispatchers.py")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the compiled kernels, which the ranks would else compile one after the other."""
    folder = str(tmp_path_factory.mktemp("kernels"))
    program = "from alltoallv.mindspore.device_op import build; build()"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "MS_COMPILER_CACHE_PATH": folder}, check=True)
    return folder


DISPATCHERS = ("alltoall", "padded", "deredundancy", "zero_redundancy", "moev3", "moev3_deredundancy")


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_four_ranks_are_one_process(kernels: str, dispatcher: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "alltoallv", "run", "-n", "4", str(PROGRAM), dispatcher]
    env = {**os.environ, "MS_COMPILER_CACHE_PATH": kernels, "GLOG_v": "3"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"^\[(\d)\] (forward|gradients) as in one process$", done.stdout, re.MULTILINE)
    assert sorted(said) == [(str(rank), what) for rank in range(4) for what in ("forward", "gradients")]
