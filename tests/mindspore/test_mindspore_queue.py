"""The operator in MindSpore's own queue, built for CPU: on Ascend only pointers and stream are others."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mint_calls import CALLS
from msrun_jobs import HERE

import alltoallv_emulator as emulator


def job(script: str, *arguments: str, timeout: float, ranks: int = 2) -> list[list[str]]:
    """The lines that each rank on emulated NPUs has printed."""
    command = [sys.executable, "-m", "alltoallv", "run", "-n", str(ranks), str(HERE / script), *arguments]
    env = {**emulator.environment(), "OMP_NUM_THREADS": "1", "GLOG_v": "3", "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [re.findall(rf"^\[{rank}\] (.*)", done.stdout, re.MULTILINE) for rank in range(ranks)]


@pytest.mark.skipif(not all(map(shutil.which, ("g++", "ninja"))), reason="needs g++ and ninja to compile the operator")
@pytest.mark.timeout(900)  # the compiler takes minutes on a busy machine
def test_exchange_in_mindspores_queue(tmp_path: Path) -> None:
    for said in job("run_device_op.py", str(tmp_path / "build"), timeout=850):
        expected = ["float32 wrong 0", "bfloat16 wrong 0", "view True", "gaps True", "learnt True", "gradient True"]
        expected += ["into_outputs True", "others True", "sums True", "quantized True", "operations True"]
        expected += ["graphs True", "quantized_graphs True", "over_hccl True", "kernel_calls 6", "with_capacity True"]
        assert said[: len(expected)] == expected
        mismatch, *calls = said[len(expected) :]
        assert mismatch.startswith("PeerMismatchError: "), said
        assert sorted(calls) == sorted(f"mint {name} True" for name in CALLS)
    # Sums in the order of ranks, by the same operator.
    for said in job("run_ordered.py", str(tmp_path / "build"), timeout=400, ranks=3):
        assert said == ["calls []", "by variable True", "by option True", "agreed"]
    # MindSpore's primitives in graphs, by the kernels of the same build.
    for said in job("run_primitives.py", str(tmp_path / "build"), timeout=400):
        assert said == ["as NumPy", "in order", "trained", "True"]


def test_the_exchange_goes_to_the_stream_that_mindspore_hands_over() -> None:
    """On emulated NPUs: the operator's C function, called as its kernel calls it on Ascend."""
    for said in job("run_device_stream.py", timeout=120):
        assert said[:3] == ["enqueued, then right", "also in a graph", "collectives of a group"]
        assert said[3].startswith("PeerMismatchError: operator #")
