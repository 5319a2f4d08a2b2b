"""The operator in MindSpore's own queue, built for CPU: on Ascend only pointers and stream are others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msrun_jobs import HERE, msrun


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ("g++", "ninja"))), reason="needs g++ and ninja to compile the operator")
def test_exchange_in_mindspores_queue(tmp_path: Path) -> None:
    job = msrun(tmp_path, 2, HERE / "run_device_op.py", str(tmp_path / "build"), timeout=250)
    for rank in range(2):
        lines = job.logs[f"worker_{rank}.log"].splitlines()
        said = [line for line in lines if " has waited " not in line]  # for the compiler
        assert said[:3] == ["float32 wrong 0", "bfloat16 wrong 0", "view True"], job.logs[f"worker_{rank}.log"][-4000:]
        assert said[3].startswith("PeerMismatchError: "), said[3]
    assert job.code == 0, job.output
