"""The operator in MindSpore's own queue, built for CPU: on Ascend only pointers and stream are others."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mint_calls import CALLS
from msrun_jobs import HERE, msrun

import alltoallv_emulator as emulator


@pytest.mark.skipif(not all(map(shutil.which, ("g++", "ninja"))), reason="needs g++ and ninja to compile the operator")
@pytest.mark.timeout(900)  # the compiler takes minutes on a busy machine
def test_exchange_in_mindspores_queue(tmp_path: Path) -> None:
    job = msrun(
        tmp_path, 2, HERE / "run_device_op.py", str(tmp_path / "build"), timeout=850, env=emulator.environment()
    )
    for rank in range(2):
        lines = job.logs[f"worker_{rank}.log"].splitlines()
        said = [line for line in lines if not re.search(" has waited |alltoallv emulator", line)]  # for the compiler
        expected = ["float32 wrong 0", "bfloat16 wrong 0", "view True", "gaps True", "learnt True", "gradient True"]
        expected += ["into_outputs True", "others True", "sums True", "quantized True", "operations True"]
        expected += ["graphs True", "quantized_graphs True", "over_hccl True"]
        assert said[:14] == expected, job.logs[f"worker_{rank}.log"][-4000:]
        assert said[14].startswith("PeerMismatchError: "), said
        assert sorted(said[15:]) == sorted(f"mint {name} True" for name in CALLS), said
    assert job.code == 0, job.output


def test_the_exchange_goes_to_the_stream_that_mindspore_hands_over() -> None:
    """On emulated NPUs: the operator's C function, called as its kernel calls it on Ascend."""
    command = [sys.executable, "-m", "alltoallv", "run", "-n", "2", str(HERE / "run_device_stream.py")]
    done = subprocess.run(command, env=emulator.environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"[{rank}] enqueued, then right" in done.stdout
        assert f"[{rank}] in a graph, too" in done.stdout
        assert f"[{rank}] collectives of a group" in done.stdout
        assert f"[{rank}] PeerMismatchError: operator #" in done.stdout
