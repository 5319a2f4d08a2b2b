"""The operator in MindSpore's own queue, built for CPU: on Ascend only pointers and stream are others."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

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


compiles = pytest.mark.skipif(
    not all(map(shutil.which, ("g++", "ninja"))), reason="needs g++ and ninja to compile the operator"
)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the compiled operator."""
    folder = str(tmp_path_factory.mktemp("operator"))
    program = "import sys; from alltoallv.mindspore.device_op import build; build(folder=sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, folder], timeout=850, check=True)
    return folder


@compiles
@pytest.mark.timeout(900)  # the compiler takes minutes on a busy machine
@pytest.mark.parametrize(("graphs", "kernel_calls"), [("some", 3), pytest.param("all", 6, marks=pytest.mark.slow)])
def test_exchange_in_mindspores_queue(build: str, graphs: str, kernel_calls: int) -> None:
    for said in job("run_device_op.py", build, graphs, timeout=400):
        expected = ["float32 wrong 0", "bfloat16 wrong 0", "view True", "gaps True", "learnt True", "gradient True"]
        expected += ["into_outputs True", "others True", "sums True", "quantized True", "operations True"]
        expected += ["graphs True", "quantized_graphs True", "over_hccl True"]
        expected += [f"kernel_calls {kernel_calls}", "with_capacity True"]
        assert said[: len(expected)] == expected
        mismatch, *calls = said[len(expected) :]
        assert mismatch.startswith("PeerMismatchError: "), said
        assert sorted(calls) == sorted(f"mint {name} True" for name in CALLS)


@compiles
@pytest.mark.timeout(900)
def test_sums_in_the_order_of_ranks(build: str) -> None:
    for said in job("run_ordered.py", build, timeout=400, ranks=3):
        assert said == ["calls []", "by variable True", "by option True", "agreed"]


@compiles
@pytest.mark.timeout(900)
def test_primitives_in_graphs(build: str) -> None:
    for said in job("run_primitives.py", build, timeout=400):
        assert said == ["as NumPy", "in order", "trained", "moved", "True"]


def test_the_exchange_goes_to_the_stream_that_mindspore_hands_over() -> None:
    """On emulated NPUs: the operator's C function, called as its kernel calls it on Ascend."""
    for said in job("run_device_stream.py", timeout=120):
        assert said[:3] == ["enqueued, then right", "also in a graph", "collectives of a group"]
        assert said[3].startswith("PeerMismatchError: operator #")
